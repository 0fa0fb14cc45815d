"""What a mutant is, and the list of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from genlm.core import AsyncLM
from genlm.core.mock import ByteTokenizer, MockEngine


@frozen
class Mutant:
    """A fault.

    Attributes:
        breaks: The clause that is about this fault.
        load: Loads the faulty model, given the mock's ``fail_on`` and options of the core.
        hangs: Whether something is never answered.
    """

    breaks: str
    load: Callable[..., AsyncLM]
    hangs: bool = False


class Registry(dict[str, Mutant]):
    """Mutants by name."""

    def breaks(
        self,
        clause: str,
        thread: str = "",
        *,
        max_context: int = 64,
        engine: type[MockEngine] = MockEngine,
        hangs: bool = False,
    ) -> Callable[[type], type]:
        """Register a faulty engine, or a faulty ``AsyncLM`` over a sound one. The thread reports
        its bug, or one of its kind."""

        def register(faulty: type) -> type:
            load = functools.partial(_load, faulty, engine, max_context)
            self[faulty.__name__] = Mutant(clause, load, hangs)
            return faulty

        return register


#: Those of the conformance suite.
MUTANTS = Registry()
breaks = MUTANTS.breaks


def _load(
    faulty: type,
    sound: type[MockEngine],
    max_context: int,
    fail_on: Callable[..., bool] | None = None,
    **core: Any,
) -> AsyncLM:
    options: dict[str, Any] = {} if fail_on is None else {"fail_on": fail_on}
    if issubclass(faulty, AsyncLM):
        engine = functools.partial(sound, ByteTokenizer(), max_context=max_context, **options)
        return faulty(engine, backend="mock", **core)
    return AsyncLM(
        lambda: faulty(ByteTokenizer(), max_context=max_context, **options),
        backend="mock",
        **core,
    )


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
