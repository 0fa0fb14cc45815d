"""The logits processor, driven as each of vLLM's two runners drives it, against rows computed
here."""

from __future__ import annotations

from enum import Enum, auto
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlm.vllm.capture import ROW_KEY, WIDTH_KEY, RowCapture, RowStore


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


@pytest.fixture
def logits():
    return torch.randn(3, 11, generator=torch.Generator().manual_seed(0))


def captured(processor, *keys):
    return processor.store.take(keys)


def test_v1_rows_go_to_their_keys_and_the_logits_stay(logits):
    processor, before = capture(), logits.clone()
    processor.update_state(update(added=[(0, key(7)), (2, key(8))]))
    assert torch.equal(processor.apply(logits), before)
    expected = before.log_softmax(-1)
    assert torch.equal(torch.stack(captured(processor, 7, 8)), expected[[0, 2]])
    assert captured(processor, 7) == [None], "a row is given up once"


def test_v1_follows_moves_swaps_and_removals(logits):
    processor = capture()
    processor.update_state(update(added=[(0, key(1)), (1, key(2)), (2, wants())]))
    processor.update_state(update(moved=[(0, 1, Direction.SWAP)]))
    processor.update_state(update(removed=[2], moved=[(1, 2, Direction.UNIDIRECTIONAL)]))
    processor.update_state(None)
    processor.apply(logits)
    expected = logits.log_softmax(-1)
    assert torch.equal(torch.stack(captured(processor, 2, 1)), expected[[0, 2]])


def test_v1_a_request_takes_over_a_slot(logits):
    processor = capture()
    processor.update_state(update(added=[(0, key(1))]))
    processor.update_state(update(added=[(0, wants())]))
    processor.apply(logits)
    assert captured(processor, 1) == [None]


def test_v2_finds_rows_by_slot(logits):
    processor = capture()
    assert processor.add_request(5, key(1))
    assert processor.add_request(9, key(2))
    assert not processor.add_request(3, wants())
    processor.apply(logits, SimpleNamespace(idx_mapping_np=np.array([9, 3, 5])))
    expected = logits.log_softmax(-1)
    assert torch.equal(torch.stack(captured(processor, 1, 2)), expected[[2, 0]])


def test_the_last_row_under_a_key_wins(logits):
    processor = capture()
    processor.update_state(update(added=[(0, key(1))]))
    processor.apply(logits)
    processor.apply(logits * 2)
    assert torch.equal(captured(processor, 1)[0], (logits * 2).log_softmax(-1)[0])


def test_padding_is_never_drawn(logits):
    processor = capture()
    processor.update_state(update(added=[(1, wants(**{WIDTH_KEY: 10}))]))
    drawn_from = processor.apply(logits.clone())
    assert drawn_from[1, 10] == -torch.inf
    assert torch.equal(drawn_from[1, :10], logits[1, :10])
    assert torch.equal(drawn_from[[0, 2]], logits[[0, 2]])


def test_a_greedy_batch_shows_its_logits():
    assert capture().is_argmax_invariant() is False


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_of_workers_that_have_the_same_rows_one_sends_them():
    from genlm.vllm.worker import ROWS, RowAccess

    def reply(rank):
        worker = RowAccess()
        worker.rank, worker.parallel_config = rank, SimpleNamespace(tensor_parallel_size=2)
        ROWS.put([1], torch.ones(1, 3))
        return worker.genlm_take_rows([1])

    assert reply(0) == torch.ones(3).numpy().tobytes()
    assert reply(1) is None
    assert ROWS.take([1]) == [None], "each gives its own up"
