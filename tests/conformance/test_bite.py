"""What counts as a catch of a mutant."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from genlm.core import Query, hookimpl
from genlm.core.mock import MockEngine

from . import bite as module
from .bite import Bite, bite, table
from .mutants.registry import Mutant

pytestmark = pytest.mark.any_version


class Raises(MockEngine):
    """Its rows raise."""

    error: Exception

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        raise self.error


class RefusesRows(Raises):
    error = RuntimeError("index k is out of range")


class HasMisspeltName(Raises):
    error = NameError("name 'rwos' is not defined")


class Flat(MockEngine):
    """Its rows are not normalised."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        return torch.zeros(len(queries), self.vocab_size)


class DoesNotLoad(MockEngine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise ImportError("no module named fast_rows")


def bitten(engine: type[MockEngine], monkeypatch: pytest.MonkeyPatch) -> Bite:
    mutant = Mutant(engine, "row_is_normalised", max_context=64, hangs=False)
    monkeypatch.setitem(module.MUTANTS, "Planted", mutant)
    return bite("mock.Planted", "quick", only="row_is_normalised")


@pytest.mark.parametrize("engine", [Flat, RefusesRows])
def test_wrong_row_and_refused_request_are_catches(
    engine: type[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bitten(engine, monkeypatch)
    assert [*one.caught] == ["row_is_normalised"]
    assert not one.accidents


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (HasMisspeltName, "by accident: row_is_normalised (NameError)"),
        (DoesNotLoad, "by accident: (not loaded) (ImportError)"),
    ],
)
def test_mistake_in_the_code_of_a_mutant_is_an_accident(
    engine: type[MockEngine], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bitten(engine, monkeypatch)
    assert not one.caught
    assert said in str(one)
    assert "of these, caught by accident only: mock.Planted" in table([one], whole=False)
    assert "0 of 1 caught" in table([one], whole=False)


@pytest.mark.parametrize("hangs", [True, False])
def test_hang_is_a_catch_only_of_a_mutant_that_hangs(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    class Waits(MockEngine):
        @hookimpl
        def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
            may_end.wait()
            return super().genlm_next_token_logprobs(queries)

    mutant = Mutant(Waits, "row_is_normalised", max_context=64, hangs=hangs)
    monkeypatch.setitem(module.MUTANTS, "Planted", mutant)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    try:
        one = bite("mock.Planted", "quick", only="row_is_normalised")
    finally:
        may_end.set()
    assert bool(one.caught) == hangs
    assert bool(one.accidents) != hangs
