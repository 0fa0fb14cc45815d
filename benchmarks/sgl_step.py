"""One step of n contexts through SGLang, whatever the program does with them, in CPU time

``prefill``: n new contexts. ``extend``: each grows by a token. ``fork``: half of them, each
continued twice.
``newcomer``: all grow by a token, and a new one comes. ``ragged``: they grow by 1 to 5 tokens.
``alternate``: two groups of n take turns. Every step continues from the contexts of the
step before; where n contexts have more than 1,000 tokens, a round has one ``prefill``,
``newcomer``, ``ragged`` and ``alternate``.

The floor is what the same tokens cost in raw transformers. The backend's ``extend`` is also split
into the model's forward pass, the rest of what SGLang's scheduler does, and what the core and the
plugin add to both. ``genlm-backend`` 0.3.1 does not run on the SGLang release that this environment
has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Bench, main
from benchmarks.steps import Contexts, Program, asked_of, measure, programs, transformers_floor

PLUGIN = "sgl"

#: The methods that SGLang's own event loop calls in a step.
SCHEDULER_STEPS = (
    "process_input_requests",
    "get_next_batch_to_run",
    "run_batch",
    "process_batch_result",
)


class Stopwatch:
    """Adds up the seconds of CPU time spent inside the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began

        return timed


def watched_scheduler() -> Stopwatch:
    """Watches the steps of every scheduler that is made from now on."""
    from sglang.srt.managers.scheduler import Scheduler

    watch = Stopwatch()
    for name in SCHEDULER_STEPS:
        setattr(Scheduler, name, watch.around(getattr(Scheduler, name)))
    return watch


def ours(bench: Bench) -> None:
    from genlm.sgl import AsyncSGLTransformer

    bench.clock = time.process_time
    scheduler, forward = watched_scheduler(), Stopwatch()
    with AsyncSGLTransformer.from_name(bench.model, cache_size=0) as lm, asyncio.Runner() as runner:
        lm.underlying_model.forward = forward.around(lm.underlying_model.forward)
        ask = asked_of(lm, runner)
        for program in programs(bench, len(lm.byte_vocab)):
            measure(program, ask, lm.clear_kv_cache, bench.time)
            split(bench, program, ask, scheduler, forward)


def split(
    bench: Bench,
    program: Program,
    ask: Callable[[Contexts], object],
    scheduler: Stopwatch,
    forward: Stopwatch,
) -> None:
    """Divide the time of an ``extend`` among its parts."""
    contexts, taken = program.prompts(), []
    ask(contexts)
    for _ in range(3 if bench.quick else program.repeats):
        contexts = program.extend(contexts)
        began = time.process_time(), scheduler.seconds, forward.seconds
        ask(contexts)
        ended = time.process_time(), scheduler.seconds, forward.seconds
        taken.append([1e3 * (end - begin) for begin, end in zip(began, ended, strict=True)])
    after = f" after {program.length} tokens"
    parts = {
        "extend: forward": [model for _, _, model in taken],
        "extend: SGLang without forward": [own - model for _, own, model in taken],
        "extend: core and plugin": [whole - own for whole, own, _ in taken],
        "extend: core and plugin, of SGLang's step": [
            100 * (whole / own - 1) for whole, own, _ in taken
        ],
    }
    for part, values in parts.items():
        bench.record(part + after, values, unit="%" if part.endswith("step") else "ms", x=program.n)


def floor(bench: Bench) -> None:
    transformers_floor(bench)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
