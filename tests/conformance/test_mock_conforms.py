"""The reference backend keeps the whole contract, one batch at a time and as a continuous
engine."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from genlm.core import AsyncLM
from genlm.core.conformance import ConformanceSuite
from genlm.core.mock import ENGINE_OPTIONS, ByteTokenizer, ContinuousMockEngine
from genlm.core.options import refuse_unknown

from .mutants.registry import Trouble

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}  # the mock takes any path
OPTIONS = {"max_context": 64}
CONTINUOUS = {**OPTIONS, "continuous": True, "steps": 3}


class Mock(ConformanceSuite):
    __test__ = False
    backend = "mock"
    model = "mock"
    adapters = ADAPTERS
    trouble: Trouble

    def fail_inside(self, lm: AsyncLM) -> Any:
        return self.trouble.during


class TestMock(Mock):
    __test__ = True
    trouble = Trouble()
    options = {**OPTIONS, "fail_on": trouble}  # noqa: RUF012


class TestContinuousMock(Mock):
    __test__ = True
    trouble = Trouble()
    options = {**CONTINUOUS, "fail_on": trouble}  # noqa: RUF012


class TestLongMock(Mock):
    """Without a limit: contexts of a thousand tokens."""

    __test__ = True
    trouble = Trouble()
    effort = 0.1
    options = {"fail_on": trouble}  # noqa: RUF012


class InterruptedEngine(ContinuousMockEngine):
    """Elsewhere: a call that is woken answers nothing, and the next one all rows there are."""

    def _time_passes(self) -> bool:
        try:
            self._wakes.get(timeout=0.0)
        except queue.Empty:
            return True
        return False


class TestInterruptedMock(Mock):
    __test__ = True
    trouble = Trouble()
    effort = 0.1
    options = {**OPTIONS, "steps": 1, "fail_on": trouble}  # noqa: RUF012

    def load(self, wrappers: Sequence[object]) -> AsyncLM:
        refuse_unknown("mock", self.options, ENGINE_OPTIONS)
        return AsyncLM(
            lambda: InterruptedEngine(ByteTokenizer(), **self.options),
            backend="mock",
            wrappers=wrappers,
        )
