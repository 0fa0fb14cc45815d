"""The conformance suite on a tiny model with adapters; its clauses on state on models with windows
and with recurrent layers; the rows of a small real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest

from genlm.conformance import ConformanceSuite
from genlm.core import AsyncLM, load_model_by_name
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

    def fail_inside(self, lm: AsyncLM) -> Callable[[int], AbstractContextManager[None]]:
        return partial(failing_block, lm.underlying_model)


@contextmanager
def failing_block(model: Any, times: int) -> Iterator[None]:
    """Inside the block, evaluations of a model fail between its blocks."""
    block = model.layers[len(model.layers) // 2]
    kind, left = type(block), iter(range(times))

    class Failing(kind):
        def __call__(self, *given: Any, **options: Any) -> Any:
            if next(left, None) is not None:
                raise RuntimeError("planted between two blocks")
            return super().__call__(*given, **options)

    block.__class__ = Failing
    try:
        yield
    finally:
        block.__class__ = kind


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
    longest = 300  # mlx-lm allocates 256 positions at a time


class TestLfm2(Family):
    family = "lfm2"


def test_rows_of_a_real_model_equal_those_of_transformers(real_model: str) -> None:
    with load_model_by_name(real_model, "mlx") as lm:
        check_rows(lm, real_model)
