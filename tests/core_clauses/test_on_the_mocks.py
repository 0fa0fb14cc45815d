"""The core keeps its promises over an engine that computes batches, and over a continuous one."""

from __future__ import annotations

import pytest

from .suite import CoreClauses

pytestmark = pytest.mark.any_version


class TestOnBatches(CoreClauses):
    options = {"max_context": 64}  # noqa: RUF012


class TestOnSteps(CoreClauses):
    options = {"max_context": 64, "continuous": True, "steps": 3}  # noqa: RUF012
