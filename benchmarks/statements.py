"""Statements of Python for a particle and token, in four forms of one program

Counted, not timed: a count does not depend on how busy the machine is. Sequential Monte Carlo with
resampling, 4 tokens of each particle, over an engine that gives one row again and again (*no
engine*), and over hf with a model of two layers. ``rows``: a coroutine asks for each row. ``then``:
a coroutine gives a function of the row. ``population``: particles in tensors, whose rows come to
the program; ``population, then``: with a function of rows. Of all threads, by the slope from 64 to
192 particles, so that what a step costs once is left out. *Waits* are numbers that are read from
tensors one by one, each of which would wait for a GPU.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

MIN_PARTICLES, MAX_PARTICLES, TOKENS = 64, 192, 4


class Statements:
    """Lines of Python, in this thread and in those that begin after this was made."""

    def __init__(self) -> None:
        self.count, self._on = 0, False
        threading.settrace(self._called)

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        return self._ran if self._on else None

    def _ran(self, frame: Any, event: str, argument: Any) -> Any:
        self.count += event == "line"
        return self._ran

    def __enter__(self) -> Statements:
        self.count, self._on = 0, True
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self._on = False


def no_engine() -> Any:
    import torch

    from genlm.core import AsyncLM, hookimpl
    from genlm.core.mock import ByteTokenizer

    source = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 258, generator=source).log_softmax(-1).repeat(MAX_PARTICLES, 1)

    class Instant:
        tokenizer, vocab_size, max_context, device, model = ByteTokenizer(), 258, None, "cpu", None

        @hookimpl
        def genlm_next_token_logprobs(self, queries: Any) -> Any:
            return rows[: len(queries)]

    return AsyncLM(Instant, backend="instant", cache_size=0)


def measure(bench: Bench, statements: Statements, lm: Any, where: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from tests.particle_forms import ByRows, ByThen, InTensors, InTensorsByThen, smc

    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            self.count += call._schema.name == "aten::_local_scalar_dense"
            return call(*args, **(kwargs or {}))

    forms = {
        "rows": ByRows,
        "then": ByThen,
        "population": InTensors,
        "population, then": InTensorsByThen,
    }
    for name, form in forms.items():
        counts, waits = [], []
        for n in (MIN_PARTICLES, MAX_PARTICLES):
            asyncio.run(smc(form, lm, n, TOKENS, seed=1))
            with statements:
                asyncio.run(smc(form, lm, n, TOKENS, seed=2))
            counts.append(statements.count)
            with Waits() as seen:
                asyncio.run(smc(form, lm, n, TOKENS, seed=3))
            waits.append(seen.count)
        tokens = (MAX_PARTICLES - MIN_PARTICLES) * TOKENS
        for what, (few, many) in (("statements", counts), ("waits", waits)):
            bench.record(f"{name}, {where}", (many - few) / tokens, unit=what)


def ours(bench: Bench) -> None:
    from benchmarks.per_row import save_model
    from genlm.core import load_model_by_name

    statements = Statements()  # created before any engine's thread starts
    with no_engine() as lm:
        measure(bench, statements, lm, "no engine")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        with load_model_by_name(folder, "hf", cache_size=0) as lm:
            measure(bench, statements, lm, "hf")


if __name__ == "__main__":
    main(ours=ours)
