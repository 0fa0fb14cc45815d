"""The settings of a model's attention, as transformers reads them from its configuration.

An engine that reads a configuration differently computes other rows. A plugin compares these
settings with the model that its engine has loaded.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from genlm.core.checks import describe_error
from genlm.core.errors import EngineError
from genlm.core.logs import get_logger

log = get_logger()

#: Other names of an activation, and exact activations with their approximations.
_ACTIVATIONS = {"swish": "silu"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"
)


#: The names of rotary settings: that of transformers 5, and those of older configurations.
ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")

#: Rotary settings that stay if the user gives another scaling.
ROPE_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")

#: Settings by which transformers' models multiply or divide logits.
FACTORS_OF_LOGITS = ("lm_head_multiplier", "logits_scaling")


@frozen(eq=False)
class Rotary:
    """Rotary embeddings of one type of layer.

    Attributes:
        kind: The ``rope_type``.
        inverse: By how many radians each pair of features turns from one position to the next,
            ``[pairs]`` float32.
        factor: The factor by which rotated features are multiplied.
    """

    kind: str
    inverse: torch.Tensor
    factor: float


def settings_of(name: str | Path, revision: str | None = None) -> Any:
    """The settings of the language model in a folder or on the hub, as transformers completes them;
    ``None`` if it does not know the model. Runs no code of the model."""
    whole = whole_settings_of(name, revision)
    return None if whole is None else whole.get_text_config(decoder=True)


def whole_settings_of(name: str | Path, revision: str | None = None) -> Any:
    """The settings of the whole folder. In those of a multimodal model, the settings of the
    language model are a part."""
    from transformers import AutoConfig, PretrainedConfig

    try:
        whole = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        given, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except Exception as error:  # a class may raise any exception for unexpected values
        log.info("settings.unknown", model=str(name), error=str(error)[:200])
        return None
    require_one_rotary(str(name), given, whole)
    return whole


def require_one_rotary(model: str, given: Mapping[str, Any], settings: Any) -> None:
    """Reject a ``config.json`` with rotary settings under both of their names, if transformers
    drops some: it takes ``rope_scaling`` in place of ``rope_parameters``. Who follows the advice of
    a model's page to add the first may not know that transformers 5 has written the second.

    Args:
        model: The folder or hub name that the user gave.
        given: The contents of the file.
        settings: What transformers makes of it.

    Raises:
        EngineError: a setting is dropped.
    """
    for part in getattr(settings, "sub_configs", {}):
        if isinstance(inner := given.get(part), Mapping):
            require_one_rotary(model, inner, getattr(settings, part, None))
    old, new = (given.get(name) for name in ROPE_NAMES[:2])
    if not (old and new):
        return
    taken = rope_parameters(settings)
    for kind, one in _by_kind(old).items():
        kept = taken.get(kind) or taken.get(None) or {}
        lost = [name for name in ROPE_KEPT if name in one and one[name] != kept.get(name)]
        if lost:
            raise EngineError(
                f"config.json of {model!r} has rope_parameters and rope_scaling: transformers "
                f"takes the second alone, and drops {lost[0]}={one[lost[0]]!r} of the first; write "
                "what rope_scaling says into rope_parameters, and remove rope_scaling"
            )


def language_part(whole: Any) -> str | None:
    """The name of the language model's part in the settings of a multimodal model."""
    settings = whole.get_text_config(decoder=True)
    return next((n for n in whole.sub_configs if getattr(whole, n, None) is settings), None)


def own_class(model: str, whole: Any) -> dict[str, list[str]]:
    """The setting ``architectures`` that names the class of a configuration's family, if the
    configuration names the class of another family. transformers goes by the family; engines that
    go by the class would compute another model of weights with the same names.

    Args:
        model: The folder or hub name that the user gave.
        whole: See :func:`whole_settings_of`.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    named, own = getattr(whole, "architectures", None) or [], CLASSES.get(whole.model_type)
    multimodal = language_part(whole) is not None
    if own is None or multimodal or not named or named[0] not in {*CLASSES.values()} - {own}:
        return {}
    log.warning("class.corrected", model=model, named=named[0], family=whole.model_type, taken=own)
    return {"architectures": [own]}


def overridden(settings: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A copy of settings with a user's overrides, and the overrides as an engine must get them.

    Engines set attributes one by one. So a ``rope_theta`` alone would change nothing, since
    transformers 5 reads ``rope_parameters``; a ``rope_scaling`` would lose the model's own theta;
    and lists of layers would be longer than ``num_hidden_layers``.

    Args:
        settings: The settings of a language model.
        given: The user's values for some settings.
    """
    changes = dict(given)
    if {*ROPE_NAMES} & {*given} and hasattr(settings, "rope_parameters"):
        changes = {name: value for name, value in given.items() if name not in ROPE_NAMES}
        changes["rope_parameters"] = _changed_rope(settings, given)
    layers, fewer = getattr(settings, "num_hidden_layers", 0), given.get("num_hidden_layers")
    if isinstance(fewer, int) and fewer < layers:
        for name, value in settings.to_dict().items():
            each = isinstance(value, list) and len(value) == layers and "layer" in name
            if each and name not in given:
                changes[name] = value[:fewer]
    changed = copy.deepcopy(settings)
    for name, value in changes.items():
        setattr(changed, name, value)
    if "rope_parameters" in changes and hasattr(changed, "standardize_rope_params"):
        changed.standardize_rope_params()
        changes["rope_parameters"] = changed.rope_parameters
    return changed, changes


def _changed_rope(settings: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    own = getattr(settings, "rope_parameters", None) or {}
    flat = {name: given[name] for name in ROPE_NAMES[2:] if name in given}
    scaling = next((given[name] for name in ROPE_NAMES[:2] if name in given), own) or {}
    if not any(isinstance(value, dict) for value in own.values()):
        return _merged(own, scaling, flat)
    # The model has settings for each type of layer. Settings that are given for all layers are
    # meant for full attention.
    if not any(isinstance(value, dict) for value in scaling.values()):
        scaling = {"full_attention": scaling}
    new = {kind: _merged(own.get(kind) or {}, one, {}) for kind, one in scaling.items()}
    full = (own | new)["full_attention"]
    return own | new | {"full_attention": {**full, **flat}}


def _merged(
    own: Mapping[str, Any], scaling: Mapping[str, Any], flat: Mapping[str, Any]
) -> dict[str, Any]:
    """Scaled rotary settings, completed by the model's own settings that belong to no scaling."""
    if scaling is own:
        return {**own, **flat}
    kept = {name: own[name] for name in ROPE_KEPT if name in own}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return {**kept, **flat, **scaling, "rope_type": kind}


def in_transformers(settings: Any) -> torch.nn.Module | None:
    """The model that transformers makes of settings, without weights; ``None`` if it makes none."""
    from transformers import AutoModelForCausalLM

    if settings is None:
        return None
    try:
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(settings))
    except Exception as error:  # a class may raise any exception
        log.info("model.unknown", kind=type(settings).__name__, error=describe_error(error)[:200])
        return None
    return model


def factor_of_logits(settings: Any) -> str | None:
    """The setting that scales a model's logits, if that is not 1. Engines that run the layers of
    transformers' model have an output layer of their own, which leaves such factors out."""
    for name in FACTORS_OF_LOGITS:
        value = getattr(settings, name, None)
        if value not in (None, 1):
            return f"{name}={value!r}"
    return None


@cache
def is_read(family: str, setting: str) -> bool:
    """Whether transformers' code for a family names a setting; true if the code is not found."""
    import transformers.models
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.models.__path__[0]) / model_type_to_module_name(family)
    code = [file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py")]
    # Whole words, because hidden_act is a part of hidden_activation.
    named = re.compile(rf"\b{re.escape(setting)}\b")
    return not code or any(map(named.search, code))


def misread(settings: Any) -> str | None:
    """The setting that the installed transformers computes differently from later versions, and
    from the code with which the model was trained; ``None`` if it computes all of them alike."""
    groups = getattr(settings, "n_groups", None) or 1
    if settings.model_type == "mamba2" and groups > 1:
        from transformers.models.mamba2 import modeling_mamba2

        # Transformers 5.19 normalises the features of all groups together.
        if "group_size" not in signature(modeling_mamba2.MambaRMSNormGated).parameters:
            return f"n_groups={groups}"
    return None


def alike(value: object, other: object) -> bool:
    """Whether two values of a setting mean the same: an activation has several names."""
    if isinstance(value, str) and isinstance(other, str):
        return _ACTIVATIONS.get(value, value) == _ACTIVATIONS.get(other, other)
    return value == other


def rope_parameters(settings: Any) -> dict[str | None, dict[str, Any]]:
    """The rotary settings of each type of layer; under ``None`` if all have the same."""
    return _by_kind(getattr(settings, "rope_parameters", None) or {})


def _by_kind(parameters: Mapping[str, Any]) -> dict[str | None, dict[str, Any]]:
    nested: dict[str | None, dict[str, Any]] = {
        kind: given for kind, given in parameters.items() if isinstance(given, dict)
    }
    return nested or {None: dict(parameters)}


def rope_reach(settings: Any, longest: int, *types: str) -> int:
    """The longest context of a model whose rotary embeddings stretch positions.

    Args:
        settings: Its configuration in transformers.
        longest: The longest context by the configuration alone.
        types: The types of rotary embeddings that the engine stretches as transformers does.
    """
    reach, given = float(longest), rope_parameters(settings)
    for kind, one in given.items():
        rope_type, factor = one.get("rope_type"), one.get("factor") or 1.0
        if rope_type not in types:
            continue
        # If only some layers are linear, as in Gemma 3, the number of positions is already the
        # stretched one.
        original = one.get("original_max_position_embeddings")
        if rope_type == "dynamic":
            reach = max(reach, longest * factor)
        elif rope_type == "linear" and kind is None:
            reach = max(reach, factor * (original or longest))
        elif rope_type == "yarn":
            # YaRN is often switched on as Qwen describes it, without changing the number of
            # positions.
            reach = max(reach, factor * (original or 0))
    return int(reach)


def windows(settings: Any, layers: int) -> list[int | None]:
    """The window of every layer: the most positions that a token attends to, its own included;
    ``None`` is all."""
    window = getattr(settings, "sliding_window", None)
    # A family whose configuration declares neither windows nor types of layers has none.
    kind = type(settings)
    declared = signature(kind).parameters.keys() | getattr(kind, "attribute_map", {}).keys()
    known = "sliding_window" in declared or is_read(settings.model_type, "sliding_window")
    if not (window and known and getattr(settings, "use_sliding_window", True)):
        return [None] * layers
    kinds = getattr(settings, "layer_types", None) if "layer_types" in declared else None
    if kinds is None:
        return [window] * layers
    return [window if one == "sliding_attention" else None for one in kinds]


def layer_type(settings: Any, layer: int) -> str | None:
    """The type of a layer by which rotary embeddings differ; ``None`` if they are all alike."""
    if None in rope_parameters(settings):
        return None
    return str(settings.layer_types[layer])


def rotaries(settings: Any) -> dict[str | None, Rotary]:
    """The rotary embeddings of each type of layer, under ``None`` if all are alike; none if
    transformers' model has none, or computes them in a way of its own."""
    module = _rotary_module(settings)
    if module is None:
        return {}
    found: dict[str | None, Rotary] = {}
    for kind, given in rope_parameters(settings).items():
        prefix = "" if kind is None else f"{kind}_"
        inverse = getattr(module, f"{prefix}inv_freq", None)
        if inverse is not None:
            found[kind] = Rotary(
                kind=given.get("rope_type", "default"),
                inverse=inverse.float(),
                factor=_factor(settings, given, getattr(module, f"{prefix}attention_scaling", 1.0)),
            )
    return found


def _factor(settings: Any, given: Mapping[str, Any], scaling: float) -> float:
    """The factor of rotated features. Phi-3.5-MoE has one of its own for short contexts."""
    own = given.get("short_mscale") if is_read(settings.model_type, "short_mscale") else None
    return float(scaling if own is None else own)


def _rotary_module(settings: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
    if model is None:
        return None
    kinds = [
        kind
        for name, kind in vars(sys.modules[model.__module__]).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    ]
    return kinds[0](settings) if len(kinds) == 1 else None


def rope_limits(settings: Any) -> dict[str, int]:
    """The types of rotary embeddings that have other angles, for all positions, in contexts beyond
    a length; and that length."""
    found: dict[str, int] = {}
    for given in rope_parameters(settings).values():
        match given.get("rope_type"):
            case "longrope" as kind:
                begins = "original_max_position_embeddings"
                found[kind] = given.get(begins, settings.max_position_embeddings)
            case "dynamic" as kind:
                found[kind] = settings.max_position_embeddings
    return found
