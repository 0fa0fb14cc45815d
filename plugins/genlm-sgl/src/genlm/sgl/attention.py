"""Attention on a CPU in plain PyTorch, for requests of similar length together.

SGLang's own (``torch_native``) computes one request after the other, and for each request all
positions of its prompt, although only the new ones are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch.nn.functional import scaled_dot_product_attention

#: The most positions that one group gathers: 48 MiB of keys in a model of 135M parameters.
MAX_GROUP_POSITIONS = 1 << 16

#: The largest share of a group that may be padding.
MAX_PADDING_SHARE = 0.25


@frozen(eq=False)
class Group:
    """Requests with the same number of new tokens, computed together.

    Attributes:
        tokens: ``[requests, new]``, their tokens in the batch.
        places: ``[requests, length]``, the places of their keys and values in the pool. A shorter
            request repeats its last place, which is masked.
        mask: Added to the scores, ``[requests, 1, new, length]``; ``None`` if a token attends to
            all positions, or to all positions up to its own.
        from_the_beginning: Whether the new tokens are the beginning of their contexts.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None
    from_the_beginning: bool

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float | None,
        cap: float = 0,
    ) -> torch.Tensor:
        """The outputs of :attr:`tokens`.

        Args:
            query: ``[tokens, heads, size]``, of the whole batch.
            keys: ``[places, key heads, size]``, the pool.
            values: ``[places, key heads, size]``, the pool.
            scaling: The factor of scores; ``None`` means one over the root of the size.
            cap: The bound on the absolute values of scores; 0 means no cap.

        Returns:
            ``[requests, new, heads, size]``.
        """
        asked = query[self.tokens].transpose(1, 2)  # [requests, heads, new, size]
        known, values = (
            each[self.places].transpose(1, 2).to(query.dtype) for each in (keys, values)
        )
        requests, heads, new, size = asked.shape
        if new == 1:  # then the query heads that share a key count as further queries
            asked = asked.reshape(requests, known.shape[1], -1, size)
        causal = self.mask is None and self.from_the_beginning and new > 1
        if cap:
            out = _capped(asked, known, values, self.mask, causal, scaling, cap)
        else:
            out = scaled_dot_product_attention(
                asked,
                known,
                values,
                attn_mask=self.mask,
                is_causal=causal,
                scale=scaling,
                enable_gqa=asked.shape[1] != known.shape[1],
            )
        return out.reshape(requests, heads, new, -1).transpose(1, 2)


def _capped(
    asked: torch.Tensor,
    known: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    cap: float,
) -> torch.Tensor:
    """Attention with capped scores, which PyTorch's own attention lacks."""
    if asked.shape[1] != known.shape[1]:
        shared = asked.shape[1] // known.shape[1]
        known, values = (each.repeat_interleave(shared, dim=1) for each in (known, values))
    scores = asked @ known.transpose(-1, -2)
    scores = scores * (asked.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = cap * torch.tanh(scores / cap)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def groups(
    tables: torch.Tensor,
    lengths: Sequence[int],
    new: Sequence[int],
    dtype: torch.dtype,
    before: int | None = None,
) -> Iterator[Group]:
    """Divide a batch into groups.

    Args:
        tables: ``[requests, longest]``, the place in the pool of each position of each request.
        lengths: The length of each request, including its new tokens.
        new: How many tokens of each request are new.
        dtype: The dtype of the queries.
        before: How many positions before its own a token attends to; ``None`` means all.
    """
    ends = torch.tensor(new).cumsum(0).tolist()
    for members in _alike(lengths, new):
        count, longest = new[members[0]], lengths[members[-1]]
        begins = torch.tensor([ends[i] - count for i in members])
        own = torch.tensor([lengths[i] for i in members]).unsqueeze(1)
        places = torch.minimum(torch.arange(longest), own - 1)
        last_seen = own - count + torch.arange(count)  # [requests, new]
        from_the_beginning = count == longest
        narrow = before is not None and longest > before + 1
        alike = count == 1 and lengths[members[0]] == longest
        mask = None
        if narrow or not (from_the_beginning or alike):
            hidden = torch.arange(longest) > last_seen.unsqueeze(-1)
            if before is not None:
                hidden |= torch.arange(longest) < last_seen.unsqueeze(-1) - before
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            mask = mask.unsqueeze(1)
        yield Group(
            begins.unsqueeze(1) + torch.arange(count),
            tables[torch.tensor(members)].gather(1, places),
            mask,
            from_the_beginning,
        )


def _alike(lengths: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """The indices of the requests of each group, shortest first."""
    group: list[int] = []
    filled = 0
    for i in sorted(range(len(new)), key=lambda i: (new[i], lengths[i])):
        size = (len(group) + 1) * lengths[i]
        fits = (
            size <= MAX_GROUP_POSITIONS and size - filled - lengths[i] <= MAX_PADDING_SHARE * size
        )
        if group and not (fits and new[i] == new[group[0]]):
            yield group
            group, filled = [], 0
        group.append(i)
        filled += lengths[i]
    if group:
        yield group


def install() -> None:
    """Let SGLang use this attention for ``torch_native``."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(_backend())


def is_installed(backend: Any) -> bool:
    """Whether a model uses this attention."""
    return hasattr(backend, "_run_groups")


def _backend() -> type:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class GroupedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """SGLang's own attention backend, except for attention to earlier positions of the same
        text."""

        _groups: dict[int | None, list[Group]]
        _cap: float

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._groups = {}  # by window, because they are the same in all layers of a forward

        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **how: Any) -> Any:
            self._cap = layer.logit_cap
            return super().forward_extend(q, k, v, layer, *rest, **how)

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **how: Any) -> Any:
            self._cap = layer.logit_cap
            return super().forward_decode(q, k, v, layer, *rest, **how)

        def _run_sdpa_forward_extend(self, *batch: Any, **how: Any) -> Any:
            query, output, keys, values, tables, indices, lengths, _, new, encoder = batch
            if not how["causal"] or encoder is not None:
                return super()._run_sdpa_forward_extend(*batch, **how)
            where = (tables, indices, lengths, new)
            return self._run_groups(query, output, keys, values, where, how)

        def _run_sdpa_forward_decode(self, *batch: Any, **how: Any) -> Any:
            query, output, keys, values, tables, indices, lengths, encoder = batch
            if how["is_cross_attn"] or encoder is not None:
                return super()._run_sdpa_forward_decode(*batch, **how)
            where = (tables, indices, lengths, torch.ones_like(lengths))
            return self._run_groups(query, output, keys, values, where, how)

        def _run_groups(
            self,
            query: Any,
            output: Any,
            keys: Any,
            values: Any,
            where: Any,
            how: Mapping[str, Any],
        ) -> Any:
            before = how["sliding_window_size"]
            if before not in self._groups:
                tables, indices, lengths, new = where
                tables = tables[indices, : int(lengths.max())].long()
                self._groups[before] = list(
                    groups(tables, lengths.tolist(), new.tolist(), query.dtype, before)
                )
            for group in self._groups[before]:
                output[group.tokens] = group.attend(query, keys, values, how["scaling"], self._cap)
            return output

    return GroupedAttention
