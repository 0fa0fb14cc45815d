"""Names of modules, and what a configuration says of them by the ends of their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files.config import brief

#: A key of ``rank_pattern`` or ``alpha_pattern`` that is a name, or begins with what PEFT itself
#: writes before names.
KEY = re.compile(r"(?P<start>\^|\.\*\\\.)?(?P<name>(\w|-|\\?\.)+)")


class NamePattern:
    """Values by module: of the keys that the module's name ends with, the first one decides.

    Args:
        pattern: ``rank_pattern`` or ``alpha_pattern``.

    Raises:
        InvalidAdapterError: a key is a regular expression.
    """

    def __init__(self, pattern: Mapping[str, Any]) -> None:
        # By name: the key's place, and its value.
        self._whole: dict[str, tuple[int, Any]] = {}
        self._ends: dict[str, tuple[int, Any]] = {}
        for at, (key, value) in enumerate(pattern.items()):
            match = KEY.fullmatch(key)
            if match is None:
                raise InvalidAdapterError(
                    f"it has the regular expression {brief(key)}, and regular expressions of files "
                    "are not run; write the names of the modules there"
                )
            names = self._whole if match["start"] == "^" else self._ends
            names.setdefault(match["name"].replace("\\.", "."), (at, value))

    def of(self, module: str, default: Any) -> Any:
        """What the pattern says of a module."""
        found = [self._ends[end] for end in ends(module) if end in self._ends]
        if module in self._whole:
            found.append(self._whole[module])
        return min(found, key=lambda each: each[0])[1] if found else default


def ends(name: str) -> Iterator[str]:
    """The name, and what is left of it after each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]
