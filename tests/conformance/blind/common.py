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


class Mutants(dict[type, str]):
    """The faulty engines of a module, with a clause that catches each where one is given."""

    def seen_in(self, thread: str, clause: str = "") -> Callable[[type], type]:
        """Add an engine. The thread reports its bug, or one of its kind."""

        def add(engine: type) -> type:
            self[engine] = clause
            return engine

        return add
