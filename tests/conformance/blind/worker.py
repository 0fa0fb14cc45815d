"""A continuous engine whose rows are computed by a process of its own. A step blocks until it is
woken, or something comes from there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from itertools import count
from multiprocessing.connection import Connection, wait

import numpy as np
import torch

from genlm.core import Answer, EngineDeadError, hookimpl
from genlm.core.mock import ByteTokenizer

from . import hashing
from .hashing import WIDTH
from .registry import breaks


class Worker:
    """The sound engine."""

    tokenizer, vocab_size, max_context = ByteTokenizer(), WIDTH, 2048
    device, model = "cpu", None

    def __init__(self):
        self.spawn()
        self.asked, self.numbers = {}, count(1)
        self.woken, self.wakes = os.pipe()
        for end in (self.woken, self.wakes):
            os.set_blocking(end, False)

    def spawn(self):
        (theirs, asks), (answers, gives) = os.pipe(), os.pipe()
        command = [sys.executable, hashing.__file__, str(theirs), str(gives)]
        self.child = subprocess.Popen(command, pass_fds=(theirs, gives))
        os.close(theirs)
        os.close(gives)
        self.asks, self.answers = Connection(asks, readable=False), Connection(answers)

    @hookimpl
    def genlm_wake(self):
        with contextlib.suppress(BlockingIOError):
            os.write(self.wakes, b"w")

    @hookimpl
    def genlm_step(self, queries, dropped):
        try:
            self.drop(dropped)
            for query in queries:
                number = self.number()
                self.asked[number] = query
                self.asks.send((number, query.token_ids))
            return self.received() if self.asked else []
        except (EOFError, OSError) as error:
            return self.dead(error)

    def number(self):
        return next(self.numbers)

    def drop(self, dropped):
        gone = set(dropped)
        self.asked = {number: one for number, one in self.asked.items() if one not in gone}

    def received(self):
        self.wait()
        found = []
        while self.answers.poll():
            number, row = self.answers.recv()
            if (query := self.asked.pop(number, None)) is not None:
                found.append(Answer(query, self.row(row)))
        return found

    def wait(self):
        wait([self.answers, self.woken])
        with contextlib.suppress(BlockingIOError):
            while os.read(self.woken, 4096):
                pass

    def row(self, row):
        return torch.from_numpy(row.copy())

    def dead(self, error):
        raise EngineDeadError(f"the worker process has died: {error!r}")

    @hookimpl
    def genlm_close(self):
        self.stop()
        os.close(self.woken)
        os.close(self.wakes)

    def stop(self):
        with contextlib.suppress(OSError):
            self.asks.send(None)
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.asks.close()
        self.answers.close()


@breaks("death_of_the_engines_processes", hangs=True)
class WaitsForADeadOne(Worker):
    """A step waits for the answer of a process that has died."""

    def dead(self, error):
        threading.Event().wait(100.0)  # This is longer than the suite's patience.
        return []


@breaks("nothing_is_left_after_close")
class ThePipeStays(Worker):
    """Closing ends neither the process nor its pipes."""

    left = []  # noqa: RUF012

    def stop(self):
        self.left.append((self.asks, self.answers, self.child))


@breaks("large_batch", hangs=True)
class NumbersOfAByte(Worker):
    """The two hundred and fifty-seventh request in flight has the number of the first."""

    def number(self):
        return super().number() % 256


@breaks("two_models_in_one_process", hangs=True)
class OneProcessForAll(Worker):
    """All models share one process, and end it."""

    shared = []  # noqa: RUF012

    def spawn(self):
        if not self.shared:
            super().spawn()
            self.shared.append((self.child, self.asks, self.answers))
        self.child, self.asks, self.answers = self.shared[0]

    def stop(self):
        if self.shared:
            self.shared.clear()
            super().stop()


@breaks("wake_in_the_middle_of_a_step", hangs=True)
class WakeTakesALock(Worker):
    """A wake waits for the lock that a step holds while it waits."""

    def __init__(self):
        self.lock = threading.Lock()
        super().__init__()

    def wait(self):
        with self.lock:
            wait([self.answers])

    @hookimpl
    def genlm_wake(self):
        with self.lock:
            super().genlm_wake()


@breaks("cancelled_requests_leave_nothing", hangs=True)
class DroppedAndAskedAgain(Worker):
    """A context that is asked again while its dropped twin is computed gets no answer where both
    come in one step."""

    def __init__(self):
        super().__init__()
        self.gone = set()

    def drop(self, dropped):
        self.gone |= {*dropped}

    def received(self):
        found = super().received()
        kept = [answer for answer in found if answer.request not in self.gone]
        self.gone -= {answer.request for answer in found}
        return kept


@breaks("scores_at_every_length")
class RowsInARing(Worker):
    """Rows lie in a ring of 64, which further ones are written over."""

    def __init__(self):
        super().__init__()
        self.ring, self.places = np.zeros((64, WIDTH), np.float32), count()

    def row(self, row):
        place = next(self.places) % len(self.ring)
        self.ring[place] = row
        return torch.from_numpy(self.ring[place])
