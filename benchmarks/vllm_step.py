"""One step of n contexts through vLLM, whatever the program does with them, in CPU time

``prefill``: n new contexts. ``extend``: each grows by a token. ``fork``: half of them, each
continued twice.
``newcomer``: all grow by a token, and a new one comes. ``ragged``: they grow by 1 to 5 tokens.
``alternate``: two groups of n take turns. Every step continues from the contexts of the
step before; where n contexts have more than 1,000 tokens, a round has one ``prefill``,
``newcomer``, ``ragged`` and ``alternate``.

The floor is vLLM itself, which gives no row: the same contexts through ``LLM.generate``, one token
each, with its prefix cache. ``genlm-backend`` 0.3.1 does not run on the vLLM release that this
environment has.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from benchmarks.protocol import Bench, main
from benchmarks.steps import Contexts, asked_of, measure, programs
from benchmarks.vllm_sessions import ENGINE, RAW

PLUGIN = "vllm"

#: A cache with room for two groups of 32 contexts of 200 tokens.
ROOMY = ENGINE | {"kv_cache_memory_bytes": 1 << 30}


def ours(bench: Bench) -> None:
    from genlm.vllm import AsyncVirtualLM

    bench.clock = time.process_time
    with (
        AsyncVirtualLM.from_name(bench.model, ROOMY, cache_size=0) as lm,
        asyncio.Runner() as runner,
    ):
        for program in programs(bench, len(lm.byte_vocab)):
            measure(program, asked_of(lm, runner), lm.clear_kv_cache, bench.time)


def floor(bench: Bench) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    bench.clock = time.process_time
    llm = LLM(bench.model, **ROOMY, **RAW)
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)

    def generate(contexts: Contexts) -> None:
        prompts: Any = [{"prompt_token_ids": context} for context in contexts]
        llm.generate(prompts, one, use_tqdm=False)

    for program in programs(bench, len(llm.get_tokenizer())):
        measure(program, generate, llm.reset_prefix_cache, bench.time)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
