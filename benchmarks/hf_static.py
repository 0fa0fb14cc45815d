"""A step of constant shape beside a packed one: operators that the host launches, and CPU time

Each of n contexts of 8 tokens grows by one token. A *packed* step computes exactly these tokens. A
step of *constant shape* (``static=True``) pads n to a power of two and columns to a multiple of 64,
so that it can be recorded as a CUDA graph. *Replayed* counts what the host launches around a
recorded step, and the replay as one.

Operators are counted as PyTorch dispatches them, without views. On a CPU nothing is recorded: the
times are of the same operators one by one, so the padding is a loss there, and the gain is in the
counts. Both ways take turns in one process.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any
from unittest.mock import patch

from benchmarks.protocol import Bench, main
from benchmarks.steps import Contexts, Program

PLUGIN = "hf"

CONTEXTS = (32, 256)
PROMPT_TOKENS, REPEAT = 8, 4

#: A step is recorded when its shape has occurred three times; it then runs once before it is
#: replayed.
STEPS_BEFORE_REPLAY = 4


class Still:
    """A recorder whose replays do nothing, so that only the host's own work remains."""

    nbytes = 0

    def record(self, step: Any) -> Still:
        self.result = step()
        return self

    def replay(self) -> None: ...

    def forget(self) -> None: ...


def ours(bench: Bench) -> None:
    from genlm.hf import strategies
    from genlm.hf.engine import HFEngine
    from genlm.hf.loading import load_pretrained
    from genlm.hf.options import HFOptions

    bench.clock = time.process_time
    model, tokenizer = load_pretrained(bench.model, HFOptions(device="cpu"))
    replayed = copy.deepcopy(model)
    packed = HFEngine(copy.deepcopy(model), tokenizer, HFOptions(static=False))
    static = HFEngine(model, tokenizer, HFOptions(static=True))
    with patch.object(strategies, "recorder_for", lambda device: Still()):
        recorded = HFEngine(replayed, tokenizer, HFOptions(static=True))
    ways = {"packed": packed, "constant shape": static}
    for n in (4,) if bench.quick else CONTEXTS:
        program = Program(packed.vocab_size, n, PROMPT_TOKENS)
        contexts = program.prompts()
        for engine in (*ways.values(), recorded):
            engine.genlm_clear_kv_cache()
            ask(engine, contexts)
        for _ in range(STEPS_BEFORE_REPLAY):
            contexts = program.extend(contexts)
            for engine in (*ways.values(), recorded):
                ask(engine, contexts)
        contexts = program.extend(contexts)
        for name, engine in {**ways, "replayed": recorded}.items():
            # The replay itself is one launch.
            count = launches(engine, contexts) + (engine is recorded)
            bench.record(f"operators of a step, {name}", count, unit="operators", x=n)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 if bench.quick else REPEAT):
            contexts = program.extend(contexts)
            for name in random.Random(len(times["packed"])).sample([*ways], 2):
                began = bench.clock()
                ask(ways[name], contexts)
                times[name].append(1e3 * (bench.clock() - began))
        for name, taken in times.items():
            bench.record(f"a step, {name}", taken, unit="ms", x=n)


def ask(engine: Any, contexts: Contexts) -> None:
    """Answer the contexts, in as many steps as that takes."""
    from genlm.core import Query

    new, left = [Query(tuple(one)) for one in contexts], len(contexts)
    while left:
        left -= len(engine.genlm_step(new, [], engine.vocab_size))
        new = []


def launches(engine: Any, contexts: Contexts) -> int:
    """The operators of a step."""
    from tools.launched import Launched

    with Launched() as launched:
        ask(engine, contexts)
    return launched.count


if __name__ == "__main__":
    main(ours=ours)
