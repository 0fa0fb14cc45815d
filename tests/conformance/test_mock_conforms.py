"""The reference backend keeps the whole contract, one batch at a time and as a continuous
engine."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import AsyncLM

from .mutants.registry import Trouble

pytestmark = pytest.mark.any_version

TROUBLE = Trouble()
CONTINUOUS = {"max_context": 64, "continuous": True, "steps": 3, "fail_on": TROUBLE}


class TestMock(ConformanceSuite):
    backend = model = "mock"
    adapters: ClassVar = {"a": "first-adapter", "b": "second-adapter"}  # Any path will do.
    options: ClassVar = {"max_context": 64, "fail_on": TROUBLE}

    def fail_inside(self, lm: AsyncLM) -> Any:
        return TROUBLE.during


class TestContinuousMock(TestMock):
    options: ClassVar = CONTINUOUS


class TestLongMock(TestMock):
    """Without a limit: contexts of a thousand tokens."""

    effort = 0.1
    options: ClassVar = {"fail_on": TROUBLE}


class TestWokenMock(TestMock):
    """A new request ends a call that has answered nothing yet, and the next one answers all
    rows."""

    effort = 0.1
    options: ClassVar = {**CONTINUOUS, "steps": 1, "delay": 1e-4}
