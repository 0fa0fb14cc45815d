"""Attention over the segments of contexts, through transformers' public attention interface."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from genlm.core.errors import EngineError
from genlm.hf.layout import PackedLayout, Tier
from genlm.hf.partial import Partial, attend, partial_attention
from genlm.hf.patterns import Pattern
from genlm.hf.static_layout import StaticLayout

#: The name under which models find slot attention (``model.set_attn_implementation``).
SLOT_ATTENTION = "genlm_slots"

#: The keyword argument that carries the layout through the model to slot attention.
LAYOUT_ARGUMENT = "genlm_layout"

#: The module of transformers' own code of Falcon.
FALCON = "transformers.models.falcon."


def register_slot_attention() -> None:
    """Make ``SLOT_ATTENTION`` known to transformers. Without a layout it is plain attention with
    transformers' own masks."""
    AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)


def use_attention_with_caps(model: Any) -> None:
    """Switch a model that caps attention logits (Gemma 2, VaultGemma) away from PyTorch's fused
    attention. That has no caps, but transformers 5.19 chooses it by default."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def require_alibi_once(model: torch.nn.Module) -> None:
    """Raises: EngineError: the attention is transformers' eager attention of Falcon, which adds the
    biases of ALiBi twice. The code of a model's own folder is not meant."""
    config: Any = model.config
    falcon = [one for one in model.modules() if type(one).__module__.startswith(FALCON)]
    if falcon and config.alibi and config._attn_implementation == "eager":
        raise EngineError(
            "transformers' eager attention of Falcon adds the biases of ALiBi (alibi=True) twice; "
            "load the model with attn_implementation='sdpa', which is the default"
        )


def attention_of(config: Any) -> dict[str, str]:
    """The attention implementations of a model and of its parts, as
    ``model.set_attn_implementation`` takes them. A part without one of its own has that of the
    whole model."""
    own = config._attn_implementation
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    inner = {
        name: part._attn_implementation or own for name, part in parts.items() if part is not None
    }
    return {"": own, **inner}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes differ in every forward
def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    genlm_layout: PackedLayout | StaticLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed forward.

    Args:
        query: ``[tokens, heads, 1, dim]``: every token is a sequence of its own in the batch.
        key, value: ``[slots, kv_heads, columns, dim]``, as the pool returned them to the layer.
        attention_mask: Used only without a layout, since a layout makes its own masks.
        genlm_layout: Which tokens belong to which segment.

    Returns:
        ``[tokens, 1, heads, dim]``, as transformers expects it.
    """
    if genlm_layout is None:
        return _attend(module, query, key, value, attention_mask, **kwargs), None
    layout, layer = genlm_layout, int(module.layer_idx)  # type: ignore[arg-type]
    pattern = layout.pattern(layer)
    if isinstance(layout, PackedLayout) and layout.tiers:
        return _over_trunks(layout, layer, pattern, query, key, value, **kwargs).unsqueeze(1), None
    outputs = []
    for group in layout.groups:
        keys, values = group.own(layer, key, value)
        mask = group.mask(pattern, query.dtype, query.device)
        output = _attend(module, group.gather(query), keys, values, mask, **kwargs)
        outputs.append(group.scatter(output))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(1), None


def _over_trunks(
    layout: PackedLayout,
    layer: int,
    pattern: Pattern,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of tokens whose segments continue trunks: ``[tokens, heads, dim]``.

    Attention over a trunk is one product for all tokens that share it. Its result and that over a
    token's own segment are merged by their log-sum-exps, which gives the softmax over both
    (Hydragen, arXiv 2402.05099).
    """
    scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    parts: list[Partial] = []
    for group in layout.groups:
        keys, values = group.own(layer, key, value)
        mask = group.mask(pattern, query.dtype, query.device)
        causal = mask is None and group.size > 1
        part = partial_attention(
            group.gather(query), keys, values, mask, scale, causal=causal, softcap=softcap
        )
        parts.append(Partial(group.scatter(part.output), group.scatter(part.log_sum_exp)))
    whole = parts[0] if len(parts) == 1 else Partial.cat(parts)
    if kwargs.get("s_aux") is not None:
        whole = whole.with_sinks(kwargs["s_aux"])
    # The query heads that share a key become further queries, so that each key is read once.
    asked = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
    for tier in layout.tiers[pattern]:
        tokens = tier.tokens.on(query.device)
        whole.merge(tokens, _over_tier(tier, layer, asked[tokens], scale, softcap))
    return whole.output


def _over_tier(
    tier: Tier, layer: int, asked: torch.Tensor, scale: float, softcap: float | None
) -> Partial:
    """Attention of a tier's tokens, ``[tokens, kv_heads, groups, dim]``, over the tier's trunks.
    The output has the same shape, except that its last dimension is that of the values."""
    groups = asked.shape[2]
    # contiguous, so that the queries of one product need no copy
    by_head = asked.transpose(0, 1).contiguous()
    outputs, log_sum_exps = [], []
    for part, keys, values, mask in tier.products(layer, asked.dtype, asked.device):
        queries = by_head[None, :, part].flatten(2, 3)
        if mask is not None:
            mask = mask.repeat_interleave(groups, dim=2)
        output, log_sum_exp = attend(queries, keys, values, mask, scale, False, softcap)
        outputs.append(output)
        log_sum_exps.append(log_sum_exp)
    output, log_sum_exp = (
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        for parts in (outputs, log_sum_exps)
    )
    shape = by_head.shape[:3]
    return Partial(output.view(*shape, -1).transpose(0, 1), log_sum_exp.view(shape).transpose(0, 1))


def _attend(
    module: torch.nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> torch.Tensor:
    """PyTorch's fused attention, or the explicit formula for capped logits and for sinks."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return _explicit(module, query, key, value, mask, **kwargs)
    output: torch.Tensor = AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)[
        0
    ]
    return output


def _explicit(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention with capped logits (Gemma 2) and with sinks, logits per head that take mass
    (gpt-oss)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = (
        query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    )
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits + _additive(mask, logits)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sinks], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = logits.softmax(dim=-1, dtype=torch.float32)
    # dropout is 0 unless the model is in training mode
    weights = torch.dropout(weights.to(value.dtype), dropout, train=True)
    return (weights @ value).transpose(1, 2).contiguous()


def _additive(mask: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """The mask in additive form; without a mask, the causal one."""
    lowest = torch.finfo(logits.dtype).min
    if mask is None:
        queries, keys = logits.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=logits.device).tril(
            keys - queries
        )
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=logits.dtype, device=logits.device).masked_fill_(
            ~mask, lowest
        )
    return mask
