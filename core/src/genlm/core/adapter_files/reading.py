"""The reading of an adapter folder: its configuration against its tensors."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from genlm.core.adapter_files.config import CONFIG, KEY, is_suffix, key_name, read_config, shown
from genlm.core.adapter_files.features import (
    FEATURES,
    HARMLESS,
    HEADS,
    MERGE,
    PLAIN_STARTS,
    TIED_TOGETHER,
    Feature,
)
from genlm.core.adapter_files.folder import (
    PREFIX,
    WEIGHTS,
    AdapterFolder,
    LoraModule,
    find_adapter,
)
from genlm.core.adapter_files.tensors import WIDTHS, Tensor, read_header
from genlm.core.errors import InvalidAdapterError


def read_adapter(path: str | os.PathLike[str]) -> AdapterFolder:
    """Read what an adapter folder of PEFT's holds.

    Raises:
        InvalidAdapterError: the folder is missing, is not one of PEFT's, has its weights as a
            pickle, or its files contradict one another.
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
    return _Reading(folder, config, tensors).result()


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


class _Reading:
    """The reading of one folder."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.features: dict[Feature, str] = {}
        self.adapter = AdapterFolder(folder, config, tensors, {}, self.features)

    def result(self) -> AdapterFolder:
        self._check_types()
        self._read_settings()
        modules = self._modules()
        if not self.features.keys() & TIED_TOGETHER:
            self.features.pop(Feature.TIED, None)
        return evolve(self.adapter, modules=modules)

    def _has(self, feature: Feature, value: str) -> None:
        self.features.setdefault(feature, value)

    def _wrong(self, name: str, expected: str) -> InvalidAdapterError:
        value = shown(self.config.get(name))
        return InvalidAdapterError(
            f"LoRA adapter {self.folder} has {name}={value} in {CONFIG}; it must be {expected}"
        )

    def _check_types(self) -> None:
        config = self.config
        if not _is_rank(config.get("r")):
            raise self._wrong("r", "an integer of at least 1")
        if not _is_scale(config.get("lora_alpha")):
            raise self._wrong("lora_alpha", "a finite number")
        for name, right, expected in (
            ("rank_pattern", _is_rank, "module names with an integer of at least 1 each"),
            ("alpha_pattern", _is_scale, "module names with a finite number each"),
        ):
            pattern = config.get(name) or {}
            if not isinstance(pattern, dict) or not all(map(right, pattern.values())):
                raise self._wrong(name, expected)
            for key in pattern:
                if not KEY.fullmatch(key):
                    raise InvalidAdapterError(
                        f"LoRA adapter {self.folder} has the regular expression {shown(key)} in "
                        f"{name}, and regular expressions of files are not run; write the names of "
                        "the modules there"
                    )
        for name in ("modules_to_save", "target_parameters"):
            names = config.get(name) or []
            if not isinstance(names, list) or not all(
                isinstance(each, str) and re.fullmatch(r"[\w.-]+", each) for each in names
            ):
                raise self._wrong(name, "a list of module names")

    def _read_settings(self) -> None:
        for name, value in self.config.items():
            if name in FEATURES:
                if value:
                    self._has(FEATURES[name], f"{name}={shown(value)}")
            elif name == "bias":
                if value not in (None, "none"):
                    self._has(Feature.BIAS, f"bias={shown(value)}")
            elif name == "init_lora_weights":
                if value not in PLAIN_STARTS:
                    self._has(Feature.BASE, f"{name}={shown(value)}")
            elif name not in HARMLESS and value not in (None, False, "", [], {}):
                self._has(Feature.OTHER, f"{name}={shown(value)}")

    def _modules(self) -> dict[str, LoraModule]:
        """What is adapted; other tensors become features."""
        pairs: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.dtype not in WIDTHS:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has {name} of type {shown(tensor.dtype)}; it "
                    f"must be one of {', '.join(WIDTHS)}; save it with such weights"
                )
            if not name.startswith(PREFIX):
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has a tensor {shown(name)}; names must begin "
                    f"with {PREFIX!r}, as PEFT writes them; save it by save_pretrained"
                )
            self._place(name, name.removeprefix(PREFIX), pairs)
        if not pairs:
            raise InvalidAdapterError(
                f"{self.folder / WEIGHTS} has no LoRA matrices (the first of its tensors is "
                f"{next(iter(self.tensors))}); save the adapter again"
            )
        return {module: self._module(module, pairs[module]) for module in sorted(pairs)}

    def _place(self, name: str, rest: str, pairs: dict[str, dict[str, str]]) -> None:
        if parts := re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", rest):
            module, embedding, side = parts.groups()
            pairs.setdefault(module, {})[side] = name
            if embedding:
                self._has(Feature.EMBEDDING, name)
            if module.rpartition(".")[2] in HEADS:
                self._has(Feature.HEAD, name)
        elif rest.endswith(".lora_B.bias"):
            self._has(Feature.LORA_BIAS, name)
        elif ".lora_magnitude_vector" in rest:
            self._has(Feature.DORA, name)
        elif rest.endswith("trainable_tokens_delta"):
            self._has(Feature.TOKENS, name)
        elif self.adapter._is_retrained(rest):
            self._has(Feature.RETRAINED, name)
        elif rest.endswith(".bias"):
            self._has(Feature.BIAS, name)
        elif rest.endswith(".weight"):
            self._has(Feature.SAVED_EMBEDDINGS, name)
        else:
            self._has(Feature.OTHER, f"a tensor {name}")

    def _module(self, name: str, pair: Mapping[str, str]) -> LoraModule:
        if len(pair) < 2:
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has only one of the two matrices of {name}; "
                "save it again"
            )
        down, up = self.tensors[pair["A"]].shape, self.tensors[pair["B"]].shape
        if len(down) < 2 or len(up) < 2 or down[0] != up[1] or not down[0]:
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has matrices of shapes {list(down)} and {list(up)} "
                f"at {name}, which have no product; save it again"
            )
        rank = self._of(name, "rank_pattern", self.config["r"])
        if not self.adapter.adapts_parameters(name) and rank != down[0]:
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has rank {down[0]} at {name}, and {rank} by {CONFIG}; "
                "save it again"
            )
        alpha = self._of(name, "alpha_pattern", self.config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return LoraModule(down[0], down[1], up[0], scale, pair["A"], pair["B"])

    def _of(self, module: str, pattern: str, default: Any) -> Any:
        """What a pattern of names says of a module: the first key that its name ends with."""
        for key, value in (self.config.get(pattern) or {}).items():
            name, whole = key_name(key)
            if module == name or (not whole and is_suffix(name, module)):
                return value
        return default


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
