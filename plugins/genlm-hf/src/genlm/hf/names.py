"""Adapters that use other names for a model's modules: those of transformers 4, or those of the
text model alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from genlm.core.errors import InvalidAdapterError
from genlm.core.logs import get_logger
from genlm.kit.adapter_files import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterFolder,
    Feature,
    kind,
    read_adapter,
)

logger = get_logger()

#: The middle part of the names of LoRA matrices.
LORA = ".lora_"

#: Features that PEFT does not convert when it joins the matrices of several modules.
PER_MODULE = (Feature.RANKS, Feature.ALPHAS, Feature.RSLORA)


@contextmanager
def in_names_of(
    model: Any,
    folder: AdapterFolder,
    shapes: Mapping[str, tuple[int, int]],
    parameters: Mapping[str, tuple[int, ...]],
) -> Iterator[AdapterFolder]:
    """The adapter, with module names that this model has. Tried in turn: its own names, names
    converted by PEFT, and names prefixed with the place of the text model in this one. The first
    version all of whose names exist in the model is used.

    Args:
        model: The model.
        folder: The adapter.
        shapes, parameters: The shapes of modules and parameters of the model without adapters.
    """
    owners = {name.rpartition(".")[0] for name in parameters}

    def fits(modules: Iterable[str]) -> bool:
        return {name.replace(".base_layer", "") for name in modules} <= owners

    if fits(folder.modules):
        yield folder
        return
    for convert in (_converted, _placed):
        tensors, settings = convert(model, folder)
        adapted = {name.removeprefix(PREFIX).partition(LORA)[0] for name in tensors if LORA in name}
        if fits(adapted):
            break
    else:
        yield folder  # the adapter is made for another model, which later checks report
        return
    # The expression matches the old names.
    if isinstance(folder.config.get("exclude_modules"), str):
        settings |= {"target_modules": None, "exclude_modules": None}
    if not settings.get("target_modules"):
        settings["target_modules"] = sorted(_trained(folder, adapted, shapes))
    _require_alike(folder, settings)
    from safetensors.torch import save_file

    logger.info("adapter.renamed", path=str(folder.path), how=convert.__name__.strip("_"))
    with tempfile.TemporaryDirectory(prefix="genlm-adapter-") as place:
        Path(place, CONFIG).write_text(json.dumps({**folder.config, **settings}))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, Path(place, WEIGHTS))
        try:
            yield read_adapter(place)
        except InvalidAdapterError as error:
            raise InvalidAdapterError(str(error).replace(place, str(folder.path))) from error


def _trained(
    folder: AdapterFolder, adapted: Collection[str], modules: Collection[str]
) -> Iterator[str]:
    """The modules of this model on which a renamed adapter was trained: those that it adapts, and
    those of the same kinds that its settings target but for which it has no matrices."""
    kinds, before = set(map(kind, adapted)), set(map(kind, folder.modules))
    for name in modules:
        last = name.rpartition(".")[2]
        number = next((part for part in name.split(".") if part.isdecimal()), "")
        was = {each.replace("*", number, 1) for each in before if each.endswith(f".{last}")}
        if name in adapted or (
            kind(name) in kinds and any(folder.settings.targets(each, alike=True) for each in was)
        ):
            yield name


def _converted(model: Any, folder: AdapterFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adapter's tensors and settings, converted by PEFT for this version of transformers."""
    from peft import LoraConfig
    from peft.utils import load_peft_weights
    from peft.utils import transformers_weight_conversion as conversion

    given, adapts = folder.config, folder.settings.adapts_parameters
    # A regular expression from the file is never evaluated.
    listed = isinstance(given.get("target_modules"), list)
    leaves = {name.rpartition(".")[2] for name in folder.modules if not adapts(name)}
    config = LoraConfig(
        r=given["r"],
        lora_alpha=given["lora_alpha"],
        target_modules=given["target_modules"] if listed else leaves,
        target_parameters=sorted(folder.settings.target_parameters) or None,
        rank_pattern=dict(given.get("rank_pattern") or {}),
        alpha_pattern=dict(given.get("alpha_pattern") or {}),
    )
    try:
        conversion.convert_peft_config_for_transformers(config, model, None)
        mapping = getattr(model, "_checkpoint_conversion_mapping", None) or None
        tensors = load_peft_weights(str(folder.path), device="cpu", key_mapping=mapping)
        tensors = conversion.convert_peft_adapter_state_dict_for_transformers(
            model, config, tensors
        )
    # For matrices that do not belong together, PEFT may raise any exception.
    except Exception as error:
        raise InvalidAdapterError(
            f"LoRA adapter {folder.path} cannot be converted for this version of transformers "
            f"({type(error).__name__}: {' '.join(str(error).split())}); save it again "
            "with that version"
        ) from error
    settings: dict[str, Any] = {
        "target_parameters": sorted(config.target_parameters or ()),
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
    }
    if listed:
        settings["target_modules"] = sorted(config.target_modules)
    return tensors, settings


def _placed(model: Any, folder: AdapterFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of an adapter of the text model alone, with names of the whole model; no settings
    change."""
    from safetensors.torch import load_file

    decoder = getattr(model, "get_decoder", lambda: None)()
    place = next((name for name, each in model.named_modules() if each is decoder), "model")
    old, new = f"{PREFIX}model.", f"{PREFIX}{place}."
    tensors = load_file(folder.path / WEIGHTS)
    return {
        name.replace(old, new, 1) if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }, {}


def _require_alike(folder: AdapterFolder, settings: Mapping[str, Any]) -> None:
    """Raises: InvalidAdapterError: the adapter has settings for single modules, which are not
    converted with the names, or for modules whose matrices PEFT has joined."""
    ranks = folder.config.get("rank_pattern") or {}
    named = {*ranks, *(folder.config.get("alpha_pattern") or {})}
    joined = settings.get("rank_pattern", ranks) != ranks
    if any("." in name for name in named) or (joined and folder.features.keys() & {*PER_MODULE}):
        found = [folder.features[each] for each in PER_MODULE if each in folder.features]
        raise InvalidAdapterError(
            f"LoRA adapter {folder.path} has the module names of another version of transformers, "
            f"and {', '.join(found)}, which cannot be converted; save it again with the installed "
            "version"
        )
