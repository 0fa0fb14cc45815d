"""The options that every backend has, checked once."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import fields, frozen

from genlm.core.cache import OutputCache
from genlm.core.contract import ContractCheck
from genlm.core.errors import InvalidOptionError

CACHE_OPTIONS = ("maxsize", "max_bytes", "move_to_cpu")


@frozen
class CoreOptions:
    """Options of the core.

    Attributes:
        batch_size: The most queries in one engine call; ``None`` is no limit.
        timeout: Seconds to hold a batch open for latecomers; 0 waits for nobody.
        cache_size: The most rows in the output cache; 0 turns it off, ``None`` leaves it to ``cache_opts``.
        cache_opts: ``maxsize`` (rows, default 1000), ``max_bytes`` (default 512 MiB), ``move_to_cpu`` (default false).
        check: Check every result of the engine against the contract; ``None`` asks the environment (``GENLM_CHECK=1``).
        wrappers: Objects with ``@hookimpl(wrapper=True)`` methods, to observe or transform what the hooks return.
    """

    batch_size: int | None = None
    timeout: float = 0.0
    cache_size: int | None = None
    cache_opts: Mapping[str, Any] | None = None
    check: bool | None = None
    wrappers: Sequence[object] = ()

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[CoreOptions, dict[str, Any]]:
        """Part a user's options into the core's and the engine's."""
        names = {attribute.name for attribute in fields(cls)}
        ours = {name: value for name, value in options.items() if name in names}
        return cls(**ours), {name: value for name, value in options.items() if name not in names}

    @classmethod
    def named(cls, options: Mapping[str, Any], backend: str) -> CoreOptions:
        """Options of which none may be the engine's.

        Raises:
            InvalidOptionError: it names those that are not the core's.
        """
        core, unknown = cls.split(options)
        if unknown:
            known = ", ".join(attribute.name for attribute in fields(cls))
            raise InvalidOptionError(
                f"backend {backend!r} has no option {', '.join(sorted(unknown))}; the core has {known}"
            )
        return core

    def __attrs_post_init__(self) -> None:
        _check_count("batch_size", self.batch_size, least=1)
        _check_count("cache_size", self.cache_size, least=0)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
            raise InvalidOptionError(f"timeout={self.timeout!r} is no number; give seconds, 0 or more")
        if not (math.isfinite(self.timeout) and self.timeout >= 0):
            raise InvalidOptionError(f"timeout={self.timeout!r} is out of range; give seconds, 0 or more")

    def output_cache(self) -> OutputCache:
        """Build the output cache."""
        given = dict(self.cache_opts or {})
        unknown = sorted(set(given) - set(CACHE_OPTIONS))
        if unknown:
            raise InvalidOptionError(f"cache_opts has no {', '.join(unknown)}; it has {', '.join(CACHE_OPTIONS)}")
        if self.cache_size is not None:
            if given.get("maxsize", self.cache_size) != self.cache_size:
                raise InvalidOptionError(
                    f"cache_size={self.cache_size} contradicts cache_opts['maxsize']={given['maxsize']}; give one of them"
                )
            given["maxsize"] = self.cache_size
        _check_count("cache_opts['maxsize']", given.get("maxsize"), least=0)
        _check_count("cache_opts['max_bytes']", given.get("max_bytes"), least=0)
        return OutputCache(**given)

    def contract_check(self, backend: str) -> list[object]:
        """The wrapper that checks every result, if the user or the environment wants it."""
        wanted = os.environ.get("GENLM_CHECK", "0") not in ("", "0") if self.check is None else self.check
        return [ContractCheck(backend)] if wanted else []


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidOptionError(f"{name}={value!r} is no integer; give {least} or more, or None") from None
    if number < least:
        raise InvalidOptionError(f"{name}={number} is too small; give {least} or more, or None")
