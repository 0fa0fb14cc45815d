"""Attention over a part of the positions that a token attends to, with the log-sum-exp that merging
needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define

#: The types that PyTorch's fused kernels accept.
FUSED = (torch.float32, torch.float16, torch.bfloat16)


@define(eq=False)
class Partial:
    """Attention over some positions.

    Attributes:
        output: ``[..., heads, dim]``, normalised over these positions alone.
        log_sum_exp: ``[..., heads]`` float32, of the attention logits over these positions.
    """

    output: torch.Tensor
    log_sum_exp: torch.Tensor

    @classmethod
    def cat(cls, parts: Sequence[Partial]) -> Partial:
        """The attention of several groups of tokens, concatenated."""
        return cls(
            torch.cat([part.output for part in parts]),
            torch.cat([part.log_sum_exp for part in parts]),
        )

    def merge(self, tokens: slice | torch.Tensor, other: Partial) -> None:
        """Merge attention of ``tokens`` over further positions into this one, in place. The heads
        of ``other`` may take two dimensions."""
        output, mine = self.output[tokens], self.log_sum_exp[tokens]
        shape = other.log_sum_exp.shape
        both = mine.view(shape)
        torch.logaddexp(both, other.log_sum_exp, out=both)
        weight = (other.log_sum_exp - both).exp_().unsqueeze(-1).to(output.dtype)
        output.view(*shape, -1).lerp_(other.output, weight)
        # A slice gives views, which have been written in place.
        if isinstance(tokens, torch.Tensor):
            self.output[tokens], self.log_sum_exp[tokens] = output, mine

    def with_sinks(self, sinks: torch.Tensor) -> Partial:
        """This attention with sinks: a further logit for each head, which takes mass but has no
        value."""
        both = torch.logaddexp(self.log_sum_exp, sinks.float())
        weight = (self.log_sum_exp - both).exp_().unsqueeze(-1)
        return Partial(self.output * weight.to(self.output.dtype), both)


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool = False,
    softcap: float | None = None,
) -> Partial:
    """Attention and its log-sum-exp.

    Args:
        query: ``[batch, heads, tokens, dim]``.
        key, value: ``[batch, kv_heads, positions, dim]``; ``heads`` is a multiple of ``kv_heads``.
        mask: Added to the logits, ``[batch, 1, tokens, positions]``.
        scale: The factor on products of queries and keys.
        causal: Whether token ``i`` attends to positions up to ``i`` only; needs no mask.
        softcap: The cap on the absolute values of the logits (Gemma 2).

    Returns:
        ``[batch, tokens, heads, dim]`` and ``[batch, tokens, heads]``.
    """
    batch, heads, tokens, _ = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if causal:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        output, log_sum_exp = attend(query, key, value, None, scale, True, softcap)
        return Partial(output.transpose(1, 2), log_sum_exp.transpose(1, 2))
    # Heads that share a key become further queries of one head, so that no key is read twice.
    grouped = query.reshape(batch, kv_heads, groups * tokens, query.shape[-1])
    if mask is not None and groups > 1:
        mask = mask.repeat(1, 1, groups, 1)
    output, log_sum_exp = attend(grouped, key, value, mask, scale, False, softcap)
    output = output.reshape(batch, heads, tokens, output.shape[-1]).transpose(1, 2)
    return Partial(output, log_sum_exp.reshape(batch, heads, tokens).transpose(1, 2))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp, for equally many heads of queries, keys and values. A kernel
    that returns the log-sum-exp is used if there is one."""
    device = query.device.type
    if softcap is None and query.dtype in FUSED and key.shape[-1] == value.shape[-1]:
        if device == "cpu":
            given = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=mask, scale=scale
            )
            return given[0], given[1]
        if device == "cuda" and mask is None and query.shape[-1] % 8 == 0:
            given = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, None, True, 0.0, causal, scale=scale
            )
            return given[0], given[1][..., : query.shape[2]]  # the kernel pads it
    return _explicit(query, key, value, mask, scale, causal, softcap)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    # First, because adding the mask's lowest number would overflow to -inf in float16.
    logits = logits.float()
    if mask is not None:
        logits = logits + mask
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(later, torch.finfo(logits.dtype).min)
    log_sum_exp = logits.logsumexp(-1)
    weights = (logits - log_sum_exp.unsqueeze(-1)).exp_()
    return weights.to(value.dtype) @ value, log_sum_exp
