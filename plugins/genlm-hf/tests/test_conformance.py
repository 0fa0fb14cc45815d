"""The whole suite on a tiny model with adapters, the clauses on state on a recurrent model, and the
rows of a small real model."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import load_model_by_name
from genlm.hf import static
from tests.real_rows import check_rows
from tests.state_suite import StateSuite

from .recorded import recorded_steps


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


@pytest.mark.any_version
class TestTinyThoroughly(Tiny):
    """The suite with chunks, between which other requests are answered."""

    effort = 0.2
    options = {"max_batch_tokens": 32}  # noqa: RUF012


@pytest.mark.any_version
class TestStatic(StateSuite):
    """Steps of constant shape."""

    backend = "hf"
    effort = 0.1
    options = {"static": True}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, tiny: str) -> None:
        cls.model = tiny


@pytest.mark.any_version
class TestRecorded(Tiny):
    """The same with adapters, recorded as soon as may be."""

    effort = 0.1
    options = {"static": True}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _recorded(cls) -> Iterator[None]:
        with recorded_steps() as recorder, patch.object(static, "STEPS_BEFORE_RECORDING", 1):
            yield
        assert recorder.replays


@pytest.mark.any_version
class TestRecurrent(StateSuite):
    """State in snapshots."""

    backend = "hf"
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, recurrent: str) -> None:
        cls.model = recurrent


@pytest.mark.any_version
def test_rows_of_a_real_model_equal_those_of_transformers(real_model: str) -> None:
    with load_model_by_name(real_model, "hf") as lm:
        check_rows(lm, real_model, atol=1e-4)
