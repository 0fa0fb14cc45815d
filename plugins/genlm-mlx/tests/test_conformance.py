"""What every backend must do, on a tiny model with adapters; what concerns state, on models with
windows and with recurrent layers; the rows of a small real model."""

from __future__ import annotations

from typing import Any

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import load_model_by_name
from tests.real_rows import check_rows
from tests.state_suite import StateSuite


@pytest.mark.quick
class TestLlama(ConformanceSuite):
    backend = "mlx"
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, folders: Any, lora_folders: dict[str, str]) -> None:
        cls.model = folders("llama")
        cls.adapters = lora_folders


class Family(StateSuite):
    backend = "mlx"
    effort = 0.1
    longest = 129
    family: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, folders: Any) -> None:
        cls.model = folders(cls.family)


class TestGemma3(Family):
    family = "gemma3"
    longest = 300  # mlx-lm makes room for 256 positions at a time


class TestLfm2(Family):
    family = "lfm2"


def test_the_rows_of_a_real_model(real_model: str) -> None:
    with load_model_by_name(real_model, "mlx") as lm:
        check_rows(lm, real_model)
