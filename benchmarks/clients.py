"""Programs of three libraries that were written for genlm-backend; they run over it and over us.

``python -m benchmarks.clients MODEL`` runs each once and prints one JSON object a line: its
answers, how many tokens or bytes it went through, and the seconds of wall and of CPU time. Nothing
here knows which of the two distributions is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
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

#: A prompt as long as usual instructions or a few examples.
ARTICLE = """The harbour of the old town has changed more in ten years than in the hundred before. \
Where fishing boats once lay in three rows, there is now a line of white hulls that hardly ever \
leave the quay. The fish market moved to the motorway, and the building became a museum, a library \
and a place where people drink coffee and look at the water. Some of those who worked here are \
glad, since the work was hard and cold. Others say that a harbour without fish is only a car park \
with waves.

Last week the council met to decide what to do with the last empty warehouse. Four plans were on \
the table: a hotel, a school for boat builders, flats, and a park. The mayor spoke for the hotel, \
because it would pay for the repair of the sea wall. The teachers spoke for the school. After five \
hours the council decided to"""

#: The schema of the object of :func:`control_json`, and an example.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Ada", "Ben", "Carla"]},
        "age": {"type": "integer", "minimum": 18, "maximum": 90},
    },
}
RECIPE = {
    "type": "object",
    "properties": {
        "dish": {"type": "string", "minLength": 1, "description": "What the dish is called"},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 600},
        "course": {"type": "string", "enum": ["starter", "main", "dessert"]},
    },
    "required": ["dish", "minutes", "course"],
}


def load(model: str, **options: Any) -> Any:
    import torch

    from genlm.backend import load_model_by_name

    hf_opts = {"torch_dtype": torch.float32, "device_map": "cpu"}
    return load_model_by_name(model, backend="hf", llm_opts={"hf_opts": hf_opts, **options})


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
    return _weighted(sequences)


async def control_json(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """genlm-control: the same under a JSON schema, after a chat with an example. This is the
    program of its README, with the same number of particles."""
    from genlm.control import AWRS, JsonSchema, PromptedLLM

    chat = [
        {"role": "system", "content": "Answer with one JSON object that matches the schema."},
        {"role": "user", "content": json.dumps(PERSON)},
        {"role": "assistant", "content": '{"name": "Ada", "age": 36}'},
        {"role": "user", "content": json.dumps(RECIPE)},
    ]
    text = lm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    llm = PromptedLLM(lm, temperature=0.8)
    llm.prompt_ids = lm.tokenizer.encode(text)
    sampler = AWRS(llm, JsonSchema(RECIPE).coerce(llm, f=b"".join), seed=seed)
    tokens = 4 if quick else 30
    return _weighted(await sampler.smc(n_particles=2, ess_threshold=0.5, max_tokens=tokens))


def _weighted(sequences: Any) -> dict[str, Any]:
    weights = [float(weight) for weight in sequences.log_weights]
    words = (
        [token for token in context if isinstance(token, bytes)] for context in sequences.contexts
    )
    texts = [b"".join(map(bytes, context)).decode(errors="replace") for context in words]
    log_z = float(sequences.log_ml)
    return {"log_z": log_z, "weights": weights, "texts": texts, "n": len(texts)}


async def bytes_beam(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """genlm-bytes: the log-probability of a text byte by byte, by beam search."""
    from genlm.bytes import BeamParams, ByteBeamState

    text = TEXT[:8] if quick else TEXT
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


async def bytes_greedy(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """genlm-bytes: a paragraph goes on byte by byte, always by the likeliest one."""
    from genlm.bytes import BeamParams, ByteBeamState

    beam = await ByteBeamState.initial(lm, BeamParams(K=5, prune_threshold=0.05))
    begun, steps = (TEXT[:12], 4) if quick else (ARTICLE[:300].encode(), 40)
    try:
        text = await beam.greedy(begun, steps=steps)
    finally:
        await beam.cleanup()
    return {"log_z": 0.0, "weights": [], "texts": [text.decode(errors="replace")], "n": len(text)}


async def llamppl(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """llamppl: a model whose words may have at most five letters, with SMC."""
    return await _short_words(lm, PROMPT, *((5, 4) if quick else (20, 12)))


async def llamppl_article(lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """llamppl: the same after a longer prompt, which is given to ``cache_kv``. This is its example
    of hard constraints, with the numbers of the example's test."""
    return await _short_words(lm, ARTICLE, *((5, 4) if quick else (20, 25)), pinned=True)


async def _short_words(
    lm: Any, prompt: str, particles: int, tokens: int, pinned: bool = False
) -> dict[str, Any]:
    import numpy as np
    from llamppl import CachedCausalLM, LMContext, Model, smc_standard

    llm = CachedCausalLM(lm)
    if pinned:
        llm.cache_kv(llm.tokenizer.encode(prompt))
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
            self.context = LMContext(llm, prompt)
            self.left = left

        async def step(self) -> None:
            letters = len(str(self.context).split(" ")[-1])
            await self.observe(self.context.mask_dist(short[max(0, 5 - letters)]), True)
            await self.sample(self.context.next_token())
            self.left -= 1
            if self.left == 0:
                self.finish()

    done = await smc_standard(ShortWords(tokens), particles, ess_threshold=0.5)
    weights = [float(particle.weight) for particle in done]
    log_z = float(np.logaddexp.reduce(weights)) - float(np.log(particles))
    texts = [str(particle.context) for particle in done]
    return {"log_z": log_z, "weights": weights, "texts": texts, "n": particles * tokens}


PROGRAMS: dict[str, Callable[[Any, int, bool], Awaitable[dict[str, Any]]]] = {
    "genlm-control": control,
    "genlm-bytes": bytes_beam,
    "llamppl": llamppl,
    "genlm-control, JSON": control_json,
    "genlm-bytes, a paragraph": bytes_greedy,
    "llamppl, a paragraph": llamppl_article,
}

#: The programs of the quick run: one of each library.
SMALL = ["genlm-control", "genlm-bytes", "llamppl"]


def run(name: str, lm: Any, seed: int, quick: bool) -> dict[str, Any]:
    """Run one program, starting with empty caches. Importing its library is not timed."""
    importlib.import_module(name.partition(",")[0].replace("-", "."))
    lm.clear_cache()
    lm.clear_kv_cache()
    seed_all(seed)
    gc.collect()  # garbage of the previous run must not be collected in this one
    wall, cpu = time.perf_counter(), time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        answers = asyncio.run(_awaited(PROGRAMS[name](lm, seed, quick)))
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return {"program": name, "seed": seed, **answers, **seconds}


async def _awaited(answers: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=SMALL)
    options = parser.parse_args()
    lm = load(str(options.model))
    for name in options.programs:
        for seed in range(options.seeds):
            print(json.dumps(run(name, lm, seed, options.quick)), flush=True)


if __name__ == "__main__":
    main()
