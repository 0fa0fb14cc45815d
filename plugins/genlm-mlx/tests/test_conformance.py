"""What every backend must do: tiny models of five cache families, one of them with adapters; the
rows of a small real model."""

from __future__ import annotations

from typing import Any

import pytest

from genlm.conformance import ConformanceSuite, RowSuite


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


class TestReal(RowSuite):
    backend = "mlx"
    effort = 0.1
    longest = 65  # the tiny ones go further

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, real_model: str) -> None:
        cls.model = real_model
