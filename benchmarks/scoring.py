"""Score a list of candidates after one context, in CPU time

30 continuations of a new context of 40 tokens: x tokens in common, and 8 of its own each. The floor
is raw transformers: one forward of all texts whole, log-softmax, and the scored tokens picked.
`genlm-backend` 0.3.1 has no scores: there the rows of all places are asked together, of which a
program picks them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

IN_COMMON = (0, 8, 24)
CONTEXT, OWN, CANDIDATES = 40, 8, 30

#: A context, and the candidates to score after it.
Asked = tuple[list[int], list[list[int]]]


def measure(bench: Bench, vocabulary: int, score: Callable[[Asked], object], repeat: int) -> None:
    bench.clock = time.process_time
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(count)]

    for common in IN_COMMON[1:2] if bench.quick else IN_COMMON:

        def new(common: int = common) -> Asked:
            first = tokens(common)
            return tokens(CONTEXT), [[*first, *tokens(OWN)] for _ in range(CANDIDATES)]

        name = f"{CANDIDATES} candidates, tokens in common"
        bench.time(
            name, score, unit="ms", x=common, repeat=repeat, warm=int(repeat > 1), prepare=new
        )


def ours(bench: Bench) -> None:
    from genlm.hf import AsyncTransformer

    with AsyncTransformer.from_name(bench.model) as lm, asyncio.Runner() as runner:

        def score(asked: Asked) -> object:
            context, candidates = asked
            contexts = [context] * len(candidates)
            return runner.run(lm.batch_sequence_logprobs(contexts, candidates))

        measure(bench, len(lm.byte_vocab), score, repeat=5)


def theirs(bench: Bench) -> None:
    import torch

    from genlm.backend.llm import AsyncTransformer

    lm = AsyncTransformer.from_name(
        bench.model, hf_opts={"torch_dtype": torch.float32, "device_map": "cpu"}
    )
    with asyncio.Runner() as runner:

        def score(asked: Asked) -> object:
            lm.clear_cache()
            context, candidates = asked
            return runner.run(
                lm.batch_next_token_logprobs(
                    [[*context, *one[:at]] for one in candidates for at in range(len(one))]
                )
            )

        measure(bench, len(lm.byte_vocab), score, repeat=1)


def floor(bench: Bench) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()

    def score(asked: Asked) -> object:
        context, candidates = asked
        tails = torch.tensor(candidates)
        texts = torch.cat([torch.tensor([context] * len(candidates)), tails[:, :-1]], dim=1)
        with torch.inference_mode():
            logits = model(texts, logits_to_keep=tails.shape[1]).logits
            return logits.log_softmax(dim=-1).gather(2, tails[..., None]).sum(dim=(1, 2)).tolist()

    measure(bench, model.config.vocab_size, score, repeat=5)


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
