"""The reading of an adapter folder: its configuration against its tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.core.engines.adapter_files.config import CONFIG, brief, read_config
from genlm.core.engines.adapter_files.features import (
    FEATURES,
    HARMLESS,
    HEADS,
    MERGE,
    PLAIN_STARTS,
    TIED_TOGETHER,
    Feature,
)
from genlm.core.engines.adapter_files.folder import (
    PREFIX,
    WEIGHTS,
    AdapterFolder,
    LoraModule,
    find_adapter,
)
from genlm.core.engines.adapter_files.settings import MOST_NAMES, Settings
from genlm.core.engines.adapter_files.tensors import DTYPES, Tensor, read_header
from genlm.core.errors import InvalidAdapterError

#: The end of the name of single token embeddings that were trained.
TOKENS = "trainable_tokens_delta"


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
        self.settings = Settings(folder, config)
        self.features: dict[Feature, str] = {}
        self.copies: dict[str, Tensor] = {}
        self.retrained: set[str] = set()

    def result(self) -> AdapterFolder:
        self._read_settings()
        modules = self._modules()
        self._check_tokens()
        if not self.features.keys() & TIED_TOGETHER:
            self.features.pop(Feature.TIED, None)
        return AdapterFolder(
            self.folder,
            self.config,
            self.settings,
            self.tensors,
            modules,
            self.features,
            self.copies,
            self.retrained,
        )

    def _has(self, feature: Feature, value: str) -> None:
        self.features.setdefault(feature, value)

    def _read_settings(self) -> None:
        for name, value in self.config.items():
            if name in FEATURES:
                if value:
                    self._has(FEATURES[name], f"{name}={brief(value)}")
            elif name == "bias":
                if value not in (None, "none"):
                    self._has(Feature.BIAS, f"bias={brief(value)}")
            elif name == "init_lora_weights":
                if value not in PLAIN_STARTS:
                    self._has(Feature.BASE, f"{name}={brief(value)}")
            elif name not in HARMLESS and value not in (None, False, "", [], {}):
                self._has(Feature.OTHER, f"{name}={brief(value)}")

    def _modules(self) -> dict[str, LoraModule]:
        """What is adapted; other tensors become features."""
        pairs: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has {name} of type {brief(tensor.dtype)}; it "
                    f"must be one of {', '.join(DTYPES)}; save it with such weights"
                )
            if not name.startswith(PREFIX):
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has a tensor {brief(name)}; names must begin "
                    f"with {PREFIX!r}, as PEFT writes them; save it by save_pretrained"
                )
            self._place(tensor, name.removeprefix(PREFIX), pairs)
        if not pairs:
            raise InvalidAdapterError(
                f"{self.folder / WEIGHTS} has no LoRA matrices (the first of its tensors is "
                f"{next(iter(self.tensors))}); save the adapter again"
            )
        return {module: self._module(module, pairs[module]) for module in sorted(pairs)}

    def _place(self, tensor: Tensor, rest: str, pairs: dict[str, dict[str, str]]) -> None:
        name = tensor.name
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
        elif rest.endswith(TOKENS):
            self._has(Feature.TOKENS, name)
        # PEFT takes every module whose name ends so: "norm" is also "input_layernorm".
        elif saved := {each for each in self.settings.modules_to_save if f"{each}." in rest}:
            self._has(Feature.RETRAINED, name)
            self.retrained |= saved
        elif rest.endswith(".bias"):
            self._has(Feature.BIAS, name)
        elif rest.endswith(".weight"):
            self._has(Feature.SAVED_EMBEDDINGS, name)
            self.copies[rest.replace(".base_layer.", ".")] = tensor
        else:
            self._has(Feature.OTHER, f"a tensor {name}")

    def _check_tokens(self) -> None:
        """Single token embeddings: as many indices as rows, for PEFT allocates by the indices."""
        field = "trainable_token_indices"
        given = self.config.get(field) or {}
        by_layer = given if isinstance(given, dict) else {"": given}
        trained = {name: each.shape for name, each in self.tensors.items() if name.endswith(TOKENS)}
        if len(by_layer) > MOST_NAMES:
            raise self.settings.wrong(field, f"for at most {MOST_NAMES} modules")
        for layer, indices in by_layer.items():
            if not isinstance(indices, list) or not all(type(each) is int for each in indices):
                raise self.settings.wrong(field, "token ids, or lists of them by module name")
            rows = {shape[:1] for name, shape in trained.items() if f"{layer}." in name}
            if rows != {(len(indices),)}:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has {len(indices)} indices in {field}, and "
                    f"{'other' if rows else 'no'} rows for them; save it again"
                )

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
        rank = self.settings.rank(name)
        if rank != down[0] and not self.settings.adapts_parameters(name):
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has rank {down[0]} at {name}, and {rank} by {CONFIG}; "
                "save it again"
            )
        scale = self.settings.scale(name)
        return LoraModule(down[0], down[1], up[0], scale, pair["A"], pair["B"])
