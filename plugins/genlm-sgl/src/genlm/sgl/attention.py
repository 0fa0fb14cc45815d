"""Attention on a CPU in plain PyTorch, for requests of similar length together.

SGLang's own (``torch_native``) takes one request after the other, and for each computes all
positions of its prompt, although only the new ones are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch.nn.functional import scaled_dot_product_attention

#: The most positions that one group gathers: 48 MiB of keys in a model of 135M parameters.
MOST_POSITIONS = 1 << 16

#: How much of a group may be padding.
WASTE = 0.25


@frozen(eq=False)
class Group:
    """Requests with the same number of new tokens, computed together.

    Attributes:
        tokens: ``[requests, new]``, their tokens in the batch.
        places: ``[requests, length]``, where in the pool their keys and values are. A shorter
            request repeats its last place, masked.
        mask: Added to the scores, ``[requests, 1, new, length]``; ``None`` if everything is
            attended to, or for a whole prompt.
        from_the_beginning: Whether nothing comes before the new tokens.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None
    from_the_beginning: bool

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """The outputs of :attr:`tokens`.

        Args:
            query: ``[tokens, heads, size]``, of the whole batch.
            keys: ``[places, key heads, size]``, the pool.
            values: ``[places, key heads, size]``, the pool.
            scaling: The factor of scores; ``None`` is one over the root of the size.

        Returns:
            ``[requests, new, heads, size]``.
        """
        asked = query[self.tokens].transpose(1, 2)  # [requests, heads, new, size]
        known, worth = (
            each[self.places].transpose(1, 2).to(query.dtype) for each in (keys, values)
        )
        requests, heads, new, size = asked.shape
        if new == 1:  # then the heads that share a key count as queries of it
            asked = asked.reshape(requests, known.shape[1], -1, size)
        out = scaled_dot_product_attention(
            asked,
            known,
            worth,
            attn_mask=self.mask,
            is_causal=self.from_the_beginning and new > 1,
            scale=scaling,
            enable_gqa=asked.shape[1] != known.shape[1],
        )
        return out.reshape(requests, heads, new, -1).transpose(1, 2)


def groups(
    tables: torch.Tensor, lengths: Sequence[int], new: Sequence[int], dtype: torch.dtype
) -> Iterator[Group]:
    """Divide a batch into groups.

    Args:
        tables: ``[requests, longest]``, where in the pool each position of each request is.
        lengths: The length of each request, with its new tokens.
        new: How many of its tokens are new.
        dtype: The dtype of the queries.
    """
    ends = torch.tensor(new).cumsum(0).tolist()
    for members in _alike(lengths, new):
        count, longest = new[members[0]], lengths[members[-1]]
        begins = torch.tensor([ends[i] - count for i in members])
        own = torch.tensor([lengths[i] for i in members]).unsqueeze(1)
        places = torch.minimum(torch.arange(longest), own - 1)
        last_seen = own - count + torch.arange(count)  # [requests, new]
        from_the_beginning = count == longest
        mask = None
        if not from_the_beginning and not (count == 1 and lengths[members[0]] == longest):
            hidden = torch.arange(longest) > last_seen.unsqueeze(-1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            mask = mask.unsqueeze(1)
        yield Group(
            begins.unsqueeze(1) + torch.arange(count),
            tables[torch.tensor(members)].gather(1, places),
            mask,
            from_the_beginning,
        )


def _alike(lengths: Sequence[int], new: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of requests that make a group, the shortest first."""
    group: list[int] = []
    filled = 0
    for i in sorted(range(len(new)), key=lambda i: (new[i], lengths[i])):
        size = (len(group) + 1) * lengths[i]
        fits = size <= MOST_POSITIONS and size - filled - lengths[i] <= WASTE * size
        if group and not (fits and new[i] == new[group[0]]):
            yield group
            group, filled = [], 0
        group.append(i)
        filled += lengths[i]
    if group:
        yield group


def install() -> None:
    """Let SGLang use it for ``torch_native``."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(_backend())


def _backend() -> type:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class GroupedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """SGLang's own, except for attention to all earlier positions."""

        _groups: list[Group] | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._groups = None  # the same in all layers of a forward

        def _run_sdpa_forward_extend(self, *batch: Any, **how: Any) -> Any:
            query, output, keys, values, tables, indices, lengths, _, new, encoder = batch
            if not how["causal"] or not _plain(encoder, how):
                return super()._run_sdpa_forward_extend(*batch, **how)
            if self._groups is None:
                self._groups = _groups(tables, indices, lengths, new.tolist(), query.dtype)
            return _attend(self._groups, query, output, keys, values, how["scaling"])

        def _run_sdpa_forward_decode(self, *batch: Any, **how: Any) -> Any:
            query, output, keys, values, tables, indices, lengths, encoder = batch
            if not _plain(encoder, how):
                return super()._run_sdpa_forward_decode(*batch, **how)
            if self._groups is None:
                self._groups = _groups(tables, indices, lengths, [1] * len(lengths), query.dtype)
            return _attend(self._groups, query, output, keys, values, how["scaling"])

    return GroupedAttention


def _plain(encoder: torch.Tensor | None, how: Mapping[str, Any]) -> bool:
    windowed = how["sliding_window_size"] not in (None, -1)
    return encoder is None and not how["is_cross_attn"] and not windowed


def _groups(
    tables: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    new: Sequence[int],
    dtype: torch.dtype,
) -> list[Group]:
    tables = tables[indices, : int(lengths.max())].long()
    return list(groups(tables, lengths.tolist(), new, dtype))


def _attend(
    found: Sequence[Group],
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    for group in found:
        output[group.tokens] = group.attend(query, keys, values, scaling)
    return output
