"""The steps of a program over n contexts, whatever it does with them: shared by the workloads of
the engines.

``prefill``: n new contexts. ``extend``: each grows by a token. ``fork``: half of them, each
continued twice.
``newcomer``: all grow by a token, and a new one comes. ``ragged``: they grow by 1 to 5 tokens.
``alternate``: two groups of n take turns. ``shared``: n contexts behind one prompt, each grows by a
token. ``resample``: the same, and every ten steps their parents are chosen anew, with repetition.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import Bench

LENGTHS = (20, 200)
CONTEXTS = (1, 8, 32)

#: A program with more tokens than this is a long one.
LONG_PROGRAM_TOKENS = 1000

#: The lengths at which ``extend`` is measured.
CURVE_TOKENS = (20, 100, 500)
CURVE_CONTEXTS = 4
BY_LENGTH = f"extend {CURVE_CONTEXTS} contexts, by length"

#: For each case, the number of contexts and the length of their shared prompt.
SHARED = ((64, 20), (64, 1000), (64, 4000), (256, 1000), (512, 1000))

#: The cases that fit into memory with a copy of the prompt for each context.
COPIED = SHARED[:2]

#: The number of contexts, the length of the prompt, the steps, and the steps between two
#: resamplings.
RESAMPLED = (64, 1000, 200, 10)

Contexts = list[list[int]]


class Program:
    """Makes the contexts of each case: new ones for every step, so that nothing is answered from a
    cache of rows."""

    def __init__(self, vocabulary: int, n: int, length: int) -> None:
        self._source = random.Random(1000 * n + length)
        self._vocabulary, self.n, self.length = vocabulary, n, length

    @property
    def long(self) -> bool:
        """Whether computing the contexts for the first time takes long."""
        return self.n * self.length > LONG_PROGRAM_TOKENS

    @property
    def repeats(self) -> int:
        """How often to repeat a step: that of a long program less often."""
        return 6 if self.long else 12

    def seldom(self, repeat: int) -> dict[str, Any]:
        """How to time a case whose step may take many seconds, where others are repeated
        ``repeat`` times."""
        return {"repeat": 1, "warm": 0} if self.long else {"repeat": max(repeat // 3, 1)}

    def prompts(self, n: int | None = None) -> Contexts:
        return [self._tokens(self.length) for _ in range(self.n if n is None else n)]

    def extend(self, prompts: Contexts) -> Contexts:
        return [prompt + self._tokens(1) for prompt in prompts]

    def fork(self, prompts: Contexts) -> Contexts:
        return [
            prompt + self._tokens(1) for prompt in prompts[: max(self.n // 2, 1)] for _ in range(2)
        ][: max(self.n, 2)]

    def newcomer(self, prompts: Contexts) -> Contexts:
        return self.extend(prompts) + self.prompts(1)

    def ragged(self, prompts: Contexts) -> Contexts:
        return [prompt + self._tokens(1 + at % 5) for at, prompt in enumerate(prompts)]

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(self._vocabulary) for _ in range(count)]


class Growing:
    """Contexts that grow by a token with every call, which gives them."""

    def __init__(self, program: Program, contexts: Contexts) -> None:
        self._program, self.contexts = program, contexts

    def __call__(self) -> Contexts:
        self.contexts = self._program.extend(self.contexts)
        return self.contexts


def programs(bench: Bench, vocabulary: int) -> Iterator[Program]:
    for length in LENGTHS[:1] if bench.quick else LENGTHS:
        for n in CONTEXTS:
            yield Program(vocabulary, n, length)


def measure(
    program: Program,
    ask: Callable[[Contexts], object],
    reset: Callable[[], object],
    timed: Callable[..., object],
    repeat: int | None = None,
) -> None:
    """Every case. ``ask`` answers contexts, ``reset`` forgets all, and ``timed``
    is :meth:`Bench.time`. Steps that take long on one side at least are repeated less often.

    A step continues from the contexts of the step before. Each case of a short program begins
    anew; a long program goes on with the contexts of the case before, as its prompts take long.
    """
    repeat = repeat or program.repeats
    few = program.seldom(repeat)
    current: Contexts = []

    def fresh() -> Contexts:
        nonlocal current
        reset()
        current = program.prompts()
        return current

    def time_of(case: str, prepare: Callable[[], Contexts], **how: int) -> None:
        timed(f"{case} after {program.length} tokens", ask, x=program.n, prepare=prepare, **how)

    def steps(case: str, **how: int) -> None:
        if not program.long:
            ask(fresh())
        grow = getattr(program, case)

        def step() -> Contexts:
            nonlocal current
            current = grow(current[: program.n])
            return current

        time_of(case, step, **how)

    time_of("prefill", fresh, **few)
    steps("extend", repeat=repeat)
    if program.n > 1:
        steps("fork", repeat=repeat)
    steps("newcomer", **few)
    steps("ragged", **few)
    ask(others := program.prompts())
    turns = itertools.cycle([Growing(program, current), Growing(program, others)])
    time_of("alternate", lambda: next(turns)(), **few)


def measure_lengths(
    bench: Bench,
    vocabulary: int,
    ask: Callable[[Contexts], object],
    reset: Callable[[], object],
    repeat: int,
) -> None:
    """An ``extend`` against the length of the contexts."""
    for length in CURVE_TOKENS[:1] if bench.quick else CURVE_TOKENS:
        program = Program(vocabulary, CURVE_CONTEXTS, length)
        reset()
        ask(contexts := program.prompts())
        grown = Growing(program, contexts)
        bench.time(BY_LENGTH, ask, x=length, repeat=repeat, prepare=grown)


def measure_shared(
    bench: Bench,
    vocabulary: int,
    ask: Callable[[Contexts], object],
    reset: Callable[[], object],
    cases: Sequence[tuple[int, int]] = SHARED,
    repeat: int = 8,
    memory: Callable[[], float] | None = None,
    give: Callable[[list[int]], object] | None = None,
) -> None:
    """Contexts with one prompt: the first step, each further one, and the MiB of memory beyond
    those before the first case. ``give`` computes the prompt. It is part of the first step, as the
    prompt's forward is on every side."""
    memory = memory or resident
    reset()
    before = memory()
    for n, length in cases[:1] if bench.quick else cases:
        program = Program(vocabulary, n, length)
        behind = f"shared, {n} contexts behind one prompt"
        grown = Growing(program, [])

        def fresh(grown: Growing = grown, program: Program = program) -> Contexts:
            reset()
            grown.contexts = program.prompts(1) * program.n
            return grown()

        def ask_first(contexts: Contexts) -> object:
            if give is not None:
                give(contexts[0][:-1])
            return ask(contexts)

        bench.time(f"{behind}: first step", ask_first, x=length, repeat=1, prepare=fresh)
        bench.time(behind, ask, x=length, repeat=repeat, prepare=grown)
        more = memory() - before
        bench.record(f"{behind}: memory above the model", more, unit="MiB", x=length)
    reset()


def measure_resampled(
    bench: Bench,
    vocabulary: int,
    ask: Callable[[Contexts], object],
    reset: Callable[[], object],
    case: tuple[int, int, int, int] = RESAMPLED,
) -> None:
    """Contexts behind one prompt for many steps, with and without resampling, in CPU time: the
    last steps of each."""
    n, length, steps, between = case
    if bench.quick:
        n, length, steps = 4, 20, 2 * between
    for every in (0, between):
        program, source = Program(vocabulary, n, length), random.Random(0)
        reset()
        current = program.extend(program.prompts(1) * n)
        times = []
        for step in range(steps):
            if every and step % every == every - 1:
                current = source.choices(current, k=n)
            current = program.extend(current)
            began = time.process_time()
            ask(current)
            times.append((time.process_time() - began) * 1e3)
        name = f"resample, {n} contexts behind {length} tokens, after {steps} steps"
        bench.record(name, times[-2 * between :], unit="ms", x=every)
    reset()


def resident() -> float:
    """The memory of this process, in MiB; 0 if the system does not tell."""
    status = Path("/proc/self/status")
    if sys.platform != "linux" or not status.exists():
        return 0.0
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) / 1024 for line in lines if line and line[0] == "VmRSS:")


def asked_of(lm: Any, runner: asyncio.Runner) -> Callable[[Contexts], object]:
    """Asks a model for the rows of contexts, each by a coroutine of its own."""

    async def rows(contexts: Contexts) -> Sequence[object]:
        return await asyncio.gather(*(lm.next_token_logprobs(context) for context in contexts))

    return lambda contexts: runner.run(rows(contexts))


def ragged_length(n: int) -> int:
    """How many tokens ``ragged`` adds to each of n contexts on average."""
    return round(sum(1 + at % 5 for at in range(n)) / n)


def transformers_model(bench: Bench) -> tuple[Callable[..., Any], int]:
    """Evaluates contexts after a cache's and gives the cache; and the size of the vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()

    def run(contexts: Contexts, state: Any = None) -> Any:
        output = model(
            torch.tensor(contexts), past_key_values=state, use_cache=True, logits_to_keep=1
        )
        output.logits[:, -1].log_softmax(dim=-1)
        return output.past_key_values

    return run, model.config.vocab_size


def transformers_floor(bench: Bench, lengths: bool = False) -> None:
    """The cost of the same tokens in raw transformers; with ``lengths``, also of those of
    :func:`measure_lengths`."""
    import torch

    bench.clock = time.process_time
    run, size = transformers_model(bench)
    with torch.inference_mode():
        for program in programs(bench, size):
            after = f" after {program.length} tokens"
            seldom = program.seldom(program.repeats)
            bench.time("prefill" + after, run, x=program.n, prepare=program.prompts, **seldom)
            state = run(program.prompts())
            # Copied, because decoding writes into the state.
            mine = functools.partial(copy.deepcopy, state)
            extend = functools.partial(run, [[5]] * program.n)
            ragged = functools.partial(run, [[5] * ragged_length(program.n)] * program.n)
            newcomer = program.prompts(1)

            def with_new_requests(
                state: Any, extend: Callable[..., Any] = extend, newcomer: Contexts = newcomer
            ) -> None:
                extend(state)
                run(newcomer)

            for case in ("extend", "fork", "alternate"):
                if case != "fork" or program.n > 1:
                    bench.time(case + after, extend, x=program.n, repeat=12, prepare=mine)
            bench.time("newcomer" + after, with_new_requests, x=program.n, repeat=6, prepare=mine)
            bench.time("ragged" + after, ragged, x=program.n, repeat=6, prepare=mine)
        curve = CURVE_TOKENS if lengths else ()
        for length in curve[:1] if bench.quick else curve:
            state = run(Program(size, CURVE_CONTEXTS, length).prompts())
            mine = functools.partial(copy.deepcopy, state)
            decode = functools.partial(run, [[5]] * CURVE_CONTEXTS)
            bench.time(BY_LENGTH, decode, x=length, repeat=12, prepare=mine)
