"""No wake-up of the engine thread is lost: a model's end may interrupt it at any point."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from genlm.core import ModelClosedError
from genlm.core.runtime.batcher import Batcher, Executor

from .conftest import PATIENCE

LOCK = type(threading.Lock())


class Interrupted(Executor):
    """Answers with the request. After its first step the engine thread runs ``stop()`` before its
    ``point``-th call or return, as the garbage collector may.

    ``seen`` gets ``"stopped"`` then, and ``"waits"`` when the thread is about to wait for a lock.
    """

    def __init__(self, point):
        self.point = point
        self.points = itertools.count()
        self.seen = queue.SimpleQueue()
        self.closed = threading.Event()
        self.batcher = Batcher(lambda: self, batch_size=2, timeout=3600.0)
        self.batcher.start()

    def step(self, new_requests, dropped):
        sys.setprofile(self.interrupt)
        return [(request, request) for request in new_requests]

    def interrupt(self, frame, event, called):
        if next(self.points) == self.point:
            self.batcher.stop()  # not profiled, because the profiler runs here
            self.seen.put("stopped")
        elif event == "c_call" and called.__name__ == "acquire":
            lock = called.__self__
            if isinstance(lock, LOCK) and lock.locked():
                self.seen.put("waits")

    def close(self):
        sys.setprofile(None)
        self.closed.set()


def idle(engine):
    return engine.seen.get(timeout=PATIENCE)


def holding_a_batch_open(engine):
    if idle(engine) == "stopped":
        return "stopped"
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(engine.batcher.ask, [2], list)
        seen = engine.seen.get(timeout=PATIENCE)
        engine.batcher.stop()
        with pytest.raises(ModelClosedError):
            asked.result(PATIENCE)
    return seen


@pytest.mark.parametrize("wait", [idle, holding_a_batch_open])
def test_a_model_may_be_collected_at_any_point_of_a_wait(wait):
    for point in itertools.count():
        engine = Interrupted(point)
        assert engine.batcher.ask([0, 1], list) == [0, 1]
        if wait(engine) != "stopped":
            engine.batcher.close(PATIENCE)
            break
        assert engine.closed.wait(PATIENCE), f"stop() at point {point} was not noticed"
    assert point > 10
