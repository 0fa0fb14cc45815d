"""Corrects what SGLang leaves out of a configuration, in a model that it has loaded.

It reads windows, caps and rotary embeddings family by family, and some of them not at all. Here
every layer is compared with what transformers reads.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from genlm.core.errors import EngineError
from genlm.kit.settings import Rotary, is_read, layer_type, rope_limits, rotaries, windows

#: SGLang's activations, and the beginnings of the names that transformers has for them.
ACTIVATIONS = {"SiluAndMul": ("silu", "swish"), "GeluAndMul": ("gelu",)}

#: What SGLang caps logits at, in any family whose configuration has it; and settings that it reads
#: in families of which transformers does not, with what changes nothing there.
CAP = "final_logit_softcapping"
READ_EVERYWHERE = {"logit_scale": 1.0, "scale_emb": 1.0}

#: Settings that some of SGLang's models leave out, with the values that they compute.
ACTIVATION = "activation_function"
LEFT_OUT: dict[str, tuple[object, ...]] = {
    ACTIVATION: ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    "clip_qkv": (None,),
    "mscale_all_dim": (None, 0),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}

#: The longest context that is right, and what SGLang does not compute beyond it.
Limit = tuple[int, str]

#: How far cosines and sines may be off: more in half precision, and at later positions.
CLOSE, CLOSE_IN_HALF, CLOSE_BY_POSITION = 1e-3, 2e-2, 1e-6


def repair(model: Any, settings: Any, ours: bool) -> list[Limit]:
    """Let a model compute what transformers' settings say.

    Args:
        model: The module that SGLang runs.
        settings: See :func:`genlm.kit.settings.settings_of`.
        ours: Whether it attends by ``attention.py``, on a CPU.

    Raises:
        EngineError: it cannot.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    held = [one for module in model.modules() for one in (module, *_in_dicts(module))]
    attentions = [*dict.fromkeys(one for one in held if isinstance(one, RadixAttention))]
    _require_activation(model, settings)
    _require_weights_of_experts(model, settings)
    _refuse_what_only_sglang_reads(settings)
    _refuse_what_is_left_out(model, settings)
    for module in model.modules():
        if not is_read(settings.model_type, CAP) and hasattr(module, CAP):
            setattr(module, CAP, None)
    if ours:
        _require_whole_keys(model, settings)
        _cap_at_the_end(model)
    _cap_attention(attentions, settings, ours)
    return [*_window(attentions, settings, ours), *_rotate(model, settings, ours)]


def _in_dicts(module: torch.nn.Module) -> Iterator[Any]:
    """Where SGLang runs a family by transformers' code, its attention is no part of the model: it
    is in a dict by layer."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from value.values()


def _error(settings: Any, setting: str, what: str) -> EngineError:
    return EngineError(
        f"the checkpoint has {setting}, and SGLang's {settings.model_type} {what}; load it with "
        "backend='hf'"
    )


def _require_activation(model: Any, settings: Any) -> None:
    """Some of SGLang's models have one activation, whatever the configuration says."""
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
    """Some of SGLang's models make the weights of experts sum to one whatever the configuration
    says, and some never."""
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
    """Settings that a family reads in transformers, and its code in SGLang does not name."""
    code = inspect.getsource(sys.modules[type(model).__module__])
    rope = getattr(settings, "rope_parameters", None) or {}
    # In place of an activation that it does not know, OPT has nothing.
    lost = any(
        isinstance(getattr(m, "activation_fn", 0), torch.nn.Identity) for m in model.modules()
    )
    for name, computed in LEFT_OUT.items():
        value = getattr(settings, name, rope.get(name, computed[0]))
        unread = name not in code and value not in computed
        if (unread or (lost and name == ACTIVATION)) and is_read(settings.model_type, name):
            raise _error(settings, f"{name}={value!r}", "leaves it out")


def _require_whole_keys(model: Any, settings: Any) -> None:
    """Attention in plain PyTorch takes keys out of SGLang's pool, and latent attention keeps there
    what they are made of: where both happen to be of one size, rows would be wrong."""
    if any(hasattr(module, "attn_mqa") for module in model.modules()):
        raise EngineError(
            f"SGLang has no latent attention for {settings.model_type} in plain PyTorch; load it "
            "with backend='hf'"
        )


def _cap_at_the_end(model: Any) -> None:
    """Cap logits in PyTorch: where SGLang does not know the CPU by itself, it takes Triton."""
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
        # SGLang does not count a token's own position, and writes -1 for no window.
        had = attention.sliding_window_size + 1
        if ours:
            attention.sliding_window_size = window - 1
        elif had != window:
            yield min(size for size in (had, window) if size), "sliding_window"


def _rotate(model: Any, settings: Any, ours: bool) -> Iterator[Limit]:
    """Replace rotary embeddings that differ from transformers'."""
    parameters = getattr(settings, "rope_parameters", None) or {}
    if parameters.get("llama_4_scaling_beta"):  # queries are scaled beyond it
        yield parameters["original_max_position_embeddings"], "llama_4_scaling_beta"
    ends = rope_limits(settings)
    yield from ((length, f"rope_type={kind!r}") for kind, length in ends.items())
    if not (wanted := rotaries(settings)):
        return
    for name, module in model.named_modules():
        # Gemma 3's own table for its windows, of which SGLang takes nothing but the base.
        if name.endswith("rotary_emb_local") and (right := wanted.get("sliding_attention")):
            module.inv_freq = right.inverse.to(module.inv_freq)
            module.attention_scaling = right.factor
    # SGLang gives the same module to all layers whose rotary embeddings look alike to it.
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
    """Whether rotary embeddings turn so, as far as they go."""
    known = _table(module)
    if known.shape[-1] != 2 * right.inverse.numel():
        return False
    last = min(len(known), limit or len(known)) - 1
    positions = torch.tensor([*(2**n for n in range(last.bit_length()) if 2**n <= last), last])
    angles = positions.unsqueeze(1) * right.inverse.cpu()
    expected = torch.cat([angles.cos(), angles.sin()], -1) * right.factor
    off = (known[positions].float().cpu() - expected).abs()
    close = CLOSE if known.dtype == torch.float32 else CLOSE_IN_HALF
    return bool((off <= close + CLOSE_BY_POSITION * positions.unsqueeze(1)).all())


def _table(module: Any) -> Any:
    """The cosines and sines of rotary embeddings, ``[positions, features]``; ``None`` if a module
    is something else. Of two tables the one of short contexts."""
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
