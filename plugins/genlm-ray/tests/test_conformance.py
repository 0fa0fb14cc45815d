"""The suite over replicas of two backends."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import AsyncLM, load_model_by_name


@pytest.mark.usefixtures("cluster")
class OverRay(ConformanceSuite):
    backend = "ray"

    def load(self, **core: Any) -> AsyncLM:
        """The model under test has two replicas. Further ones, of which it is seen that they are
        apart, have one: the start of a replica takes most of the time."""
        options = {**self.options, "replicas": 2 if core else 1, **core}
        return load_model_by_name(os.fspath(self.model), self.backend, options)


class TestOverMock(OverRay):
    """A replica is asked through its model, which is the same whether its engine runs in steps or
    not."""

    model = "mock"
    # The mock accepts any path.
    adapters: ClassVar[dict[str, str]] = {"a": "first-adapter", "b": "second-adapter"}
    options: ClassVar[dict[str, Any]] = {
        "backend": "mock",
        "backend_opts": {"max_context": 64, "continuous": True, "steps": 3},
    }
    effort = 0.3


@pytest.mark.quick
class TestOverHf(OverRay):
    options: ClassVar[dict[str, Any]] = {"backend": "hf"}
    effort = 0.1
    longest = 100

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, tiny: str, lora_folders: dict[str, str]) -> None:
        cls.model = tiny
        cls.adapters = lora_folders
