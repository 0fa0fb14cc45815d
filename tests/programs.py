"""Random programs one after the other, for as long as a test may take. Each makes an engine of its
own, with numbers of its own in place of constants."""

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
    """Program after program until the time is over, and at least one. The first one is short, so
    that where there is little time some are tried, and those that follow are longer and longer.

    Args:
        begin: Makes one.
        seed: All of them follow from it.
        usually: How long, in seconds, unless the environment says something else.
        parts: Among how many tests that time is divided.
        rounds: Of :data:`ROUND` random things each, the most that a program has.

    Returns:
        What they did and compared.
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
    """Other values of constants (``module.NAME``) for some time; an error says which."""
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
