"""Random programs one after the other, for as long as a test may take. Each creates an engine of
its own, with random values of some constants."""

from __future__ import annotations

import importlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from genlm.conformance import Program

#: Seconds that random work may take if a test has no number of its own.
SECONDS = os.environ.get("GENLM_FUZZ_SECONDS")

#: A program checks the time after this many random operations.
ROUND = 10

#: A function that makes a program and, at the end, closes its engine. Equal sources make equal
#: programs.
Begin = Callable[[random.Random], AbstractContextManager[Program]]


def fuzz(begin: Begin, seed: int, usually: float, parts: int = 1, rounds: int = 6) -> Counter[str]:
    """Run programs until the time is over, at least one. The first program is short, so that
    several run even in little time; later ones are longer and longer.

    Args:
        begin: Makes a program.
        seed: The seed from which all programs follow.
        usually: The time in seconds, unless the environment gives another.
        parts: The number of tests that share this time.
        rounds: The most rounds of a program, with :data:`ROUND` random operations each.

    Returns:
        Counts of what the programs did and compared.
    """
    until, counts = time.monotonic() + float(SECONDS or usually) / parts, Counter[str]()
    while not counts["programs"] or time.monotonic() < until:
        counts["programs"] += 1
        try:
            with begin(random.Random(f"{seed}-{counts['programs']}")) as program:
                for _ in range(3):
                    program.adapt()
                for _ in range(min(counts["programs"], rounds)):
                    program.run(ROUND)
                    if time.monotonic() > until:
                        break
        except BaseException as error:
            error.add_note(f"program {counts['programs']} of GENLM_FUZZ_SEED={seed}")
            raise
        counts += program.counts
    assert counts["answers"], "nothing was compared"
    return counts


@contextmanager
def constants(values: Mapping[str, Sequence[Any]], source: random.Random) -> Iterator[None]:
    """Inside the block, constants (``module.NAME``) have other values, which errors mention."""
    with ExitStack() as patches:
        chosen = {path: source.choice(possible) for path, possible in values.items()}
        for path, value in chosen.items():
            module, _, name = path.rpartition(".")
            patches.enter_context(patch.object(importlib.import_module(module), name, value))
        try:
            yield
        except BaseException as error:
            error.add_note(str(chosen))
            raise
