"""One step of n contexts through mlx-lm, whatever the program does with them, in CPU time

``prefill``: n new contexts. ``extend``: each grows by a token. ``fork``: half of them, each
continued twice.
``newcomer``: all grow by a token, and a new one comes. ``ragged``: they grow by 1 to 5 tokens.
``alternate``: two groups of n take turns. Every step continues from the contexts of the
step before; where n contexts have more than 1,000 tokens, a round has one ``prefill``,
``newcomer``, ``ragged`` and ``alternate``.
``shared``: n contexts behind one prompt, each grows by a token; ``resample``: and every ten steps
their parents are chosen anew.

The floor is what the same tokens cost in raw mlx-lm: one ``model(...)`` on a prepared batch cache
of the same rows, and log-softmax. For ``newcomer`` that is a decode and a prefill; for ``ragged``
as many tokens for every row as on average. ``genlm-backend`` 0.3.1 runs on mlx-lm 0.31.3, the last
with the functions that it imports. On Linux all sides multiply matrices by PyTorch's BLAS: the one
in MLX's wheel is the reference implementation, far slower, and would hide all else.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import Bench, main
from benchmarks.steps import (
    COPIED,
    SHARED,
    Contexts,
    Program,
    asked_of,
    measure,
    measure_resampled,
    measure_shared,
    programs,
    ragged_length,
)

PLUGIN = "mlx"
#: The cases of ``shared``; and for ``resample``, the contexts, the prompt's length, the steps, and
#: the steps between two resamplings.
BEHIND_ONE_PROMPT = SHARED[:3]
RESAMPLED = (64, 1000, 60, 10)

PEER = ["genlm-backend[mlx]==0.3.1", "mlx-lm[cpu]==0.31.3"]


def prepare(bench: Bench) -> None:
    """Measure CPU time; let MLX, which is not imported yet, find PyTorch's BLAS before its own."""
    bench.clock = time.process_time
    spec = importlib.util.find_spec("torch")
    if sys.platform == "linux" and spec is not None and spec.origin is not None:
        ctypes.CDLL(
            str(Path(spec.origin).with_name("lib") / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL
        )


def peaks(bench: Bench) -> Callable[..., None]:
    """:meth:`Bench.time` that also records the most memory that MLX has had in a case, the model's
    included."""
    import mlx.core as mx

    def time_of(case: str, *what: Any, x: float, **how: Any) -> None:
        mx.reset_peak_memory()
        bench.time(case, *what, x=x, **how)
        peak = mx.get_peak_memory() / (1 << 20)
        bench.record(f"peak of MLX's memory: {case}", peak, unit="MiB", x=x)

    return time_of


def measure_steps(bench: Bench, lm: Any, reset: Callable[[], object]) -> None:
    """Every step, on either library."""
    with asyncio.Runner() as runner:
        for program in programs(bench, len(lm.byte_vocab)):
            measure(program, asked_of(lm, runner), reset, peaks(bench))


def measure_prompt(
    bench: Bench,
    lm: Any,
    reset: Callable[[], object],
    cases: Sequence[tuple[int, int]],
    repeat: int = 6,
) -> None:
    """Contexts behind one prompt, on either library."""
    import mlx.core as mx

    def memory() -> float:
        return float(mx.get_active_memory()) / (1 << 20)

    with asyncio.Runner() as runner:
        ask, size = asked_of(lm, runner), len(lm.byte_vocab)
        measure_shared(bench, size, ask, reset, cases, repeat, memory)


def ours(bench: Bench) -> None:
    prepare(bench)
    from genlm.mlx import AsyncMlxLM

    with AsyncMlxLM.from_name(bench.model, cache_size=0) as lm:
        measure_prompt(bench, lm, lm.clear_kv_cache, BEHIND_ONE_PROMPT)
        with asyncio.Runner() as runner:
            ask, size = asked_of(lm, runner), len(lm.byte_vocab)
            measure_resampled(bench, size, ask, lm.clear_kv_cache, RESAMPLED)
        measure_steps(bench, lm, lm.clear_kv_cache)


def theirs(bench: Bench) -> None:
    prepare(bench)
    from genlm.backend.llm import AsyncMlxLM

    lm = AsyncMlxLM.from_name(bench.model)
    measure_prompt(bench, lm, lm.clear_cache, COPIED[:1])  # longer prompts take minutes
    measure_steps(bench, lm, lm.clear_cache)


def floor(bench: Bench) -> None:
    prepare(bench)
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    model, tokenizer = load(bench.model)

    def decode(cache: Any, contexts: Contexts) -> None:
        logits = model(mx.array(contexts), cache=cache)[:, -1, :]
        mx.eval(
            logits - mx.logsumexp(logits, axis=-1, keepdims=True), [layer.state for layer in cache]
        )

    def prefill(contexts: Contexts) -> Any:
        """Prefill as mlx-lm's own generation does: the last token separately, so that logits are
        computed only for it."""
        cache = [layer.merge([layer] * len(contexts)) for layer in make_prompt_cache(model)]
        model(mx.array([context[:-1] for context in contexts]), cache=cache)
        mx.eval([layer.state for layer in cache])
        decode(cache, [context[-1:] for context in contexts])
        return cache

    for n, length in COPIED[:1] if bench.quick else COPIED:
        program = Program(tokenizer.vocab_size, n, length)
        cache = prefill(program.prompts(1))
        for layer in cache:
            layer.filter(mx.zeros(n, mx.int32))
        step = functools.partial(decode, cache, [[5]] * n)
        bench.time(f"shared, {n} contexts behind one prompt", step, x=length, repeat=6)
        del cache, step
    for program in programs(bench, tokenizer.vocab_size):
        n, after = program.n, f" after {program.length} tokens"
        time_of = peaks(bench)
        few = program.seldom(program.repeats)
        time_of("prefill" + after, prefill, x=n, prepare=program.prompts, **few)
        cache = prefill(program.prompts())
        one, several = [[5]] * n, [[5] * ragged_length(n)] * n

        def with_newcomer(newcomers: Contexts, cache: Any = cache, one: Contexts = one) -> None:
            decode(cache, one)
            prefill(newcomers)

        for case in ("extend", "fork", "alternate"):
            if case != "fork" or n > 1:
                time_of(case + after, functools.partial(decode, cache, one), x=n, repeat=12)
        newcomer = functools.partial(program.prompts, 1)
        time_of("newcomer" + after, with_newcomer, x=n, repeat=4, prepare=newcomer)
        time_of("ragged" + after, functools.partial(decode, cache, several), x=n, repeat=4)


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
