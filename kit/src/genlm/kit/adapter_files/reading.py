"""Reads an adapter folder, and compares its configuration with its tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files.config import CONFIG, brief, read_config
from genlm.kit.adapter_files.features import (
    FEATURES,
    HARMLESS,
    HEADS,
    MERGE,
    PLAIN_STARTS,
    TIED_TOGETHER,
    Feature,
)
from genlm.kit.adapter_files.folder import (
    PREFIX,
    WEIGHTS,
    AdapterFolder,
    LoraModule,
    find_adapter,
)
from genlm.kit.adapter_files.settings import MAX_NAMES, Settings
from genlm.kit.adapter_files.tensors import DTYPES, Tensor, read_header, require_finite

#: The end of the names of trained embeddings of single tokens.
TOKENS = "trainable_tokens_delta"


def read_adapter(path: str | os.PathLike[str]) -> AdapterFolder:
    """Read what an adapter folder of PEFT's holds.

    Raises:
        InvalidAdapterError: the folder is missing or not one of PEFT's, its weights are a pickle
            or not finite, or its files contradict one another.
    """
    folder = find_adapter(os.fspath(path))
    config = read_config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapterError(
            f"LoRA adapter {folder} has peft_type={kind!r} in {CONFIG}; it must be 'LORA'; "
            f"other kinds cannot be switched by request: {MERGE}"
        )
    tensors = read_header(_weights(folder))
    if not tensors:
        raise InvalidAdapterError(f"{folder / WEIGHTS} has no tensors; save the adapter again")
    adapter = AdapterFolder(folder, config, Settings(folder, config), tensors)
    for field, value in config.items():
        if (feature := _feature_of(field, value)) is not None:
            adapter.features.setdefault(feature, f"{field}={brief(value)}")
    _read_tensors(adapter)
    _check_tokens(adapter)
    if not adapter.features.keys() & TIED_TOGETHER:
        adapter.features.pop(Feature.TIED, None)
    require_finite(folder / WEIGHTS, tensors.values())
    return adapter


def _weights(folder: Path) -> Path:
    file = folder / WEIGHTS
    if file.is_file():
        return file
    pickles = [
        name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()
    ]
    if pickles:
        raise InvalidAdapterError(
            f"LoRA adapter {folder} has its weights in {pickles[0]}, a pickle, which can run code "
            f"when it is read; save it as {WEIGHTS} (save_pretrained in PEFT, with "
            "safe_serialization=True)"
        )
    raise InvalidAdapterError(
        f"{file} does not exist; give the folder that a LoRA adapter was saved in"
    )


def _feature_of(field: str, value: object) -> Feature | None:
    """The feature that a field of the configuration asks for; ``None`` if it asks for none."""
    if field in FEATURES:
        return FEATURES[field] if value else None
    if field == "bias":
        return Feature.BIAS if value not in (None, "none") else None
    if field == "init_lora_weights":
        return Feature.BASE if value not in PLAIN_STARTS else None
    harmless = field in HARMLESS or value in (None, False, "", [], {})
    return None if harmless else Feature.OTHER


def _read_tensors(adapter: AdapterFolder) -> None:
    """Find the LoRA matrices of each module. Other tensors become features."""
    pairs: dict[str, dict[str, str]] = {}
    for name, tensor in adapter.tensors.items():
        if tensor.dtype not in DTYPES:
            raise InvalidAdapterError(
                f"LoRA adapter {adapter.path} has {name} of type {brief(tensor.dtype)}; it "
                f"must be one of {', '.join(DTYPES)}; save it with such weights"
            )
        if not name.startswith(PREFIX):
            raise InvalidAdapterError(
                f"LoRA adapter {adapter.path} has a tensor {brief(name)}; names must begin "
                f"with {PREFIX!r}, as PEFT writes them; save it by save_pretrained"
            )
        _place(adapter, tensor, name.removeprefix(PREFIX), pairs)
    if not pairs:
        raise InvalidAdapterError(
            f"{adapter.path / WEIGHTS} has no LoRA matrices (the first of its tensors is "
            f"{next(iter(adapter.tensors))}); save the adapter again"
        )
    for module in sorted(pairs):
        adapter.modules[module] = _module(adapter, module, pairs[module])


def _place(
    adapter: AdapterFolder, tensor: Tensor, rest: str, pairs: dict[str, dict[str, str]]
) -> None:
    name, found = tensor.name, adapter.features.setdefault
    if parts := re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", rest):
        module, embedding, side = parts.groups()
        pairs.setdefault(module, {})[side] = name
        if embedding:
            found(Feature.EMBEDDING, name)
        if module.rpartition(".")[2] in HEADS:
            found(Feature.HEAD, name)
    elif rest.endswith(".lora_B.bias"):
        found(Feature.LORA_BIAS, name)
    elif ".lora_magnitude_vector" in rest:
        found(Feature.DORA, name)
    elif rest.endswith(TOKENS):
        found(Feature.TOKENS, name)
    # PEFT takes every module whose name ends so: "norm" also matches "input_layernorm".
    elif saved := {each for each in adapter.settings.modules_to_save if f"{each}." in rest}:
        adapter.retrained.update(saved)
    elif rest.endswith(".bias"):
        found(Feature.BIAS, name)
    elif rest.endswith(".weight"):
        found(Feature.SAVED_EMBEDDINGS, name)
        adapter.saved_copies[rest.replace(".base_layer.", ".")] = tensor
    else:
        found(Feature.OTHER, f"a tensor {name}")


def _check_tokens(adapter: AdapterFolder) -> None:
    """Single token embeddings: as many indices as rows, for PEFT allocates by the indices."""
    field = "trainable_token_indices"
    given = adapter.config.get(field) or {}
    by_layer = given if isinstance(given, dict) else {"": given}
    trained = {name: each.shape for name, each in adapter.tensors.items() if name.endswith(TOKENS)}
    if len(by_layer) > MAX_NAMES:
        raise adapter.settings.wrong(field, f"for at most {MAX_NAMES} modules")
    for layer, indices in by_layer.items():
        if not isinstance(indices, list) or not all(
            type(each) is int and each >= 0 for each in indices
        ):
            raise adapter.settings.wrong(field, "token ids, or lists of them by module name")
        rows = {shape[:1] for name, shape in trained.items() if f"{layer}." in name}
        if rows != {(len(indices),)}:
            raise InvalidAdapterError(
                f"LoRA adapter {adapter.path} has {len(indices)} indices in {field}, and "
                f"{'other' if rows else 'no'} rows for them; save it again"
            )


def _module(adapter: AdapterFolder, name: str, pair: Mapping[str, str]) -> LoraModule:
    if len(pair) < 2:
        raise InvalidAdapterError(
            f"LoRA adapter {adapter.path} has only one of the two matrices of {name}; save it again"
        )
    down, up = adapter.tensors[pair["A"]].shape, adapter.tensors[pair["B"]].shape
    if len(down) < 2 or len(up) < 2 or down[0] != up[1] or not down[0]:
        raise InvalidAdapterError(
            f"LoRA adapter {adapter.path} has matrices of shapes {list(down)} and {list(up)} "
            f"at {name}, which have no product; save it again"
        )
    rank = adapter.settings.rank(name)
    if rank != down[0] and not adapter.settings.adapts_parameters(name):
        raise InvalidAdapterError(
            f"LoRA adapter {adapter.path} has rank {down[0]} at {name}, and {rank} by {CONFIG}; "
            "save it again"
        )
    scale = adapter.settings.scale(name)
    return LoraModule(down[0], down[1], up[0], scale, pair["A"], pair["B"])
