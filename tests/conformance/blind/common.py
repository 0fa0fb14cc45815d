"""What the faulty models of real bugs have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from genlm.core import hookimpl


class Keeping:
    """An engine that keeps something.

    Args:
        keeps: What it keeps, by the attribute's name, and what makes it empty.
    """

    _keeps: ClassVar[Mapping[str, Callable[[], Any]]] = {}

    def __init_subclass__(cls, **keeps: Callable[[], Any]) -> None:
        super().__init_subclass__()
        cls._keeps = {**cls._keeps, **keeps}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._forget()

    def _forget(self) -> None:
        for name, empty in self._keeps.items():
            setattr(self, name, empty())


class Forgetting(Keeping):
    """An engine that keeps something until its key/value state is dropped."""

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        super().genlm_clear_kv_cache()  # type: ignore[misc]
        self._forget()


def cited(module: Mapping[str, Any]) -> list[type]:
    """The classes of a module that cite a thread."""
    return [
        value
        for value in module.values()
        if isinstance(value, type)
        and value.__module__ == module["__name__"]
        and "https://" in (value.__doc__ or "")
    ]
