"""Adapter folders that mlx-lm saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

import mlx.core as mx
from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files import (
    SCALE,
    Tensor,
    is_scale,
    kind,
    read_header,
    require_finite,
)

#: The file in which mlx-lm saves weights, and the ends of the names of a layer's two matrices.
WEIGHTS = "adapters.safetensors"
DOWN, UP = ".lora_a", ".lora_b"

FUSE = "merge the adapter into the model's weights, or train plain LoRA"

#: A [in, rank], and B [rank, out] with the scale multiplied in. They are float32, in which PEFT and
#: mlx-lm compute, whatever the type of the file.
Weights = tuple[mx.array, mx.array]


@frozen
class MlxFolder:
    """The contents of a folder's files, without its weights.

    Attributes:
        path: The folder.
        scale: The factor of the product of the two matrices.
        layers: For each layer's name, its numbers of input and output features.
        depth: How many of the model's last blocks the adapter was trained on. 0 or less means all,
            ``None`` unknown.
    """

    path: Path
    scale: float
    layers: Mapping[str, tuple[int, int]]
    depth: int | None

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> MlxFolder:
        """Check the configuration and the header of the weights.

        Raises:
            InvalidAdapterError: the folder has no weights, has weights that are not finite, or is
                not plain LoRA.
        """
        tuned = config.get("fine_tune_type", "lora")
        if tuned != "lora":
            raise InvalidAdapterError(
                f"LoRA adapter {path} has fine_tune_type={tuned!r:.40}; only 'lora' is applied by "
                f"sequence: {FUSE}"
            )
        parameters = config.get("lora_parameters")
        scale = parameters.get("scale") if isinstance(parameters, dict) else None
        if scale is None or not is_scale(scale):
            raise InvalidAdapterError(
                f"LoRA adapter {path} has lora_parameters.scale={scale!r:.40} in "
                f"adapter_config.json; it must be {SCALE}"
            )
        file = path / WEIGHTS
        if not file.is_file():
            raise InvalidAdapterError(
                f"{file} does not exist; give the folder that mlx-lm or PEFT saved the adapter in"
            )
        tensors = read_header(file)
        layers = _layers(path, tensors)
        require_finite(file, tensors.values())
        depth = config.get("num_layers", config.get("lora_layers"))
        return cls(path, float(scale), layers, depth if type(depth) is int else None)

    def require_whole(self, names: Collection[str], blocks: int) -> None:
        """Reject an adapter whose file is incomplete. mlx-lm trains the same layers in each of the
        last blocks.

        Args:
            names: The names of the model's linear layers.
            blocks: How many blocks the model has.

        Raises:
            InvalidAdapterError: the file lacks a layer.
        """
        if self.depth is None:
            return
        kinds = set(map(kind, self.layers))
        first = max(0, blocks - self.depth) if self.depth > 0 else 0
        for name in names:
            if name in self.layers or kind(name) not in kinds:
                continue
            if int(next(part for part in name.split(".") if part.isdecimal())) >= first:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} lacks the matrices of {name}, where "
                    f"adapter_config.json says num_layers={self.depth}; save it again, or write "
                    "there how many of the last blocks it adapts"
                )

    def weights(self) -> dict[str, Weights]:
        """The matrices of each layer."""
        tensors = mx.load(str(self.path / WEIGHTS))
        return {
            name: (
                tensors[name + DOWN].astype(mx.float32),
                tensors[name + UP].astype(mx.float32) * self.scale,
            )
            for name in self.layers
        }


def _layers(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Raises: InvalidAdapterError: the tensors are not pairs of matrices that fit together."""
    strange = [name for name in tensors if not name.endswith((DOWN, UP))]
    if strange or not tensors:
        found = strange[0] if strange else "no tensors"
        raise InvalidAdapterError(
            f"LoRA adapter {path} has {found} where LoRA weights were expected; {FUSE}"
        )
    layers = {}
    for name in dict.fromkeys(name.removesuffix(DOWN).removesuffix(UP) for name in tensors):
        pair = [tensors[name + end].shape for end in (DOWN, UP) if name + end in tensors]
        if len(pair) < 2:
            raise InvalidAdapterError(
                f"LoRA adapter {path} has only one of the two matrices of {name}; save it again"
            )
        down, up = pair
        if (len(down), len(up)) != (2, 2) or down[1] != up[0]:
            raise InvalidAdapterError(
                f"LoRA adapter {path} has matrices of shapes {list(down)} and {list(up)} for "
                f"{name}, which cannot be multiplied; save it again"
            )
        layers[name] = down[0], up[1]
    return layers
