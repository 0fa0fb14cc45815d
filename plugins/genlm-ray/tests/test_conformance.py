"""What every backend must do, over replicas of three backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from genlm.core.conformance import ConformanceSuite

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}  # the mock takes any path


class TestOverMock(ConformanceSuite):
    backend = "ray"
    model = "mock"
    adapters = ADAPTERS
    options: ClassVar[dict[str, Any]] = {
        "backend": "mock",
        "replicas": 2,
        "backend_opts": {"max_context": 64},
    }
    effort = 0.3


class TestOverContinuousMock(ConformanceSuite):
    backend = "ray"
    model = "mock"
    adapters = ADAPTERS
    options: ClassVar[dict[str, Any]] = {
        "backend": "mock",
        "replicas": 2,
        "backend_opts": {"max_context": 64, "continuous": True, "steps": 3},
    }
    effort = 0.2


class TestOverHf(ConformanceSuite):
    backend = "ray"
    options: ClassVar[dict[str, Any]] = {"backend": "hf", "replicas": 2}
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, tiny: str, lora_folders: dict[str, Path]) -> None:
        cls.model = tiny
        cls.adapters = lora_folders
