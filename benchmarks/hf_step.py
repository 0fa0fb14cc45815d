"""One step of n contexts through transformers, whatever the program does with them, in CPU time

``prefill``: n new contexts. ``extend``: each grows by a token. ``fork``: half of them, each
continued twice.
``newcomer``: all grow by a token, and a new one comes. ``ragged``: they grow by 1 to 5 tokens.
``alternate``: two groups of n take turns. Every step continues from the contexts of the
step before; where n contexts have more than 1,000 tokens, a round has one ``prefill``,
``newcomer``, ``ragged`` and ``alternate``. Another case extends a few contexts of several
lengths, and a last one asks for the rows at all places of a text: of all that it begins with.
Contexts behind one prompt are in ``hf_shared``.

The floor is what the same tokens cost in raw transformers: one ``model(...)`` on a prepared cache
of the same rows, logits of the last position, log-softmax. For ``newcomer`` that is a decode and a
prefill; for ``ragged`` as many tokens for every row as on average; for the places of a text one
forward that gives all of its rows. ``genlm-backend`` 0.3.1 is
measured as shipped and, in the cases named so, after ``cache_kv`` of each prompt.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from benchmarks.protocol import Bench, main
from benchmarks.steps import (
    Contexts,
    Program,
    asked_of,
    measure,
    measure_lengths,
    programs,
    transformers_floor,
)

PLUGIN = "hf"

#: The lengths of texts of which the rows at all positions are requested.
PLACES = (40, 200)


def measure_places(
    bench: Bench,
    vocabulary: int,
    ask: Callable[[Contexts], object],
    reset: Callable[[], object],
    repeat: int,
) -> None:
    """Request the rows of a new text and of all its prefixes."""
    for length in PLACES[:1] if bench.quick else PLACES:
        program = Program(vocabulary, 1, length)

        def prefixes(program: Program = program) -> Contexts:
            reset()
            (text,) = program.prompts()
            return [text[:stop] for stop in range(1, len(text) + 1)]

        bench.time("all places of a text", ask, x=length, repeat=repeat, warm=0, prepare=prefixes)


def ours(bench: Bench) -> None:
    from genlm.hf import AsyncTransformer

    bench.clock = time.process_time
    with AsyncTransformer.from_name(bench.model, cache_size=0) as lm, asyncio.Runner() as runner:
        ask, size = asked_of(lm, runner), len(lm.byte_vocab)
        for program in programs(bench, size):
            measure(program, ask, lm.clear_kv_cache, bench.time)
        measure_lengths(bench, size, ask, lm.clear_kv_cache, repeat=12)
        measure_places(bench, size, ask, lm.clear_kv_cache, repeat=4)


def theirs(bench: Bench) -> None:
    import torch

    from genlm.backend.llm import AsyncTransformer

    bench.clock = time.process_time
    lm = AsyncTransformer.from_name(
        bench.model, hf_opts={"torch_dtype": torch.float32, "device_map": "cpu"}
    )
    with asyncio.Runner() as runner:
        ask = asked_of(lm, runner)
        for program in programs(bench, len(lm.byte_vocab)):
            if not program.long:
                measure(program, ask, lm.clear_cache, bench.time, repeat=3)
                lm.clear_cache()
            prompts, n = program.prompts(), program.n
            extend = functools.partial(program.extend, prompts)
            after = f" after {program.length} tokens"
            # A step takes many seconds, so only the most important figure is measured, as rarely as
            # possible.
            if program.long:
                bench.time("extend" + after, ask, x=n, repeat=1, warm=0, prepare=extend)
            lm.clear_cache()
            for prompt in prompts:
                lm.cache_kv(prompt)
            given = "extend, prompts given to cache_kv,"
            bench.time(given + after, ask, x=n, repeat=3, prepare=extend)
            lm.clear_cache()
        measure_lengths(bench, len(lm.byte_vocab), ask, lm.clear_cache, repeat=1)
        measure_places(bench, len(lm.byte_vocab), ask, lm.clear_cache, repeat=1)


def floor(bench: Bench) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    transformers_floor(bench, lengths=True)
    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()

    def rows(contexts: Contexts) -> None:
        with torch.inference_mode():
            model(torch.tensor(contexts[-1:])).logits[0].log_softmax(dim=-1)

    measure_places(bench, model.config.vocab_size, rows, lambda: None, repeat=4)


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
