"""Adapters that name a model's modules otherwise: as transformers 4 did, or as the text model alone
does."""

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

#: What names of its matrices have in the middle.
LORA = ".lora_"

#: What PEFT does not convert where it puts the matrices of several modules together.
PER_MODULE = (Feature.RANKS, Feature.ALPHAS, Feature.RSLORA)


@contextmanager
def in_names_of(
    model: Any,
    folder: AdapterFolder,
    shapes: Mapping[str, tuple[int, int]],
    parameters: Mapping[str, tuple[int, ...]],
) -> Iterator[AdapterFolder]:
    """The adapter in the names of this model: as it is, or converted by PEFT, or with the text
    model's place before its names; the first of these that names modules of the model alone.

    Args:
        model: The model.
        folder: The adapter.
        shapes, parameters: Of the model's modules and parameters, without adapters.
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
        yield folder  # it is for another model
        return
    if isinstance(folder.config.get("exclude_modules"), str):  # of the names as they were
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
    """The modules of this model on which an adapter with other names was trained: those that it
    adapts, and those of the same kinds in layers in which it adapts too little by its settings."""
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
    """Its tensors and settings, as PEFT converts them for this version of transformers."""
    from peft import LoraConfig
    from peft.utils import load_peft_weights
    from peft.utils import transformers_weight_conversion as conversion

    given, adapts = folder.config, folder.settings.adapts_parameters
    listed = isinstance(given.get("target_modules"), list)  # an expression is not run
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
    except Exception as error:  # of matrices that do not belong together, PEFT raises anything
        raise InvalidAdapterError(
            f"LoRA adapter {folder.path} cannot be converted for this version of transformers "
            f"({type(error).__name__}: {' '.join(str(error).split())}); save it again there"
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
    """The same for an adapter of the text model alone."""
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
    """Raises: InvalidAdapterError: it says of single modules what is not converted with their
    names, or of those whose matrices PEFT has put together."""
    ranks = folder.config.get("rank_pattern") or {}
    named = {*ranks, *(folder.config.get("alpha_pattern") or {})}
    joined = settings.get("rank_pattern", ranks) != ranks
    if any("." in name for name in named) or (joined and folder.features.keys() & {*PER_MODULE}):
        found = [folder.features[each] for each in PER_MODULE if each in folder.features]
        raise InvalidAdapterError(
            f"LoRA adapter {folder.path} names modules as another version of transformers did, and "
            f"has {', '.join(found)}, which is not converted; save it again under this version"
        )
