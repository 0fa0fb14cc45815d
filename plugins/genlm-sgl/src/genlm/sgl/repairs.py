"""Corrects what SGLang leaves out of a configuration, in a model that it has loaded.

SGLang reads windows, caps and rotary embeddings differently in each family, and some not at all.
This module compares every layer with what transformers reads.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from genlm.core.errors import EngineError
from genlm.kit.settings import (
    Rotary,
    factor_of_logits,
    is_read,
    layer_type,
    rope_limits,
    rotaries,
    windows,
)

#: SGLang's activations, each with the beginnings of transformers' names for it.
ACTIVATIONS = {"SiluAndMul": ("silu", "swish"), "GeluAndMul": ("gelu",)}

#: The settings of logit caps, which SGLang applies in any family whose configuration has them; and
#: settings that SGLang also reads in families in which transformers does not, with the neutral
#: value.
CAP = "final_logit_softcapping"
READ_EVERYWHERE = {"logit_scale": 1.0, "scale_emb": 1.0}

#: Settings that some of SGLang's models ignore, with the values that these models assume.
ACTIVATION = "activation_function"
LEFT_OUT: dict[str, tuple[object, ...]] = {
    ACTIVATION: ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    "clip_qkv": (None,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}

#: The module of SGLang that runs families with transformers' code, except for the output layer.
BY_TRANSFORMERS = "sglang.srt.models.transformers"

#: The longest context with right rows, and what SGLang computes wrongly beyond it.
Limit = tuple[int, str]

#: The tolerance for cosines and sines, which is larger in half precision and at later positions.
TOLERANCE, HALF_TOLERANCE, TOLERANCE_PER_POSITION = 1e-3, 2e-2, 1e-6


def repair(model: Any, settings: Any, ours: bool) -> list[Limit]:
    """Let a model compute what transformers' settings say.

    Args:
        model: The module that SGLang runs.
        settings: See :func:`genlm.kit.settings.settings_of`.
        ours: Whether the model uses the attention of ``attention.py``, on a CPU.

    Raises:
        EngineError: the model cannot be corrected.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    _require_kept_states(model, settings)
    held = [one for module in model.modules() for one in (module, *_in_dicts(module))]
    attentions = [*dict.fromkeys(one for one in held if isinstance(one, RadixAttention))]
    _require_activation(model, settings)
    _require_weights_of_experts(model, settings)
    _refuse_what_only_sglang_reads(settings)
    _refuse_what_is_left_out(model, settings)
    _require_scale(attentions, settings)
    for module in model.modules():
        if not is_read(settings.model_type, CAP) and hasattr(module, CAP):
            setattr(module, CAP, None)
    if ours:
        _require_whole_keys(model, settings)
        _cap_at_the_end(model)
    _cap_attention(attentions, settings, ours)
    return [*_window(attentions, settings, ours), *_rotate(model, settings, ours)]


def _in_dicts(module: torch.nn.Module) -> Iterator[Any]:
    """Attention that SGLang keeps in dictionaries by layer and not as modules, in families that it
    runs with transformers' code."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from value.values()


def _error(settings: Any, setting: str, what: str) -> EngineError:
    return EngineError(
        f"the checkpoint has {setting}, and SGLang's {settings.model_type} {what}; load it with "
        "backend='hf'"
    )


def _require_kept_states(model: Any, settings: Any) -> None:
    """Reject recurrent layers in a family that SGLang runs with transformers' code. SGLang keeps
    nothing but the keys and values of its own attention, and such a family may not use that."""
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        raise _error(settings, "layers with a state", "keeps no state of them")


def _require_activation(model: Any, settings: Any) -> None:
    """Reject an activation that SGLang ignores: some of its models always use the same one."""
    names = [
        name
        for name in ("hidden_activation", "hidden_act")
        if is_read(settings.model_type, name) and getattr(settings, name, None)
    ]
    given = getattr(settings, names[0]) if names else None
    kinds = {type(module).__name__ for module in model.modules()}
    for module in model.modules():  # of experts
        computed = getattr(getattr(module, "moe_runner_config", None), "activation", None)
        kinds.add(f"{computed}".capitalize() + "AndMul")
    for kind in kinds & set(ACTIVATIONS):
        if isinstance(given, str) and not given.startswith(ACTIVATIONS[kind]):
            raise _error(settings, f"hidden_act={given!r}", f"computes {kind}")


def _require_weights_of_experts(model: Any, settings: Any) -> None:
    """Reject a normalisation of experts' weights that SGLang ignores: some of its models always
    normalise them, and some never."""
    given = getattr(settings, "norm_topk_prob", None)
    if given is None or not is_read(settings.model_type, "norm_topk_prob"):
        return
    for module in model.modules():
        computed = getattr(getattr(module, "topk_config", None), "renormalize", given)
        if bool(computed) != bool(given):
            raise _error(settings, f"norm_topk_prob={given!r}", f"computes {computed!r}")


def _refuse_what_only_sglang_reads(settings: Any) -> None:
    for name, nothing in READ_EVERYWHERE.items():
        value = getattr(settings, name, nothing)
        if value not in (nothing, None) and not is_read(settings.model_type, name):
            raise _error(settings, f"{name}={value!r}", "applies it, where transformers does not")


def _refuse_what_is_left_out(model: Any, settings: Any) -> None:
    """Reject settings that transformers reads in a family, and that the code which runs the model
    does not mention."""
    code = _code(model)
    rope = getattr(settings, "rope_parameters", None) or {}
    # OPT applies no activation at all in place of one that it does not know.
    lost = any(
        isinstance(getattr(m, "activation_fn", 0), torch.nn.Identity) for m in model.modules()
    )
    for name, computed in LEFT_OUT.items():
        value = getattr(settings, name, rope.get(name, computed[0]))
        unread = name not in code and value not in computed
        if (unread or (lost and name == ACTIVATION)) and is_read(settings.model_type, name):
            raise _error(settings, f"{name}={value!r}", "leaves it out")
    factor = factor_of_logits(settings)
    if factor is not None and type(model).__module__ == BY_TRANSFORMERS:
        raise _error(settings, factor, "leaves it out")


def _require_scale(attentions: list[Any], settings: Any) -> None:
    """Reject latent attention whose scores are not scaled by ``mscale_all_dim``, as transformers
    scales them with YaRN."""
    rope = getattr(settings, "rope_parameters", None) or {}
    name = "mscale_all_dim"
    value, factor = rope.get(name), rope.get("factor") or 1.0
    if not value or rope.get("rope_type") == "default" or not is_read(settings.model_type, name):
        return
    width = settings.qk_nope_head_dim + settings.qk_rope_head_dim
    wanted = (1 + 0.1 * value * math.log(max(factor, 1.0))) ** 2 / math.sqrt(width)
    if not all(math.isclose(one.scaling, wanted, rel_tol=TOLERANCE) for one in attentions):
        raise _error(settings, f"{name}={value!r}", "leaves it out")


def _code(model: Any) -> str:
    """The source of the module that runs a model, and of those with its layers, if they are
    transformers'."""
    modules = {type(model).__module__}
    if modules == {BY_TRANSFORMERS}:
        kinds = [type(module).__module__ for module in model.modules()]
        modules |= {name for name in kinds if name.startswith("transformers.models.")}
    return "\n".join(inspect.getsource(sys.modules[name]) for name in sorted(modules))


def _require_whole_keys(model: Any, settings: Any) -> None:
    """Reject latent attention with the attention of ``attention.py``. That reads keys from SGLang's
    pool, where latent attention keeps compressed ones instead; if both have the same size, rows
    would be wrong without an error."""
    if any(hasattr(module, "attn_mqa") for module in model.modules()):
        raise EngineError(
            f"SGLang has no latent attention for {settings.model_type} in plain PyTorch; load it "
            "with backend='hf'"
        )


def _cap_at_the_end(model: Any) -> None:
    """Cap logits in PyTorch on a CPU, where SGLang may use Triton."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    def capped(get: Any, cap: float, *arguments: Any, **options: Any) -> Any:
        return get(*arguments, **options).div_(cap).tanh_().mul_(cap)

    for module in model.modules():
        if isinstance(module, LogitsProcessor) and (cap := module.final_logit_softcapping):
            module.final_logit_softcapping = None
            module._get_logits = partial(capped, module._get_logits, cap)


def _cap_attention(attentions: list[Any], settings: Any, ours: bool) -> None:
    if not hasattr(settings, "attn_logit_softcapping"):
        return
    read = is_read(settings.model_type, "attn_logit_softcapping")
    cap = (settings.attn_logit_softcapping or 0.0) if read else 0.0
    for attention in attentions:
        if ours:
            attention.logit_cap = cap
        elif (attention.logit_cap or 0.0) != cap:
            what = f"caps attention at {attention.logit_cap!r}"
            raise _error(settings, f"attn_logit_softcapping={cap!r}", what)


def _window(attentions: list[Any], settings: Any, ours: bool) -> Iterator[Limit]:
    wanted = windows(settings, settings.num_hidden_layers)
    for attention in attentions:
        window = wanted[attention.layer_id] or 0
        # SGLang does not count a token's own position, and uses -1 for no window.
        had = attention.sliding_window_size + 1
        if ours:
            attention.sliding_window_size = window - 1
        elif had != window:
            yield min(size for size in (had, window) if size), "sliding_window"


def _rotate(model: Any, settings: Any, ours: bool) -> Iterator[Limit]:
    """Replace rotary embeddings that differ from transformers'."""
    parameters = getattr(settings, "rope_parameters", None) or {}
    if parameters.get("llama_4_scaling_beta"):  # beyond it, queries are scaled
        yield parameters["original_max_position_embeddings"], "llama_4_scaling_beta"
    ends = rope_limits(settings)
    yield from ((length, f"rope_type={kind!r}") for kind, length in ends.items())
    if not (wanted := rotaries(settings)):
        return
    for name, module in model.named_modules():
        # Gemma 3 has a table of its own for its windows, for which SGLang reads only the base.
        if name.endswith("rotary_emb_local") and (right := wanted.get("sliding_attention")):
            module.inv_freq = right.inverse.to(module.inv_freq)
            module.attention_scaling = right.factor
    # SGLang shares one module among all layers whose rotary embeddings look alike to it.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer is None or _table(module) is None:
            continue
        right = wanted.get(layer_type(settings, int(layer[1])))
        if right is None or _rotates(module, right, ends.get(right.kind)):
            continue
        if not ours:
            what = "computes other rotary embeddings"
            raise _error(settings, f"rope_parameters={settings.rope_parameters!r}", what)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, _rotary(module, right))


def _rotates(module: Any, right: Rotary, limit: int | None) -> bool:
    """Whether rotary embeddings have these frequencies, up to the end of their table."""
    known = _table(module)
    if known.shape[-1] != 2 * right.inverse.numel():
        return False
    last = min(len(known), limit or len(known)) - 1
    positions = torch.tensor([*(2**n for n in range(last.bit_length()) if 2**n <= last), last])
    angles = positions.unsqueeze(1) * right.inverse.cpu()
    expected = torch.cat([angles.cos(), angles.sin()], -1) * right.factor
    off = (known[positions].float().cpu() - expected).abs()
    close = TOLERANCE if known.dtype == torch.float32 else HALF_TOLERANCE
    return bool((off <= close + TOLERANCE_PER_POSITION * positions.unsqueeze(1)).all())


def _table(module: Any) -> Any:
    """The cosines and sines of rotary embeddings, ``[positions, features]``; ``None`` for another
    kind of module. Of two tables, it is the one for short contexts."""
    return getattr(module, "cos_sin_cache", getattr(module, "short_cos_sin_cache", None))


def _rotary(like: Any, right: Rotary) -> Any:
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    class Transformers(RotaryEmbedding):  # type: ignore[misc]
        """Rotary embeddings with the frequencies that transformers computes."""

        def _compute_cos_sin_cache(self) -> torch.Tensor:
            positions = torch.arange(self.max_position_embeddings, dtype=torch.float32)
            angles = positions.unsqueeze(1) * right.inverse.to(positions.device)
            return torch.cat([angles.cos(), angles.sin()], -1) * right.factor

    return Transformers(
        like.head_size,
        2 * right.inverse.numel(),
        len(_table(like)),
        0,
        getattr(like, "is_neox_style", True),
        getattr(like, "dtype", torch.float32),
    )
