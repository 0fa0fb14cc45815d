"""Whole programs: sequential Monte Carlo, importance sampling, and those of three libraries

*Sequential Monte Carlo*: 64 particles of 50 tokens, each of whose tokens must match the regular
expression `[a-z ,.]*` of bytes; particles are resampled when their effective number falls below
half. *Importance sampling*: 256 continuations of 8 tokens, drawn from the model at temperature 1.3
and weighed by the model itself. The code is the same on both sides and asks as the library's users
do, one coroutine for each particle. *genlm-control*, *genlm-bytes* and *llamppl* are programs of
these libraries, which were written for genlm-backend, two of each: behind a few words, and behind
a prompt of 100 to 200 tokens. See `benchmarks/clients.py`. Their time is CPU time; imports, loading
and a first short run are not counted. *Without its Python* is what remains when the library's own
time is taken off, which is that of a second run that gets the rows of the first one at no cost. The
floor is the forward passes alone: batches of the same contexts in raw transformers, each on a
key/value cache that is there already.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from typing import Any

from benchmarks import clients, parts
from benchmarks.protocol import Bench, main

PLUGIN = "clients"
PEER = ["genlm-backend==0.3.1", "genlm-bytes==0.2.0", "genlm-control==0.4.1", "llamppl==0.2.3"]

PROMPT = "Once upon a time there was a"
#: The names of figures: the time of a client's own Python, and the time beyond that.
PYTHON = "{}: its Python"
WITHOUT_PYTHON = "{}: without its Python"

LANGUAGE = re.compile(rb"[a-z ,.]*")


def ours(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    with load_model_by_name(bench.model, backend="hf") as lm:
        measure(bench, lm, lm.clear_kv_cache, lm.clear_cache)
    measure_clients(bench)


def theirs(bench: Bench) -> None:
    import torch

    from genlm.backend.llm import AsyncTransformer

    options = {"torch_dtype": torch.float32, "device_map": "cpu"}
    lm = AsyncTransformer.from_name(bench.model, hf_opts=options, batch_size=256)
    measure(bench, lm, lm.clear_cache)
    measure_clients(bench)


def floor(bench: Bench) -> None:
    batches = parts.batches_of()
    lm = clients.load(bench.model, wrappers=[batches])
    for name in clients.PROGRAMS:
        batches.contexts.clear()
        clients.run(name, lm, seed=0, quick=bench.quick)
        forwards = parts.forwards_of(batches.contexts)
        seconds = [parts.cpu_of_forwards(lm.underlying_model, forwards) for _ in range(2)]
        bench.record(WITHOUT_PYTHON.format(name), seconds[1:], unit="s")


def measure(bench: Bench, lm: Any, *resets: Any) -> None:
    prompt = lm.tokenizer.encode(PROMPT)
    # Each round runs one program of each kind. With genlm-backend, which keeps no KV cache by
    # itself, a program takes minutes.
    particles, tokens, samples = (8, 5, 16) if bench.quick else (64, 50, 256)
    for case, program in (
        (f"sequential Monte Carlo, {particles} x {tokens}", smc(lm, prompt, particles, tokens)),
        (f"importance sampling, {samples} x 8", importance(lm, prompt, samples, 8)),
    ):
        for reset in resets:
            reset()
        drawn, seconds = asyncio.run(program)
        bench.record(case, drawn / seconds, unit="tokens/s")


def measure_clients(bench: Bench) -> None:
    lm = clients.load(bench.model)
    for name in clients.PROGRAMS:
        clients.run(name, lm, seed=1, quick=True)
        rows = parts.Rows(lm)
        with rows.recorded():
            done = clients.run(name, lm, seed=0, quick=bench.quick)
        with rows.played_back():
            again = clients.run(name, lm, seed=0, quick=bench.quick)
        assert again["texts"] == done["texts"]
        bench.record(name, done["cpu"], unit="s")
        bench.record(PYTHON.format(name), again["cpu"], unit="s")
        bench.record(WITHOUT_PYTHON.format(name), done["cpu"] - again["cpu"], unit="s")


async def smc(lm: Any, prompt: list[int], n: int, tokens: int) -> tuple[int, float]:
    """Returns how many tokens were drawn and in how many seconds."""
    import torch

    source = random.Random(0)
    words = [bytes(getattr(word, "byte_string", word)) for word in lm.byte_vocab]
    allowed = torch.tensor([i for i, word in enumerate(words) if word and LANGUAGE.fullmatch(word)])
    particles: list[list[int]] = [[] for _ in range(n)]
    weights = [0.0] * n

    async def extend(at: int, uniform: float) -> None:
        row = (await lm.next_token_logprobs(prompt + particles[at]))[allowed].double()
        mass = row.softmax(0).cumsum(0)
        drawn = min(int(torch.searchsorted(mass, uniform)), len(allowed) - 1)
        weights[at] += float(row.logsumexp(0))
        particles[at] = [*particles[at], int(allowed[drawn])]

    began = time.perf_counter()
    for _ in range(tokens):
        await asyncio.gather(*(extend(at, source.random()) for at in range(n)))
        most = max(weights)
        shares = [math.exp(weight - most) for weight in weights]
        if sum(shares) ** 2 < n / 2 * sum(share * share for share in shares):
            particles = source.choices(particles, shares, k=n)
            weights = [0.0] * n
    return n * tokens, time.perf_counter() - began


async def importance(lm: Any, prompt: list[int], n: int, tokens: int) -> tuple[int, float]:
    """Returns how many tokens were drawn and in how many seconds."""
    import torch

    source = random.Random(0)

    async def one(uniforms: list[float]) -> float:
        ids, weight = list(prompt), 0.0
        for uniform in uniforms:
            row = (await lm.next_token_logprobs(ids)).double()
            proposal = (row / 1.3).log_softmax(0)
            drawn = min(int(torch.searchsorted(proposal.exp().cumsum(0), uniform)), len(row) - 1)
            weight += float(row[drawn] - proposal[drawn])
            ids.append(drawn)
        return weight

    began = time.perf_counter()
    await asyncio.gather(*(one([source.random() for _ in range(tokens)]) for _ in range(n)))
    return n * tokens, time.perf_counter() - began


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
