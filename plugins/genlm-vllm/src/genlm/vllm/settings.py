"""Settings of a model's configuration that vLLM reads in another way than transformers. They are
corrected if vLLM can compute them. Otherwise contexts are limited to lengths that they do not
affect, or the model is rejected."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from attrs import frozen

from genlm.core.errors import EngineError, InvalidOptionError
from genlm.core.logs import get_logger
from genlm.kit.settings import (
    ROPE_NAMES,
    alike,
    factor_of_logits,
    is_read,
    language_part,
    overridden,
    own_class,
    rope_limits,
    rope_parameters,
    whole_settings_of,
    windows,
)

log = get_logger()

#: Families whose windows vLLM makes one token wider than transformers.
WIDER_WINDOW_FAMILIES = ("cohere2", "cohere2_moe")

#: Families in which vLLM gives all layers the same window.
ONE_WINDOW_FAMILIES = (
    "ministral3", "mixtral", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text",
    "qwen3", "qwen3_moe",
)  # fmt: skip

#: Families that vLLM runs by transformers' code, with its windows.
BY_TRANSFORMERS = ("aya_vision",)

#: Families whose yarn is right beside M-RoPE if vLLM's ``get_rope`` has this argument. Without it,
#: vLLM assumes four times the original length.
YARN, POSITIONS = ("qwen3_vl_text", "qwen3_vl_moe_text"), "mrope_positions_factor"

#: For each family, settings that vLLM does not read, with the values that it assumes. Settings that
#: decide which weights there are need no entry: the load shows which weights vLLM leaves out, and
#: which it lacks.
ASSUMED_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "cohere": {"hidden_act": "silu"},
    "cohere2": {"hidden_act": "silu"},
    "cohere2_moe": {"hidden_act": "silu", "norm_topk_prob": True},
    "falcon": {"activation": "gelu"},
    "falcon_h1": {"mamba_proj_bias": False},
    "gemma": {"hidden_act": "gelu"},
    "gemma4_text": {"hidden_activation": "gelu"},
    "gpt2": {"scale_attn_weights": True},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    "olmoe": {"norm_topk_prob": False, "clip_qkv": None},
    "phimoe": {"lm_head_bias": False},  # vLLM loads the bias, and does not add it
    "stablelm": {"hidden_act": "silu"},
}

#: Settings that vLLM also reads in families in which transformers does not, with the neutral value.
READ_EVERYWHERE: Mapping[str, object] = {"llama_4_scaling": None, "logit_scale": 1.0}

#: The same for the output layer of models that vLLM runs by transformers' code.
READ_BY_OUTPUT_LAYER: Mapping[str, object] = {"final_logit_softcapping": None, "logit_scale": 1.0}

#: For each family, a setting or input and how vLLM treats it differently: always, and on a CPU
#: only.
ALWAYS = {"hrm_text": ("a prompt", "lets its tokens attend to later ones")}
LATENT = ("kv_lora_rank", "computes latent attention differently on a CPU")
HEADS = ("num_attention_heads", "does not turn each head by its position on a CPU")
ON_A_CPU = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), HEADS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    "ernie4_5_moe": ("e_score_correction_bias", "leaves it out of the routing on a CPU"),
}


@frozen
class Overridden:
    """A user's function of a configuration, followed by further changes. It is sent to every
    process.

    Attributes:
        function: For vLLM's option ``hf_overrides``.
        changes: The settings of the language model to change afterwards.
    """

    function: Callable[[Any], Any]
    changes: Mapping[str, Any]

    def __call__(self, config: Any) -> Any:
        config = self.function(config)
        config.get_text_config(decoder=True).update(self.changes)
        return config


@frozen
class Configuration:
    """A model's configuration with the user's overrides.

    Attributes:
        whole: The configuration of the whole model in the folder.
        settings: The settings of the language model, with the overrides.
        overrides: The user's option ``hf_overrides``: a mapping or a function.
        changes: The overrides of the language model, in the form that vLLM needs.
        part: The name of the language model within the whole, if the whole has parts.
    """

    whole: Any
    settings: Any
    overrides: Any
    changes: Mapping[str, Any]
    part: str | None

    @classmethod
    def read(cls, model: str, engine_opts: Mapping[str, Any]) -> Configuration | None:
        """Read a model's configuration; ``None`` if transformers does not know the model."""
        name = engine_opts.get("hf_config_path") or model
        whole = whole_settings_of(name, engine_opts.get("revision"))
        if whole is None:
            return None
        settings = whole.get_text_config(decoder=True)
        part, overrides = language_part(whole), engine_opts.get("hf_overrides") or {}
        if callable(overrides):
            changed = overrides(copy.deepcopy(whole)).get_text_config(decoder=True)
            before, after = vars(settings), vars(changed)
            given = {n: after[n] for n in ROPE_NAMES if n in after and after[n] != before.get(n)}
            changes = overridden(settings, given)[1]
            changed.update(changes)
            return cls(whole, changed, overrides, changes, part)
        given = dict(overrides.get(part, {}) if part else overrides)
        for name in given.keys() - {*ROPE_NAMES} if part else ():
            old = getattr(settings, name, None)
            if isinstance(old, dict) and isinstance(given[name], dict):
                given[name] = old | given[name]  # vLLM does the same with these
        changed, changes = overridden(settings, given)
        return cls(whole, changed, overrides, changes, part)

    def with_changes(self, **changed: Any) -> dict[str, Any]:
        """The option ``hf_overrides`` with further settings; empty if the user's own option is
        enough."""
        changes = {**self.changes, **changed}
        if not changes:
            return {}
        if callable(self.overrides):
            return {"hf_overrides": Overridden(self.overrides, changes)}
        written = {**self.overrides, self.part: changes} if self.part else changes
        return {"hf_overrides": written} if written != self.overrides else {}


def corrections(model: str, engine_opts: Mapping[str, Any]) -> dict[str, Any]:
    """Options with which vLLM computes the same as transformers for the configuration that results
    from the user's ``hf_overrides``.

    Raises:
        EngineError: vLLM cannot compute the same at every requested length.
        InvalidOptionError: vLLM cannot compute the same with one of the user's options.
    """
    configuration = Configuration.read(model, engine_opts)
    if configuration is None:
        return {}
    settings, whole = configuration.settings, configuration.whole
    overrides = configuration.overrides
    class_is_given = callable(overrides) or "architectures" in overrides
    own = {} if class_is_given else own_class(model, whole)
    by_transformers = engine_opts.get("model_impl") == "transformers"
    if not by_transformers:
        _refuse_what_is_not_read(settings, whole.model_type)
    else:
        refuse_other_logits(configuration, "leave out model_impl='transformers', or ")
    longest = engine_opts.get("max_model_len")
    if not isinstance(longest, int) or longest < 0:  # then vLLM chooses
        longest = None
    found = windows(settings, getattr(settings, "num_hidden_layers", 0))
    window = next((one for one in found if one is not None), None)
    if window is not None and not (by_transformers or _takes_windows(settings)):
        if longest is None or longest > window:
            raise EngineError(
                f"some layers of this {settings.model_type} have a window of {window} tokens, and "
                "vLLM's windows differ from the configuration's; load it with "
                f'engine_opts={{"max_model_len": {window}}}, within which no window matters, or '
                'with backend="hf"'
            )
        full = ["full_attention"] * len(found)
        return configuration.with_changes(
            use_sliding_window=False, sliding_window=None, layer_types=full, **own
        )
    corrected = configuration.with_changes(**own)
    given_window = getattr(settings, "sliding_window", None)
    windowed = ("sliding_window", "layer_types") if given_window else ()
    unread = [name for name in windowed if not is_read(settings.model_type, name)]
    wider = settings.model_type in WIDER_WINDOW_FAMILIES and whole.model_type not in BY_TRANSFORMERS
    # vLLM would read settings that transformers ignores.
    if any(getattr(settings, name, None) for name in unread):
        corrected = configuration.with_changes(**dict.fromkeys(unread), **own)
    elif window and wider and not by_transformers:
        corrected = configuration.with_changes(sliding_window=window - 1, **own)
    if on_a_cpu() and any("mamba" in name for name in (settings.model_type, *settings.to_dict())):
        if engine_opts.get("enable_prefix_caching"):
            raise InvalidOptionError(
                "engine_opts['enable_prefix_caching'] = True is not supported for "
                f"{settings.model_type} on a CPU, where vLLM keeps no Mamba states between the "
                "blocks of a prompt; leave the option out"
            )
        corrected["enable_prefix_caching"] = False
    ends, before = _end_of(settings)
    if ends is not None and (longest is None or longest > ends):
        log.warning("vllm.context_ends", at=ends, before=before)
        corrected["max_model_len"] = ends
    return corrected


def refuse_other_logits(configuration: Configuration, remedy: str = "") -> None:
    """Reject settings of the output layer for a model that vLLM runs by transformers' code: vLLM's
    output layer replaces transformers', and has settings of its own.

    Args:
        configuration: The model's.
        remedy: What else to do than to load the model with another backend.

    Raises:
        EngineError: vLLM would compute other logits.
    """
    settings = configuration.settings
    if factor := factor_of_logits(settings):
        what = "leaves it out where it runs transformers' code"
        raise _error(settings.model_type, factor, what, remedy)
    for name, nothing in READ_BY_OUTPUT_LAYER.items():
        value = getattr(settings, name, nothing)
        if value not in (nothing, None) and not is_read(configuration.whole.model_type, name):
            what = "applies it, where transformers does not"
            raise _error(settings.model_type, f"{name}={value!r}", what)


def _end_of(settings: Any) -> tuple[int | None, str]:
    """The longest context whose positions vLLM computes right, if that is less than the model's
    longest, and what begins behind it."""
    for rope in rope_parameters(settings).values():
        begins = rope.get("original_max_position_embeddings")
        if begins and rope.get("llama_4_scaling_beta"):
            return begins, "the scaling of queries by position"
        if begins and rope.get("rope_type") == "yarn":
            ends = int(begins * rope.get("factor", 1.0))
            if ends < getattr(settings, "max_position_embeddings", ends):
                return ends, "the last of yarn's positions"
    # If a context may be longer, vLLM uses the long factors at every length.
    return rope_limits(settings).get("longrope"), 'longrope\'s long factors; backend="hf" has both'


def _takes_windows(settings: Any) -> bool:
    """Whether vLLM gives each layer the window of the configuration."""
    kinds = list(getattr(settings, "layer_types", None) or ())
    # vLLM gives windows to every other layer, beginning with the first.
    if settings.model_type == "gpt_oss":
        return kinds == (["sliding_attention", "full_attention"] * len(kinds))[: len(kinds)]
    return settings.model_type not in ONE_WINDOW_FAMILIES or len({*kinds}) <= 1


def _refuse_what_is_not_read(settings: Any, whole: str) -> None:
    """
    Args:
        settings: The settings of the language model.
        whole: The family of the whole model, to which the output layer belongs.
    """
    family, fixed = settings.model_type, dict(ASSUMED_SETTINGS.get(settings.model_type, {}))
    usual = getattr(type(settings), "hidden_act", None)  # transformers 4 has no such attribute
    if usual is not None and any("experts" in name for name in settings.to_dict()):
        fixed["hidden_act"] = usual  # vLLM's experts always use the family's usual activation
    for name, taken in fixed.items():
        if not alike(value := getattr(settings, name, taken), taken):
            raise _error(family, f"{name}={value!r}", f"takes {taken!r} for it")
    for name, nothing in READ_EVERYWHERE.items():
        value = getattr(settings, name, nothing)
        reader = whole if name == "logit_scale" else family
        if value not in (nothing, None) and not is_read(reader, name):
            raise _error(family, f"{name}={value!r}", "applies it, where transformers does not")
    if family == "falcon" and settings.ffn_hidden_size != 4 * settings.hidden_size:
        size = f"ffn_hidden_size={settings.ffn_hidden_size}"
        raise _error(family, size, f"takes 4 * hidden_size={4 * settings.hidden_size} for it")
    for kind, rope in rope_parameters(settings).items():
        if family == "gpt_oss" and (
            rope.get("rope_type") != "yarn" or {"attention_factor", "mscale"} & rope.keys()
        ):
            raise _error(family, f"rope_parameters={rope!r}", "computes a yarn without factors")
        scaled = rope.get("rope_type", "default")
        if "mrope_section" in rope and scaled != "default" and not _scales_mrope(family, scaled):
            raise _error(family, f"rope_type={scaled!r}", "computes it differently beside M-RoPE")
        what = "applies it, where transformers does not"
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1.0 and scaled == "default" and not is_read(family, "partial_rotary_factor"):
            raise _error(family, f"partial_rotary_factor={part}", what)
        if kind is not None and not rope.get("truncate", True):
            raise _error(family, "truncate=False", what)
    if family == "falcon_h1" and settings.mamba_rms_norm and settings.mamba_norm_before_gate:
        raise _error(family, "mamba_norm_before_gate=True", "applies the gate first")
    if wrong := ALWAYS.get(family) or (on_a_cpu() and ON_A_CPU.get(family)):
        raise _error(family, *wrong)


def _scales_mrope(family: str, kind: str) -> bool:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return kind == "yarn" and family in YARN and POSITIONS in signature(get_rope).parameters


def on_a_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _error(family: str, setting: str, what: str, remedy: str = "") -> EngineError:
    return EngineError(
        f'{setting} of {family}: vLLM {what}; {remedy}load the model with backend="hf"'
    )
