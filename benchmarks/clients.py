"""Three programs of libraries that were written for genlm-backend; they run over it and over us.

``python -m benchmarks.clients MODEL`` runs each once and prints one JSON object a line: its
answers, how many tokens or bytes it went through, and the seconds of wall and of CPU time. Nothing
here knows which of the two distributions is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

PROMPT = "The weather today is"
REGEX = r" (very |quite |not )*(warm|cold|sunny|wet)( and (warm|cold|sunny|windy|wet))?\."
TEXT = b"An apple a day keeps the doctor away."


def load(model: str) -> Any:
    import torch

    from genlm.backend import load_model_by_name

    options = {"torch_dtype": torch.float32, "device_map": "cpu"}
    return load_model_by_name(model, backend="hf", llm_opts={"hf_opts": options})


def seed_all(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


async def control(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """genlm-control: adaptive weighted rejection sampling under a regular expression, with SMC."""
    from genlm.control import AWRS, BoolFSA, PromptedLLM

    llm = PromptedLLM(lm)
    llm.set_prompt_from_str(PROMPT)
    sampler = AWRS(llm, BoolFSA.from_regex(REGEX).coerce(llm, f=b"".join), seed=seed)
    particles = 5 if quick else 20
    sequences = await sampler.smc(n_particles=particles, ess_threshold=0.5, max_tokens=12)
    weights = [float(weight) for weight in sequences.log_weights]
    texts = [b"".join(map(bytes, context[:-1])).decode() for context in sequences.contexts]
    return {"log_z": float(sequences.log_ml), "weights": weights, "texts": texts, "n": particles}


async def bytes_beam(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """genlm-bytes: the log-probability of a text byte by byte, by beam search."""
    from genlm.bytes import BeamParams, ByteBeamState

    text = TEXT[:12] if quick else TEXT
    beam = await ByteBeamState.initial(lm, BeamParams(K=5, prune_threshold=0.01))
    weights = []
    try:
        for byte in text:
            weights.append(float((await beam.logp_next()).ps[byte]))
            beam = await (beam.prune() << byte)
        log_z = float(beam.logZ)
    finally:
        await beam.cleanup()
    return {"log_z": log_z, "weights": weights, "texts": [text.decode()], "n": len(text)}


async def llamppl(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """llamppl: a model whose words may have at most five letters, with SMC."""
    import numpy as np
    from llamppl import CachedCausalLM, LMContext, Model, smc_standard

    llm = CachedCausalLM(lm)
    end = llm.tokenizer.eos_token_id
    short = {
        room: {
            i
            for i, token in enumerate(llm.str_vocab)
            if i != end
            and "\n" not in token
            and token.strip().isalpha()
            and len(token.strip()) <= (5 if token[0] == " " else room)
        }
        for room in range(6)
    }

    class ShortWords(Model):  # type: ignore[misc]  # llamppl has no types
        def __init__(self, left: int) -> None:
            super().__init__()
            self.context = LMContext(llm, PROMPT)
            self.left = left

        async def step(self) -> None:
            letters = len(str(self.context).split(" ")[-1])
            await self.observe(self.context.mask_dist(short[max(0, 5 - letters)]), True)
            await self.sample(self.context.next_token())
            self.left -= 1
            if self.left == 0:
                self.finish()

    particles, tokens = (5, 4) if quick else (20, 12)
    done = await smc_standard(ShortWords(tokens), particles, ess_threshold=0.5)
    weights = [float(particle.weight) for particle in done]
    log_z = float(np.logaddexp.reduce(weights)) - float(np.log(particles))
    texts = [str(particle.context) for particle in done]
    return {"log_z": log_z, "weights": weights, "texts": texts, "n": particles * tokens}


PROGRAMS: dict[str, Callable[[Any, int, bool], Awaitable[dict[str, Any]]]] = {
    "genlm-control": control,
    "genlm-bytes": bytes_beam,
    "llamppl": llamppl,
}


def run(name: str, lm: Any, seed: int, quick: bool, fresh: bool = True) -> dict[str, Any]:
    """One program, from empty caches if ``fresh``. Importing its library is not timed."""
    importlib.import_module(name.replace("-", "."))
    if fresh:
        lm.clear_cache()
        lm.clear_kv_cache()
    seed_all(seed)
    engine = engine_seconds(lm)
    wall, cpu = time.perf_counter(), time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        answers = asyncio.run(_awaited(PROGRAMS[name](lm, seed, quick)))
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    if engine is not None:
        seconds["engine"] = engine_seconds(lm) - engine
    return {"program": name, "seed": seed, **answers, **seconds}


def engine_seconds(lm: Any) -> Any:
    """Wall time spent in the engine so far; ``None`` where the model does not count it."""
    return lm.stats.engine_seconds if hasattr(lm, "stats") else None


async def _awaited(answers: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    options = parser.parse_args()
    lm = load(str(options.model))
    for name in options.programs:
        for seed in range(options.seeds):
            print(json.dumps(run(name, lm, seed, options.quick)), flush=True)


if __name__ == "__main__":
    main()
