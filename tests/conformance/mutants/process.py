"""Faults in what an engine does to its process, and in what it does when its own one dies."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import torch

from genlm.core import hookimpl
from genlm.core.mock import MockEngine

from .registry import breaks


@breaks("seeded_draw_sets_no_generator")
class SeedsTheProgram(MockEngine):
    """A seeded sample seeds Python's generator."""

    @hookimpl
    def genlm_sample(self, queries, params):
        for how in params:
            if how.seed is not None:
                random.seed(how.seed)
        return super().genlm_sample(queries, params)


class Loading(MockEngine):
    """Does something to the process when it is loaded, by :meth:`sets`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sets()


@breaks("process_is_as_it_was")
class SeedsAtLoad(Loading):
    def sets(self):
        torch.manual_seed(0)


@breaks("process_is_as_it_was")
class ThreadsOfItsOwn(Loading):
    """The engine's thread takes more of PyTorch's threads; every later thread does too."""

    def sets(self):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(self.threads + 1)

    @hookimpl
    def genlm_close(self):
        super().genlm_close()
        torch.set_num_threads(self.threads)  # Later tests must not see the change.


@breaks("process_is_as_it_was")
class ChangesAVariable(Loading):
    def sets(self):
        self.path = os.environ["PATH"]
        os.environ["PATH"] = f"{self.path}{os.pathsep}."

    @hookimpl
    def genlm_close(self):
        super().genlm_close()
        os.environ["PATH"] = self.path  # Later tests must not see the change.


#: Gives back each line that it gets.
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


@breaks("death_of_the_engines_processes", hangs=True)
class WaitsForTheDead(MockEngine):
    """Each batch is waited for in a process of the engine's own, also when that has died."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        pipe = subprocess.PIPE
        self.worker = subprocess.Popen(
            [sys.executable, "-c", ECHO], stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def _evaluate(self, queries):
        super()._evaluate(queries)
        try:
            self.worker.stdin.write("batch\n")
            answer = self.worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            threading.Event().wait(100.0)  # This is longer than the suite's patience.

    @hookimpl
    def genlm_close(self):
        self.worker.kill()
        self.worker.communicate()
        super().genlm_close()
