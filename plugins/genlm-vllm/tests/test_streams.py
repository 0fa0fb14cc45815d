"""vLLM's CUDA stream and that of its thread, on fake streams that record which waits for which."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from genlm.core.types import Query
from genlm.vllm import streams
from genlm.vllm.capture import RowCapture
from genlm.vllm.streams import EngineStream, used_here


class Stream:
    """A stream that knows the work queued on it, or on a stream for which it waited."""

    def __init__(self):
        self.done = []

    def wait_stream(self, other):
        self.done += other.done


class Cuda:
    """The part of ``torch.cuda`` that one thread uses."""

    def __init__(self):
        self.default, self.used = Stream(), False
        self.current = self.default

    def is_initialized(self):
        return self.used

    def current_stream(self, device=None):
        assert self.used, "PyTorch would start CUDA"
        return self.current

    def default_stream(self):
        return self.default

    def set_stream(self, stream):
        self.current = stream


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=fake))
    return fake


def start(cuda):
    """Do what vLLM does when it loads a model."""
    cuda.used, cuda.current = True, Stream()
    cuda.current.done.append("load")
    return cuda.current


def test_thread_keeps_its_stream_and_waits_for_vllms(cuda):
    stream = EngineStream()
    with stream.entered():
        own = start(cuda)
    assert cuda.current is cuda.default
    cuda.default.done.append("weights changed by the user")
    with stream.entered():
        assert cuda.current is own
        assert "weights changed by the user" in own.done
        own.done.append("row")
    assert cuda.current is cuda.default
    assert {"load", "row"} <= set(cuda.default.done)


def test_a_call_that_fails_leaves_the_thread_on_its_stream(cuda):
    stream, made = EngineStream(), []

    def load():
        with stream.entered():
            made.append(start(cuda))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        load()
    assert cuda.current is cuda.default
    with stream.entered():
        assert [cuda.current] == made


def test_vllm_on_the_threads_own_stream_does_not_wait(cuda):
    cuda.used, cuda.default.wait_stream = True, None
    stream = EngineStream()
    for _ in range(2):
        with stream.entered():
            assert cuda.current is cuda.default


def test_cuda_is_not_started(cuda):
    with EngineStream().entered():
        pass
    assert not cuda.used


def test_memory_of_a_steps_rows_is_recorded_once_for_the_reading_stream(cuda):
    cuda.used = True
    readers = []

    def row(memory):
        return SimpleNamespace(
            is_cuda=True,
            device="cuda:0",
            untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: memory),
            record_stream=lambda stream: readers.append((memory, stream)),
        )

    used_here([row(1), None, row(2), row(1)])
    assert sorted(readers) == [(1, cuda.default), (2, cuda.default)]


def test_step_of_a_real_vllm_runs_on_its_own_stream(cuda, load_briefly, monkeypatch):
    made, begin, usual = [], RowCapture.__init__, RowCapture.apply

    def load(self, *config):
        begin(self, *config)
        made.append(start(cuda))

    def step(self, *given):
        assert [cuda.current] == made
        cuda.current.done.append("row")
        return usual(self, *given)

    monkeypatch.setattr(RowCapture, "__init__", load)
    monkeypatch.setattr(RowCapture, "apply", step)
    engine = load_briefly()
    assert cuda.current is cuda.default
    proven = cuda.default.done.count("row")  # loading computes some rows to compare them
    engine.ask(Query((1, 2, 3)))
    assert cuda.current is cuda.default
    assert cuda.default.done.count("row") > proven
