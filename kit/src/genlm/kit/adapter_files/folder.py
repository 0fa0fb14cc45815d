"""An adapter folder: what it holds, and whether an engine and a model can use it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files.config import CONFIG, brief
from genlm.kit.adapter_files.features import Feature
from genlm.kit.adapter_files.names import ends, kind
from genlm.kit.adapter_files.settings import Settings
from genlm.kit.adapter_files.tensors import Tensor

WEIGHTS = "adapter_model.safetensors"

#: The prefix that PEFT puts before the names of modules.
PREFIX = "base_model.model."


@frozen
class LoraModule:
    """The LoRA matrices that an adapter adds to one module.

    Attributes:
        rank: The rank of its matrices A and B; for parameters, that of all experts together.
        inputs: How many features A takes; for an embedding, the number of tokens.
        outputs: How many features B gives.
        scale: The factor of the product of A and B.
        down: The name of A in the file.
        up: The name of B in the file.
    """

    rank: int
    inputs: int
    outputs: int
    scale: float
    down: str
    up: str


@frozen
class AdapterFolder:
    """The contents of an adapter folder.

    Attributes:
        path: The folder.
        config: ``adapter_config.json``.
        settings: The settings for each module.
        tensors: Every tensor of the file, by name.
        modules: The LoRA matrices of each adapted module, by the module's name in the model.
        features: The features of the adapter beyond plain LoRA, each with the value of the
            configuration that asks for it.
        saved_copies: The tensors that PEFT saves as they are in the base model, by the parameter's
            name in the model.
        retrained: The names of ``modules_to_save`` whose tensors the file has.
    """

    path: Path
    config: Mapping[str, Any]
    settings: Settings
    tensors: Mapping[str, Tensor]
    modules: dict[str, LoraModule] = field(factory=dict)
    features: dict[Feature, str] = field(factory=dict)
    saved_copies: dict[str, Tensor] = field(factory=dict)
    retrained: set[str] = field(factory=set)

    def require(self, applied: Collection[Feature], engine: str) -> None:
        """Raise an error if an engine would apply the adapter wrongly.

        Args:
            applied: The features that the engine applies correctly.
            engine: The engine's name, for the message.

        Raises:
            InvalidAdapterError: the adapter has another feature.
        """
        for feature, value in self.features.items():
            if feature not in applied:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} has {value} ({feature.description}), which "
                    f"{engine} does not apply; {feature.remedy}, or use a backend that applies it "
                    "(docs/adapters.md)"
                )

    def require_modules(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Raise an error if this is an adapter of another model.

        Args:
            shapes: How many features each module of the model takes and gives, by its name.

        Raises:
            InvalidAdapterError: a module is not there, or has another shape; or the file lacks a
                module that the adapter was trained on.
        """
        for name, module in self.modules.items():
            name = name.replace(".base_layer", "")
            if name not in shapes:
                if self.settings.adapts_parameters(name):
                    continue
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} is made for another model: it adapts {name} "
                    f"({module.inputs} to {module.outputs} features), and this model has no such "
                    f"module ({_alike(name, shapes)}); give an adapter made for this model"
                )
            if (module.inputs, module.outputs) != shapes[name]:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} is made for another model: at {name} it maps "
                    f"{module.inputs} to {module.outputs} features, the model "
                    f"{' to '.join(map(str, shapes[name]))}; give an adapter made for this model"
                )
        self.require_whole(shapes)

    def require_whole(self, names: Collection[str]) -> None:
        """Raise an error if the file lacks modules that the adapter was trained on.

        Args:
            names: The names of the model's modules.

        Raises:
            InvalidAdapterError: the file lacks a module.
        """
        adapted = {name.replace(".base_layer", "") for name in self.modules}
        kinds = set(map(kind, adapted))
        for name in names:
            if name not in adapted and self.settings.targets(name, alike=kind(name) in kinds):
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} lacks the matrices of {name}, which target_modules"
                    f"={brief(self.config['target_modules'])} in {CONFIG} names; save it again, or "
                    "list there the modules that it adapts, and their layers in layers_to_transform"
                )


def find_adapter(path: str) -> Path:
    """The local folder of an adapter; one with a hub name is fetched, without pickles.

    Raises:
        InvalidAdapterError: there is no such folder.
    """
    folder = Path(path)
    if folder.is_file():
        raise InvalidAdapterError(f"{path} is one file of a LoRA adapter; give its folder")
    if folder.is_dir() or not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", path):
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:
        raise InvalidAdapterError(
            f"{path} is not a folder, and fetching a LoRA adapter of that name failed "
            f"({type(error).__name__}: {error}); give the folder that PEFT saved the adapter in"
        ) from error


def _alike(name: str, shapes: Collection[str]) -> str:
    """The modules that the model has in place of one that it lacks, as a part of a message."""
    last = name.rpartition(".")[2]
    alike = [each for each in shapes if last in ends(each)]
    return f"the last of its {len(alike)} {last} is {alike[-1]}" if alike else f"and no {last}"
