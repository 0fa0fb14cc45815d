"""Random programs find what they look for."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from genlm.conformance import Program, Violation
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine
from genlm.core.types import query_of

from .mutants import MUTANTS
from .mutants.registry import OneAfterTheOther
from .mutants.working_engine import WorkingEngine

pytestmark = pytest.mark.any_version

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}


def program(engine: Callable[..., MockEngine], **options: Any) -> Program:
    made = engine(ByteTokenizer(), max_context=1024)
    return Program(engine=made, source=random.Random(0), longest=120, adapters=ADAPTERS, **options)


@pytest.mark.parametrize("engine", [MockEngine, ContinuousMockEngine, WorkingEngine])
def test_program_finds_nothing_on_a_sound_engine(engine: type[MockEngine]) -> None:
    sound = program(engine, seeds=True)
    sound.run(200)
    assert sound.counts["answers"] > 200
    assert sound.counts["pins"] > 0


def test_program_needs_no_length_of_the_tokenizer() -> None:
    sound = program(ContinuousMockEngine)
    whole = sound.engine.tokenizer
    sound.engine.tokenizer = SimpleNamespace(  # The contract asks for no more.
        token_bytes=whole.token_bytes, encode=whole.encode, decode=whole.decode
    )
    sound.run(200)
    assert sound.counts["answers"] > 0


#: One for each thing that they do: in steps and without them.
FOUND = (
    "EvictedAndStillFound",
    "PinnedAreNotMoved",
    "PinnedPrefixCountedTwice",
    "ProgressOfADroppedPrompt",
    "ScoresShiftedByThePrefix",
    "SortedAndNotPutBack",
    "StateKeptWithoutItsAdapter",
    "StepsShareOneBuffer",
)


@pytest.mark.parametrize("name", FOUND)
def test_program_finds_the_mutant(name: str) -> None:
    with pytest.raises(
        Violation, match=r"the context \[.*: a log-probability differs by .* from its cold row"
    ):
        program(MUTANTS[name].engine).run(300)


class LongOnesNeverEnd(ContinuousMockEngine):
    """It never gets on with contexts of more than a hundred tokens."""

    def _steps_of(self, request: Any) -> int:
        return 10**9 if query_of(request).length > 100 else super()._steps_of(request)


class SecondBest(OneAfterTheOther, ContinuousMockEngine):
    """Its samples of more than a token end in the second best one."""

    def _draw(self, query: Any, params: Any) -> list[int]:
        *drawn, last = super()._draw(query, params)
        best = self.row(query.extended(tuple(drawn)) if drawn else query).topk(2).indices
        return [*drawn, int(best[1]) if drawn else last]


class SeedsOfTheBatch(OneAfterTheOther, ContinuousMockEngine):
    """A seed means another sample where others are in flight."""

    def _draw(self, query: Any, params: Any) -> list[int]:
        more = min(len(self._in_flight), 1)
        drawn = super()._draw(query, params)
        return drawn if params.seed is None else [(token + more) % 256 for token in drawn]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (LongOnesNeverEnd, "requests were not answered within"),
        (SecondBest, "is not the most likely one"),
        (SeedsOfTheBatch, "; alone it is"),
    ],
)
def test_program_finds_the_faulty_step(
    engine: type[MockEngine], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.conformance.programs.MAX_STEPS", 200)
    with pytest.raises(Violation, match=said):
        program(engine, seeds=True).run(300)
