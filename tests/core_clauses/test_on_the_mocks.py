"""The core keeps its promises over an engine that computes batches, and over a continuous one."""

from __future__ import annotations

from .suite import CoreClauses, Poison

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}  # the mock takes any path


class TestOnBatches(CoreClauses):
    adapters = ADAPTERS
    poison = Poison()
    options = {"max_context": 64, "fail_on": poison}  # noqa: RUF012


class TestOnSteps(CoreClauses):
    adapters = ADAPTERS
    poison = Poison()
    options = {**TestOnBatches.options, "continuous": True, "steps": 3, "fail_on": poison}  # noqa: RUF012
