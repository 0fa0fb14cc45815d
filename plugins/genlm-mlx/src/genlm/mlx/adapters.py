"""LoRA: several adapters at once, each applied to its own rows of a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define

import mlx.core as mx
import mlx.nn as nn
from genlm.core.errors import InvalidOptionError
from genlm.core.types import Adapter
from mlx.utils import tree_unflatten

#: Settings of PEFT's LoRA by which an adapter is more than two matrices a layer, and the values at
#: which it is not.
BEYOND_LORA: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}

FUSE = "merge the adapter into the model's weights, or train plain LoRA"

Weights = tuple[mx.array, mx.array]  # A [in, rank], and B [rank, out] with the scale multiplied in


@define
class Selection:
    """Which adapter each row of the coming forward pass has; 0 is none. The adapters set it, all
    layers read it."""

    versions: Sequence[int] = ()


class RowLoRA(nn.Module):  # type: ignore[misc]
    """A linear layer that adds to every row what the row's adapter says."""

    def __init__(self, base: Any, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self._selection = selection
        self._weights: dict[int, Weights] = {}

    def __call__(self, x: mx.array) -> mx.array:
        y = self.base(x)
        versions = self._selection.versions
        for version in sorted(set(versions) & set(self._weights)):
            a, b = self._weights[version]
            mine = [row for row, each in enumerate(versions) if each == version]
            if len(mine) == len(versions):
                return y + ((x @ a) @ b).astype(y.dtype)
            rows = mx.array(mine, mx.int32)
            y = y.at[rows].add(((x[rows] @ a) @ b).astype(y.dtype))
        return y


class Adapters:
    """The adapters of one model.

    Layers are wrapped when the first adapter touches them, and stay so: without an adapter a
    wrapper only calls its layer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._selection = Selection()

    def select(self, versions: Sequence[int]) -> None:
        """Say which adapter each row of the coming forward pass has."""
        self._selection.versions = versions if any(versions) else ()

    def add(self, adapter: Adapter) -> None:
        """Load an adapter from a folder of mlx-lm or of PEFT.

        Raises:
            InvalidOptionError: it is of a kind, or touches layers, that cannot be applied by row.
        """
        weights = read_adapter(Path(adapter.path))
        modules = dict(self._model.named_modules())
        layers = {name: modules.get(name) for name in weights}
        for name, layer in layers.items():
            self._check(adapter, name, layer, weights[name])
        mx.eval(list(weights.values()))
        wrapped = {
            name: layer if isinstance(layer, RowLoRA) else RowLoRA(layer, self._selection)
            for name, layer in layers.items()
        }
        self._model.update_modules(tree_unflatten(list(wrapped.items())))
        for name, layer in wrapped.items():
            layer._weights[adapter.version] = weights[name]

    def remove(self, version: int) -> None:
        """Drop an adapter's weights."""
        for _, module in self._model.named_modules():
            if isinstance(module, RowLoRA):
                module._weights.pop(version, None)

    def _check(self, adapter: Adapter, name: str, layer: Any, weights: Weights) -> None:
        base = layer.base if isinstance(layer, RowLoRA) else layer
        if not isinstance(base, nn.Linear | nn.QuantizedLinear):
            found = "nothing" if base is None else type(base).__name__
            raise InvalidOptionError(
                f"adapter {adapter.path} changes {name}, where the model has {found}; only linear "
                "layers can be adapted: "
                "give an adapter of them, made for this model"
            )
        outputs, inputs = base.weight.shape
        if isinstance(base, nn.QuantizedLinear):
            inputs = inputs * 32 // base.bits
        if (weights[0].shape[0], weights[1].shape[1]) != (inputs, outputs):
            raise InvalidOptionError(
                f"adapter {adapter.path} is made for another model: at {name} it maps "
                f"{weights[0].shape[0]} to "
                f"{weights[1].shape[1]} features, the model {inputs} to {outputs}; give one made "
                "for this model"
            )


def read_adapter(folder: Path) -> dict[str, Weights]:
    """The weights of an adapter folder, by the name of the layer.

    Raises:
        FileNotFoundError: the folder has no ``adapter_config.json`` or no weights.
        InvalidOptionError: the adapter is no plain LoRA.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    return _read_peft(folder, config) if "peft_type" in config else _read_mlx(folder, config)


def _read_mlx(folder: Path, config: Mapping[str, Any]) -> dict[str, Weights]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise InvalidOptionError(
            f"adapter {folder} has fine_tune_type={kind!r}; only 'lora' is applied by row: {FUSE}"
        )
    scale = _number(folder, "lora_parameters.scale", config.get("lora_parameters", {}).get("scale"))
    pairs = _pairs(folder, _tensors(folder / "adapters.safetensors"), ".lora_a", ".lora_b")
    return {layer: (a, b * scale) for layer, (a, b) in pairs.items()}


def _read_peft(folder: Path, config: Mapping[str, Any]) -> dict[str, Weights]:
    for name, value in config.items():
        if name in BEYOND_LORA and value not in BEYOND_LORA[name]:
            raise InvalidOptionError(
                f"adapter {folder} has {name}={value!r}; only plain LoRA can be applied by row: "
                f"{FUSE}"
            )
    rank, alpha = (_number(folder, name, config.get(name)) for name in ("r", "lora_alpha"))
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = _tensors(folder / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    pairs = _pairs(folder, named, ".lora_A.weight", ".lora_B.weight")
    return {layer: (a.T, b.T * scale) for layer, (a, b) in pairs.items()}


def _number(folder: Path, name: str, value: Any) -> float:
    if not isinstance(value, int | float):
        raise InvalidOptionError(
            f"adapter {folder} has {name}={value!r} in adapter_config.json; it must be a number"
        )
    return value


def _tensors(file: Path) -> Mapping[str, mx.array]:
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist; give the folder that mlx-lm or PEFT saved the adapter in"
        )
    tensors: Mapping[str, mx.array] = mx.load(str(file))
    return tensors


def _pairs(folder: Path, tensors: Mapping[str, mx.array], *suffixes: str) -> dict[str, Weights]:
    """The two matrices of every layer that has them."""
    strange = [name for name in tensors if not name.endswith(suffixes)]
    if strange or not tensors:
        found = strange[0] if strange else "no tensors"
        raise InvalidOptionError(
            f"adapter {folder} has {found} where LoRA weights were expected; {FUSE}"
        )
    layers = sorted(
        {
            name.removesuffix(suffix)
            for name in tensors
            for suffix in suffixes
            if name.endswith(suffix)
        }
    )
    for layer in layers:
        if any(layer + suffix not in tensors for suffix in suffixes):
            raise InvalidOptionError(
                f"adapter {folder} has only one of the two matrices of {layer}; save it again"
            )
    return {layer: (tensors[layer + suffixes[0]], tensors[layer + suffixes[1]]) for layer in layers}
