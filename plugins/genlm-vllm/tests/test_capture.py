"""The logits processor, driven as each of vLLM's two runners drives it, against rows computed
here."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlm.vllm.capture import ROW_KEY, RowCapture, RowStore, clean_state
from genlm.vllm.worker import ROWS as ROWS_OF_WORKERS
from genlm.vllm.worker import RowAccess


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


def capture() -> RowCapture:
    return type("Capture", (RowCapture,), {"store": RowStore()})(None)


def wants(**wishes):
    return SimpleNamespace(extra_args=wishes or None)


def key(number):
    return wants(**{ROW_KEY: number})


def update(removed=(), added=(), moved=()):
    return SimpleNamespace(
        removed=removed, added=[(i, params, None, []) for i, params in added], moved=moved
    )


LOGITS = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
ROWS = LOGITS.log_softmax(-1)


def applied(processor, *context):
    """Check that the processor changes nothing, and return its rows by key."""
    assert torch.equal(processor.apply(LOGITS.clone(), *context), LOGITS)
    return lambda *keys: torch.stack(processor.store.take(keys))


def test_v1_follows_moves_swaps_and_removals():
    processor = capture()
    processor.update_state(update(added=[(0, key(1)), (1, key(2)), (2, wants())]))
    processor.update_state(update(moved=[(0, 1, Direction.SWAP)]))
    processor.update_state(update(removed=[2], moved=[(1, 2, Direction.UNIDIRECTIONAL)]))
    processor.update_state(None)
    rows = applied(processor)
    assert torch.equal(rows(2, 1), ROWS[[0, 2]])
    assert processor.store.take([2]) == [None], "a row is given up once"


def test_v1_a_request_takes_over_a_slot():
    processor = capture()
    processor.update_state(update(added=[(0, key(1))]))
    processor.update_state(update(added=[(0, wants())]))
    processor.apply(LOGITS)
    assert processor.store.take([1]) == [None]


def test_v2_finds_rows_by_slot():
    processor = capture()
    assert processor.add_request(5, key(1))
    assert processor.add_request(9, key(2))
    assert not processor.add_request(3, wants())
    rows = applied(processor, SimpleNamespace(idx_mapping_np=np.array([9, 3, 5])))
    assert torch.equal(rows(1, 2), ROWS[[2, 0]])


def test_one_of_several_identical_workers_sends_the_rows():
    def reply(rank):
        worker = RowAccess()
        worker.genlm_end_watch()  # it loads no model
        worker.rank, worker.parallel_config = rank, SimpleNamespace(tensor_parallel_size=2)
        ROWS_OF_WORKERS.put([1], torch.ones(1, 3))
        return worker.genlm_take_rows([1], None)

    assert reply(0) == torch.ones(3).numpy().tobytes()
    assert reply(1) is None
    assert ROWS_OF_WORKERS.take([1]) == [None], "each gives its own up"


@pytest.mark.parametrize("count", [1, 5])
def test_broken_draws_are_found_with_one_wait_for_the_device(count, monkeypatch):
    store, read = RowStore(), []
    logits = torch.zeros(count, 11)
    logits[0, 3] = torch.nan
    store.note([*range(count)], logits)
    store.note([*range(count)], torch.zeros(count, 11))
    for name in ("__bool__", "item", "tolist"):
        usual = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, usual=usual: read.append(1) or usual(self)
        )
    assert store.were_broken([*range(count), "unknown"]) == [True, *[False] * count]
    assert len(read) == 1
    assert store.were_broken([0]) == [False], "it is forgotten"
    store.note([*range(count)], logits)
    store.put([*range(count)], logits)
    store.forget([*range(count), "unknown"])
    assert len(read) == 1
    assert store.take([0]) == [None]
    assert store.were_broken([0]) == [False]


def test_state_of_a_device_is_overwritten_without_a_wait():
    state = torch.empty(2, 3, device="meta")  # reading its values would raise
    clean_state(SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[state])))
