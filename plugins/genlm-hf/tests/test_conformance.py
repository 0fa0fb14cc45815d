"""What every backend must do, on a small real model where there is one, and on a tiny one with
adapters."""

from __future__ import annotations

import pytest

from genlm.conformance import ConformanceSuite


class Tiny(ConformanceSuite):
    backend = "hf"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, tiny: str, lora_folders: dict[str, str]) -> None:
        cls.model = tiny
        cls.adapters = lora_folders


@pytest.mark.quick
class TestTiny(Tiny):
    effort = 0.1


class TestTinyThoroughly(Tiny):
    pass


class TestRecurrent(ConformanceSuite):
    """State in snapshots."""

    backend = "hf"
    effort = 0.3

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, recurrent: str) -> None:
        cls.model = recurrent


class TestReal(ConformanceSuite):
    backend = "hf"
    effort = 0.1  # the tiny one has all

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, real_model: str) -> None:
        cls.model = real_model
