"""What every backend must do, on a tiny model with adapters and on a recurrent one; the rows of a
small real one."""

from __future__ import annotations

import pytest

from genlm.conformance import ConformanceSuite, RowSuite


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


class TestReal(RowSuite):
    backend = "hf"
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, real_model: str) -> None:
        cls.model = real_model
