"""The reference backend keeps the whole contract, one batch at a time and as a continuous
engine."""

from __future__ import annotations

from genlm.core.conformance import ConformanceSuite

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}  # the mock takes any path
OPTIONS = {"max_context": 64}
CONTINUOUS = {**OPTIONS, "continuous": True, "steps": 3}


class TestMock(ConformanceSuite):
    backend = "mock"
    model = "mock"
    adapters = ADAPTERS
    options = OPTIONS


class TestContinuousMock(ConformanceSuite):
    backend = "mock"
    model = "mock"
    adapters = ADAPTERS
    options = CONTINUOUS
