"""What every backend must do, over replicas of three backends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import AsyncLM, load_model_by_name

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}  # the mock takes any path


class OverRay(ConformanceSuite):
    backend = "ray"

    def load(self, **core: Any) -> AsyncLM:
        """The model under test has two replicas. Further ones, of which it is seen that they are
        apart, have one: the start of a replica takes most of the time."""
        options = {**self.options, "replicas": 2 if core else 1, **core}
        return load_model_by_name(os.fspath(self.model), self.backend, options)


class TestOverMock(OverRay):
    model = "mock"
    adapters = ADAPTERS
    options: ClassVar[dict[str, Any]] = {
        "backend": "mock",
        "backend_opts": {"max_context": 64},
    }
    effort = 0.3


class TestOverContinuousMock(OverRay):
    model = "mock"
    adapters = ADAPTERS
    options: ClassVar[dict[str, Any]] = {
        "backend": "mock",
        "backend_opts": {"max_context": 64, "continuous": True, "steps": 3},
    }
    effort = 0.2


@pytest.mark.quick
class TestOverHf(OverRay):
    options: ClassVar[dict[str, Any]] = {"backend": "hf"}
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, tiny: str, lora_folders: dict[str, Path]) -> None:
        cls.model = tiny
        cls.adapters = lora_folders
