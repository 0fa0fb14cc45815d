"""The definition of a mutant, and the list of mutants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from attrs import frozen

from genlm.core import hookimpl
from genlm.core.mock import MockEngine


@frozen
class Mutant:
    """A fault.

    Attributes:
        engine: A mock that has it.
        breaks: The clause that is about this fault.
        max_context: The longest context of the engine.
        hangs: Whether something is never answered.
    """

    engine: type[MockEngine]
    breaks: str
    max_context: int
    hangs: bool


class Registry(dict[str, Mutant]):
    """Mutants by name."""

    def breaks(
        self, clause: str, thread: str = "", *, max_context: int = 0, hangs: bool = False
    ) -> Callable[[type], type]:
        """Add a faulty engine. The thread reports its bug, or one of its kind."""

        def add(faulty: type) -> type:
            longest = max_context or getattr(faulty, "usual_context", 64)
            self[faulty.__name__] = Mutant(faulty, clause, longest, hangs)
            return faulty

        return add

    def changes(
        self, base: type, *faults: tuple[str, str, Callable[..., Any]], max_context: int = 0
    ) -> None:
        """Add engines that differ in what their method ``change`` does: each by its name, its
        clause and the method."""
        for name, clause, change in faults:
            faulty = type(name, (base,), {"change": change})
            self.breaks(clause, max_context=max_context)(faulty)


#: The mutants of the conformance suite.
MUTANTS = Registry()
breaks = MUTANTS.breaks


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


class Trouble:
    """Given to the mock as ``fail_on``: the engine itself fails inside this many of the next
    evaluations."""

    def __init__(self) -> None:
        self._left = 0

    def __call__(self, query: Any) -> bool:
        self._left -= 1
        return self._left >= 0

    @contextlib.contextmanager
    def during(self, times: int) -> Iterator[None]:
        self._left = times
        try:
            yield
        finally:
            self._left = 0


class OneAfterTheOther:
    """Over a mock: its samples are made one after the other, each by ``_draw``."""

    def _draws(self, queries, params):
        return [*map(self._draw, queries, params)]

    def _draw(self, query, params):
        return super()._draws([query], [params])[0]
