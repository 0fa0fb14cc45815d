"""The reference backend keeps the whole contract, one batch at a time and as a continuous
engine."""

from __future__ import annotations

from typing import Any

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import AsyncLM

from .mutants.registry import Trouble

pytestmark = pytest.mark.any_version

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


class TestWokenMock(Mock):
    """A newcomer ends a call that has answered nothing yet, and the next one answers all rows."""

    __test__ = True
    trouble = Trouble()
    effort = 0.1
    options = {**CONTINUOUS, "steps": 1, "delay": 1e-4, "fail_on": trouble}  # noqa: RUF012
