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

Weights = tuple[mx.array, mx.array]  # A [in, rank], and B [rank, out] with the scale multiplied in


@define
class Selection:
    """Which adapter each row of the coming forward pass has; 0 is none. The adapters set it, all layers read it."""

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

    Layers are wrapped when the first adapter touches them, and stay so: without an adapter a wrapper only calls its layer.
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
            name: layer if isinstance(layer, RowLoRA) else RowLoRA(layer, self._selection) for name, layer in layers.items()
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
                f"adapter {adapter.path} changes {name}, where the model has {found}; only linear layers can be adapted"
            )
        outputs, inputs = base.weight.shape
        if isinstance(base, nn.QuantizedLinear):
            inputs = inputs * 32 // base.bits
        if (weights[0].shape[0], weights[1].shape[1]) != (inputs, outputs):
            raise InvalidOptionError(
                f"adapter {adapter.path} is made for another model: at {name} it maps {weights[0].shape[0]} to "
                f"{weights[1].shape[1]} features, the model {inputs} to {outputs}"
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
        raise InvalidOptionError(f"adapter {folder} has fine_tune_type={kind!r}; only 'lora' can be applied by row")
    scale = config["lora_parameters"]["scale"]
    return _paired(folder, mx.load(str(folder / "adapters.safetensors")), ".lora_a", ".lora_b", lambda a, b: (a, b * scale))


def _read_peft(folder: Path, config: Mapping[str, Any]) -> dict[str, Weights]:
    _refuse_beyond_lora(folder, config)
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in mx.load(str(folder / "adapter_model.safetensors")).items()
    }
    return _paired(folder, tensors, ".lora_A.weight", ".lora_B.weight", lambda a, b: (a.T, b.T * scale))


def _refuse_beyond_lora(folder: Path, config: Mapping[str, Any]) -> None:
    plain: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "bias": (None, "none"),
        "use_dora": (None, False),
        "modules_to_save": (None, []),
        "rank_pattern": (None, {}),
        "alpha_pattern": (None, {}),
        "fan_in_fan_out": (None, False),
    }
    for name, accepted in plain.items():
        if config.get(name) not in accepted:
            raise InvalidOptionError(f"adapter {folder} has {name}={config[name]!r}; only plain LoRA can be applied by row")


def _paired(folder: Path, tensors: Mapping[str, mx.array], a_suffix: str, b_suffix: str, pair: Any) -> dict[str, Weights]:
    strange = [name for name in tensors if not name.endswith((a_suffix, b_suffix))]
    if strange or not tensors:
        raise InvalidOptionError(f"adapter {folder} has {strange[:1] or 'no tensors'} where LoRA weights were expected")
    layers = [name.removesuffix(a_suffix) for name in tensors if name.endswith(a_suffix)]
    return {layer: pair(tensors[layer + a_suffix], tensors[layer + b_suffix]) for layer in layers}
