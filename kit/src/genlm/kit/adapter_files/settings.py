"""The settings of an adapter for each module, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files.config import CONFIG, brief
from genlm.kit.adapter_files.names import Chosen, NamePattern, ends
from genlm.kit.adapter_files.tensors import MAX_NAME_CHARACTERS

#: The largest rank, the largest ``lora_alpha``, and the most names in a list.
MAX_RANK, MAX_ALPHA, MAX_NAMES = 1 << 13, 1 << 30, 256

RANK = f"an integer from 1 to {MAX_RANK}"
SCALE = f"a finite number, at most {MAX_ALPHA} in size"


class Settings:
    """The settings of an adapter for each module.

    PEFT compares every name of a configuration with every module of the model, and allocates memory
    by the rank. So names and ranks have limits.

    Args:
        folder: The adapter's folder, for messages.
        config: The folder's ``adapter_config.json``.

    Attributes:
        modules_to_save: The ends of the names of modules that were trained whole.
        target_parameters: The ends of the names of parameters that are adapted directly.

    Raises:
        InvalidAdapterError: a field has the wrong type, exceeds its limit, or is a regular
            expression.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._config = config
        if not _is_rank(config.get("r")):
            raise self.wrong("r", RANK)
        if not is_scale(config.get("lora_alpha")):
            raise self.wrong("lora_alpha", SCALE)
        self._ranks = self._pattern("rank_pattern", _is_rank, RANK)
        self._alphas = self._pattern("alpha_pattern", is_scale, SCALE)
        self.modules_to_save = self._names("modules_to_save")
        self.target_parameters = frozenset(self._names("target_parameters"))
        self._owners = {target.rpartition(".")[0] for target in self.target_parameters}
        self._targets = Chosen(config.get("target_modules"))
        self._excluded = Chosen(config.get("exclude_modules"))
        layers = config.get("layers_to_transform")
        listed = layers if isinstance(layers, list) else [layers]
        self._layers = {each for each in listed if type(each) is int} or None
        patterns = config.get("layers_pattern")
        self._patterns = {patterns} if isinstance(patterns, str) else Chosen(patterns).listed

    def rank(self, module: str) -> int:
        """The rank of a module or parameter, by its name in the model."""
        rank: int = self._ranks.of(module, self._config["r"])
        return rank

    def scale(self, module: str) -> float:
        """The factor of the product of a module's matrices."""
        alpha: float = self._alphas.of(module, self._config["lora_alpha"])
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def adapts_parameters(self, module: str) -> bool:
        """Whether ``module`` holds parameters that the adapter targets directly."""
        names = set(ends(module.replace(".base_layer", "")))
        # The name of a parameter without its module applies to all modules, except those that are
        # targets themselves.
        return bool(names & (self._owners - {""})) or (
            "" in self._owners and not names & self._targets.listed
        )

    def targets(self, module: str, alike: bool) -> bool:
        """Whether the adapter was trained on a module of its base model.

        Args:
            module: The module's name.
            alike: Whether the file adapts such modules in other layers. It decides if the
                configuration does not tell.
        """
        named = self._targets.has(module)
        return (
            (alike if named is None else named)
            and not self._excluded.has(module)
            and not any(f".{saved}." in f".{module}." for saved in self.modules_to_save)
            and (self._layers is None or self._layer_of(module) in self._layers)
        )

    def _layer_of(self, module: str) -> int | None:
        """The number of its layer: the first, or that behind one of ``layers_pattern``."""
        parts = module.split(".")
        return next(
            (
                int(number)
                for before, number in pairwise(parts[:-1])
                if number.isdecimal() and (not self._patterns or before in self._patterns)
            ),
            None,
        )

    def wrong(self, name: str, expected: str) -> InvalidAdapterError:
        """The error for a field: it names the value, and what the field must be."""
        return InvalidAdapterError(
            f"LoRA adapter {self._folder} has {name}={brief(self._config.get(name))} in {CONFIG}; "
            f"it must be {expected}"
        )

    def _pattern(self, name: str, right: Callable[[Any], bool], expected: str) -> NamePattern:
        pattern = self._config.get(name) or {}
        if (
            not isinstance(pattern, dict)
            or not all(map(right, pattern.values()))
            or any(len(key) > MAX_NAME_CHARACTERS for key in pattern)
        ):
            raise self.wrong(
                name,
                f"names of modules, of at most {MAX_NAME_CHARACTERS} characters, each with "
                f"{expected}",
            )
        try:
            return NamePattern(pattern)
        except InvalidAdapterError as error:
            raise InvalidAdapterError(
                f"LoRA adapter {self._folder}, {name} in {CONFIG}: {error}"
            ) from None

    def _names(self, name: str) -> list[str]:
        names = self._config.get(name) or []
        if (
            not isinstance(names, list)
            or len(names) > MAX_NAMES
            or not all(
                isinstance(each, str)
                and len(each) <= MAX_NAME_CHARACTERS
                and re.fullmatch(r"[\w.-]+", each)
                for each in names
            )
        ):
            raise self.wrong(
                name,
                f"a list of at most {MAX_NAMES} module names, of at most "
                f"{MAX_NAME_CHARACTERS} characters",
            )
        return names


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def is_scale(value: Any) -> bool:
    """Whether a value of a configuration can scale an adapter."""
    return type(value) in (int, float) and -MAX_ALPHA <= value <= MAX_ALPHA
