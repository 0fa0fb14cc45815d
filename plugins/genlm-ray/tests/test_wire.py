"""The messages between the program and a replica."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from types import ModuleType
from typing import Any

import pytest
import ray
import torch

from genlm.core import EngineError
from genlm.ray.functions import Reduced
from genlm.ray.replica import OWN_CODE, send_own_code
from genlm.ray.wire import Gone, portable, received, sent


def test_received_tensors_share_the_memory_of_the_message() -> None:
    """This memory is read-only: NumPy marks it, and PyTorch would warn. The core only reads it."""
    results = [torch.arange(5.0), ValueError("no"), torch.arange(3.0), [7, 8], torch.arange(5.0)]
    plain, joined, *rest = sent(results)
    assert joined is not None
    joined.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, error, second, drawn, third = received((plain, joined, *rest))
    assert torch.cat([first, second, third]).equal(torch.cat([results[i] for i in (0, 2, 4)]))
    assert (type(error), drawn, len(second)) == (ValueError, [7, 8], 3)
    assert first.data_ptr() == joined.ctypes.data


@pytest.mark.parametrize(
    "results",
    [
        [[1], []],
        [(5, -0.5), (7, -1.5)],
        [[(1, 0.5), (2, None)], "text", {"a": [torch.ones(2).tolist()]}],
        [],
        [[[[[[3]]]]]],
    ],
)
def test_results_without_tensors_arrive(results: list[Any]) -> None:
    assert [*received(pickle.loads(pickle.dumps(sent(Reduced.each(results)))))] == results


def test_unpicklable_result_leaves_other_results_unchanged() -> None:
    first, second, third = Reduced.each([1, threading.Lock(), KeyError(2)])
    assert isinstance(second, EngineError)
    assert "return what can be pickled" in str(second)
    arrived = received(sent([first, second, third]))
    assert arrived[0] == 1
    assert [*map(type, arrived[1:])] == [EngineError, KeyError]


class Unportable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


@pytest.mark.parametrize("error", [Gone("why", computing=False, ended=True), ValueError("no")])
def test_picklable_error_arrives_unchanged(error: Exception) -> None:
    arrived = pickle.loads(pickle.dumps(portable(error)))
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)


def test_an_error_that_does_not_unpickle_arrives_as_its_text() -> None:
    assert str(portable(Unportable("why", "not"))) == "Unportable in a replica: why"


def test_a_class_of_the_models_own_code_travels_with_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example the tokenizer's class, which the program cannot import."""
    module = ModuleType(f"{OWN_CODE}.house.tokenization")
    exec("SIZE = 3\nclass House:\n    def __len__(self):\n        return SIZE", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    send_own_code()
    sent_on = ray.cloudpickle.dumps(module.House())
    ray.cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert len(pickle.loads(sent_on)) == 3
