"""LoRA: several adapters at once, each applied to its own sequences of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mlx.core as mx
import mlx.nn as nn
from genlm.core.errors import InvalidAdapterError
from genlm.core.types import Adapter
from genlm.kit.adapter_files import (
    WEIGHTS,
    AdapterFolder,
    Feature,
    find_adapter,
    read_adapter,
    read_config,
)
from genlm.mlx.folders import MlxFolder, Weights
from genlm.mlx.repairs import folded
from mlx.utils import tree_unflatten

#: Settings of PEFT beyond plain LoRA that can be applied to each sequence separately.
APPLIED = frozenset({
    Feature.RSLORA, Feature.RANKS, Feature.ALPHAS, Feature.HEAD, Feature.SAVED_EMBEDDINGS,
})  # fmt: skip


#: The numbers of input and output features of each layer.
Shapes = Mapping[str, tuple[int, int]]

#: The version of each sequence's adapter; 0 means none.
Versions = Sequence[int] | np.ndarray

#: For each adapter's version, the sequences of the next forward pass that use it. Sequences without
#: an adapter are left out. ``None`` means all sequences.
Selection = dict[int, mx.array | None]


class SequenceLoRA(nn.Module):  # type: ignore[misc]
    """A linear layer that adds to every sequence the result of its adapter. :class:`Adapters` sets
    the selection, which all layers read."""

    def __init__(self, base: Any, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self._selection = selection
        self._weights: dict[int, Weights] = {}

    def __call__(self, x: mx.array) -> mx.array:
        y = self.base(x)
        for version, some in self._selection.items():
            if version not in self._weights:
                continue
            a, b = self._weights[version]
            if some is None:
                return y + ((x @ a) @ b).astype(y.dtype)
            y = y.at[some].add(((x[some] @ a) @ b).astype(y.dtype))
        return y


class Adapters:
    """The adapters of one model.

    A layer is wrapped when the first adapter changes it, and stays wrapped. Without an adapter, a
    wrapper only calls its layer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._selection: Selection = {}

    def select(self, versions: Versions) -> None:
        """Set the adapter of each sequence of the next forward pass."""
        each = np.asarray(versions)
        found = np.unique(each).tolist()
        self._selection.clear()
        for version in filter(None, found):
            some = mx.array(np.flatnonzero(each == version), mx.int32) if found[1:] else None
            self._selection[version] = some

    def add(self, adapter: Adapter, contents: AdapterFolder | MlxFolder) -> None:
        """Load an adapter.

        Args:
            adapter: The adapter.
            contents: The result of :func:`read_folder`.

        Raises:
            InvalidAdapterError: the adapter is invalid, is made for another model, or changes
                layers that cannot be adapted for each sequence separately.
        """
        modules = dict(self._model.named_modules())
        for name in [name for name, each in modules.items() if isinstance(each, SequenceLoRA)]:
            del modules[f"{name}.base"]
        weights = self._read(contents, modules)
        layers = {name: modules[name] for name in weights}
        mx.eval(list(weights.values()))
        wrapped = {
            name: layer if isinstance(layer, SequenceLoRA) else SequenceLoRA(layer, self._selection)
            for name, layer in layers.items()
        }
        self._model.update_modules(tree_unflatten(list(wrapped.items())))
        for name, layer in wrapped.items():
            layer._weights[adapter.version] = weights[name]

    def remove(self, version: int) -> None:
        """Drop an adapter's weights."""
        for _, module in self._model.named_modules():
            if isinstance(module, SequenceLoRA):
                module._weights.pop(version, None)

    def _read(
        self, adapter: AdapterFolder | MlxFolder, modules: Mapping[str, Any]
    ) -> dict[str, Weights]:
        shapes = _shapes(modules)
        if isinstance(adapter, MlxFolder):
            _check(adapter.path, adapter.layers, modules, shapes)
            adapter.require_whole(shapes, len(self._model.layers))
            return adapter.weights()
        adapted = {name: (one.inputs, one.outputs) for name, one in adapter.modules.items()}
        _check(adapter.path, adapted, modules, shapes)
        adapter.require_whole(shapes)
        tensors: Mapping[str, mx.array] = mx.load(str(adapter.path / WEIGHTS))
        self._require_same_weights(adapter, tensors, modules)
        return {
            name: (
                tensors[module.down].T.astype(mx.float32),
                tensors[module.up].T.astype(mx.float32)
                * module.scale
                * folded(self._model, name, module.outputs),
            )
            for name, module in adapter.modules.items()
        }

    def _require_same_weights(
        self, adapter: AdapterFolder, tensors: Mapping[str, mx.array], modules: Mapping[str, Any]
    ) -> None:
        """Check the copy of the output layer that PEFT saves if LoRA changes that layer; it may
        belong to another model.

        Raises:
            InvalidAdapterError: the copy belongs to another model; or this model's weights are
                quantised, so that they cannot be compared.
        """
        for name, saved in adapter.saved_copies.items():
            layer = name.rpartition(".")[0]
            module = modules.get(layer)
            module = module.base if isinstance(module, SequenceLoRA) else module
            weight = getattr(module, "weight", None)
            copy = tensors[saved.name]
            if weight is not None and weight.shape == copy.shape:
                copy = (copy.T * folded(self._model, layer, len(copy))).T.astype(weight.dtype)
                if mx.allclose(copy, weight, rtol=2**-7, atol=1e-6):
                    continue
            raise InvalidAdapterError(
                f"LoRA adapter {adapter.path} holds {name}, which is not this model's; give the "
                "base model that it was trained on, or save the adapter with "
                "save_embedding_layers=False"
            )


def read_folder(path: str) -> AdapterFolder | MlxFolder:
    """The contents of an adapter's files, without its weights. Called from any thread.

    Raises:
        InvalidAdapterError: the adapter is invalid, or of a kind that cannot be applied to each
            sequence separately.
    """
    folder = find_adapter(path)
    config = read_config(folder)
    if "peft_type" not in config:
        return MlxFolder.read(folder, config)
    adapter = read_adapter(folder)
    adapter.require(APPLIED, "mlx")
    return adapter


def _shapes(modules: Mapping[str, Any]) -> Shapes:
    """The numbers of input and output features of each linear layer."""
    shapes = {}
    for name, module in modules.items():
        base = module.base if isinstance(module, SequenceLoRA) else module
        if isinstance(base, nn.Linear | nn.QuantizedLinear):
            outputs, inputs = base.weight.shape
            packed = isinstance(base, nn.QuantizedLinear)
            shapes[name] = (inputs * 32 // base.bits if packed else inputs, outputs)
    return shapes


def _check(folder: Path, adapted: Shapes, modules: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises: InvalidAdapterError: the model has no linear layers of these names and shapes."""
    for name, shape in adapted.items():
        if name not in shapes:
            found = type(modules[name]).__name__ if name in modules else "nothing"
            raise InvalidAdapterError(
                f"LoRA adapter {folder} changes {name}, where the model has {found}; only linear "
                "layers can be adapted: give an adapter of them, made for this model"
            )
        if shape != shapes[name]:
            raise InvalidAdapterError(
                f"LoRA adapter {folder} is made for another model: at {name} it maps {shape[0]} to "
                f"{shape[1]} features, the model {shapes[name][0]} to {shapes[name][1]}; give one "
                "made for this model"
            )
