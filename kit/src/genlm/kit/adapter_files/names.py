"""Names of modules, and what a configuration says about them by the ends of their names."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files.config import brief

#: A key of ``rank_pattern`` or ``alpha_pattern`` that is a plain name, perhaps with the prefix that
#: PEFT writes before names.
KEY = re.compile(r"(?P<start>\^|\.\*\\\.)?(?P<name>(\w|-|\\?\.)+)")

#: PEFT's word for all linear layers.
ALL_LINEAR = "all-linear"

#: The longest regular expression, in characters; and the most seconds of computing while one is
#: compared with all names.
MAX_EXPRESSION_CHARACTERS, EXPRESSION_SECONDS = 1 << 14, 2.0


class NamePattern:
    """Values by module: of the keys that the module's name ends with, the first one decides.

    Args:
        pattern: ``rank_pattern`` or ``alpha_pattern``.

    Raises:
        InvalidAdapterError: a key is a regular expression.
    """

    def __init__(self, pattern: Mapping[str, Any]) -> None:
        # For each name, the position of its key and its value.
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
        """The value that the pattern gives a module; ``default`` if it names none."""
        found = [self._ends[end] for end in ends(module) if end in self._ends]
        if module in self._whole:
            found.append(self._whole[module])
        return min(found, key=lambda each: each[0])[1] if found else default


def ends(name: str) -> Iterator[str]:
    """The ends of a name: the whole name, and what follows each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def kind(name: str) -> str:
    """The name without the numbers of its layer and expert. Modules of one kind have the same."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


class Chosen:
    """The modules that a field of a configuration names: a list by the ends of their names, a
    regular expression by the whole names.

    Args:
        value: The value of ``target_modules`` or ``exclude_modules``.

    Attributes:
        listed: The names of the list.
    """

    def __init__(self, value: Any) -> None:
        listed = value if isinstance(value, list) else []
        self.listed = frozenset(each for each in listed if isinstance(each, str))
        self.expression = value if isinstance(value, str) else None
        self._seconds = EXPRESSION_SECONDS

    def has(self, module: str) -> bool | None:
        """Whether it names a module of the model.

        ``None`` if that is not known: for PEFT's "all-linear", and for an expression that is
        invalid or takes too long. Some would take for ever, and the standard library cannot stop
        matching.
        """
        if self.expression is None:
            return not self.listed.isdisjoint(ends(module))
        if (
            self.expression.lower() == ALL_LINEAR
            or len(self.expression) > MAX_EXPRESSION_CHARACTERS
        ):
            return None
        import regex

        started = time.process_time()
        try:
            re.compile(self.expression)  # the standard library knows fewer expressions
            found = regex.fullmatch(self.expression, module, timeout=max(self._seconds, 1e-3))
        except Exception:  # a hostile expression may raise any exception
            return None
        finally:
            self._seconds -= time.process_time() - started
        return found is not None
