"""Memory that a worker shares with the process that reads its rows; the worker is this process."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from genlm.vllm import shared_rows
from genlm.vllm.rows import WorkerRows
from genlm.vllm.shared_rows import MARK_BYTES, MemoryOfReader, SharedRows
from genlm.vllm.worker import ROWS, RowAccess

WIDTH = 11
BLOCK = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reader():
    memory = SharedRows(WIDTH)
    yield memory
    memory.close()


@pytest.fixture
def sent(monkeypatch):
    """Rows of a worker, and what it has sent."""
    worker, replies = RowAccess(), []
    worker.genlm_end_watch()  # it loads no model
    worker.rank, worker.parallel_config = 0, SimpleNamespace(tensor_parallel_size=1)

    def call_workers(method, *args):
        replies.append(getattr(worker, method)(*args))
        return replies[-1:]

    rows = WorkerRows(SimpleNamespace(vocab_size=WIDTH, call_workers=call_workers))
    yield rows, replies
    rows.close()


def taken(rows: WorkerRows, n: int = 3) -> torch.Tensor:
    ROWS.put([*map(str, range(n))], BLOCK[:n])
    return torch.stack(rows.take([*map(str, range(n))]))


def test_rows_go_through_memory_that_grows(sent):
    rows, replies = sent
    first = taken(rows, 1)
    second = taken(rows, 3)
    assert torch.equal(first, BLOCK[:1]), "it is a copy"
    assert torch.equal(second, BLOCK)
    assert rows.take([]) == []
    assert rows.take(["unknown"]) == [None]
    assert replies == [WIDTH, WIDTH, None], "a number is sent in place of rows"


def test_more_rows_than_memory_come_in_parts(sent, monkeypatch):
    monkeypatch.setattr(shared_rows, "MAX_BYTES", 2 * 4 * WIDTH)
    rows = WorkerRows(sent[0]._core)
    assert torch.equal(taken(rows), BLOCK)
    assert sent[1] == [WIDTH, WIDTH]
    rows.close()


def test_rows_are_sent_on_a_system_without_anonymous_files(sent, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert torch.equal(taken(sent[0]), BLOCK)
    assert sent[1] == [BLOCK.numpy().tobytes()]


def test_a_worker_that_does_not_find_the_memory_writes_nothing(reader, tmp_path):
    """On another machine its path is that of nothing, of another file, or of a pipe."""
    place = reader.place_for(3)
    other = tmp_path / "other"
    other.write_bytes(bytes(place.size))
    ends = os.pipe()
    paths = ["/proc/self/fd/9999", other, tmp_path, f"/proc/self/fd/{ends[0]}"]
    for path in paths:
        assert not MemoryOfReader().put(place._replace(path=str(path)), BLOCK)
    assert other.read_bytes() == bytes(place.size)
    assert not MemoryOfReader().put(place, torch.ones(5, WIDTH)), "it has no room for that"
    assert MemoryOfReader().put(place, BLOCK)
    assert torch.equal(reader.read(3, WIDTH), BLOCK)
    for end in ends:
        os.close(end)


def test_nothing_is_left_of_closed_memory(reader):
    before = psutil.Process().num_fds()
    worker = MemoryOfReader()
    place = reader.place_for(3)
    assert worker.put(place, BLOCK)
    assert psutil.Process().num_fds() == before + 1, "the reader's: the worker holds none"
    reader.close()
    assert psutil.Process().num_fds() == before
    assert worker.put(place, BLOCK), "it writes where nobody reads"
    again = reader.place_for(3)
    assert again.mark != place.mark
    assert worker.put(again, BLOCK + 1)
    assert torch.equal(reader.read(3, WIDTH), BLOCK + 1)
    assert len(again.mark) == MARK_BYTES
