"""What every backend must do: tiny models of five cache families, one of them with adapters; the
rows of a small real model."""

from __future__ import annotations

from typing import Any

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import load_model_by_name
from tests.real_rows import check_rows


@pytest.mark.quick
class TestLlama(ConformanceSuite):
    backend = "mlx"
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, folders: Any, lora_folders: dict[str, str]) -> None:
        cls.model = folders("llama")
        cls.adapters = lora_folders


class Family(ConformanceSuite):
    backend = "mlx"
    effort = 0.1
    family: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, folders: Any) -> None:
        cls.model = folders(cls.family)


class TestGpt2(Family):
    family = "gpt2"


class TestGemma3(Family):
    family = "gemma3"


class TestMamba(Family):
    family = "mamba"


class TestLfm2(Family):
    family = "lfm2"


def test_the_rows_of_a_real_model(real_model: str) -> None:
    with load_model_by_name(real_model, "mlx") as lm:
        check_rows(lm, real_model)
