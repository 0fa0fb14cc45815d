"""Sequential Monte Carlo over a language model: continue a prompt without ever writing some
letters.

Every particle is a coroutine that asks for one token at a time. The library turns their requests
into batches, and draws the tokens of a batch together, where the rows of log-probabilities are. The
target is the model's distribution over continuations,
restricted to plain text without those letters. Its normalising constant is the probability that a
continuation drawn from the model is such text.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import time
from collections import Counter
from collections.abc import Sequence

import torch
from attrs import define, evolve

from genlm.core import AsyncLM, Token, load_model_by_name, resampling
from genlm.core.reductions import draw_among
from genlm.core.together import Then

MODELS = {"hf": "HuggingFaceTB/SmolLM2-135M-Instruct"}


@define
class Particle:
    """A continuation so far, with the log of its importance weight."""

    token_ids: tuple[int, ...] = ()
    log_weight: float = 0.0
    finished: bool = False


async def smc(
    lm: AsyncLM,
    prompt: list[int],
    allowed: torch.Tensor,
    n: int,
    max_tokens: int,
    rng: random.Random,
) -> tuple[list[Particle], float]:
    """Run ``n`` particles; return them and the estimate of the log normalising constant."""
    particles = [Particle() for _ in range(n)]
    log_constant = 0.0
    draw = draw_among(allowed)
    for _ in range(max_tokens):
        # Random numbers are drawn before waiting, so that the result does not depend on the order
        # of the answers.
        await asyncio.gather(
            *(extend(p, lm, prompt, draw(rng.random())) for p in particles if not p.finished)
        )
        if effective_size(particles) < n / 2:
            log_constant += log_mean_weight(particles)
            particles = resample(particles, rng.random())
    return particles, log_constant + log_mean_weight(particles)


async def extend(
    particle: Particle, lm: AsyncLM, prompt: list[int], draw: Then[tuple[int, float]]
) -> None:
    """Draw the next token from the allowed ones, and multiply the weight by their mass."""
    context = [*prompt, *particle.token_ids]
    token_id, log_mass = await lm.next_token_logprobs(context, then=draw)
    particle.log_weight += log_mass
    particle.finished = token_id == lm.tokenizer.eos_token_id
    if not particle.finished:
        particle.token_ids += (token_id,)


def resample(particles: list[Particle], uniform: float) -> list[Particle]:
    """Systematic resampling: a particle of normalised weight ``w`` is copied ``n * w`` times,
    rounded up or down."""
    chosen = resampling.systematic(log_weights(particles), uniform)
    return [evolve(particles[i], log_weight=0.0) for i in chosen]


def log_weights(particles: list[Particle]) -> list[float]:
    return [particle.log_weight for particle in particles]


def weights(particles: list[Particle]) -> torch.Tensor:
    return torch.tensor(log_weights(particles), dtype=torch.float64).softmax(0)


def log_mean_weight(particles: list[Particle]) -> float:
    return resampling.log_mean_weight(log_weights(particles))


def effective_size(particles: list[Particle]) -> float:
    return resampling.effective_sample_size(log_weights(particles))


def allowed_tokens(lm: AsyncLM, avoid: str) -> torch.Tensor:
    """The ids of the tokens of plain text without the letters to avoid, and of the end of the
    sequence."""
    text = string.ascii_letters + string.digits + " .,;:!?'-"
    alphabet = set(text.encode()) - set((avoid.lower() + avoid.upper()).encode())
    plain = [
        token.token_id
        for token in lm.byte_vocab
        if token and not token.is_special and alphabet.issuperset(token)
    ]
    return torch.tensor([*plain, lm.tokenizer.eos_token_id])


def report(lm: AsyncLM, particles: list[Particle], log_constant: float, seconds: float) -> None:
    report_particles(lm.byte_vocab, particles, log_constant)
    did = lm.stats
    print(
        f"{did.requests} requests: {did.rows} rows in {did.batches} batches, the largest of "
        f"{did.largest_batch};"
    )
    print(
        f"  {did.cache_hits} answered from the cache, {did.dedup_hits} shared with an equal request"
    )
    print(f"{did.requests / seconds:.0f} tokens per second")


def report_particles(
    byte_vocab: Sequence[Token], particles: list[Particle], log_constant: float
) -> None:
    strings: Counter[str] = Counter()
    for particle, weight in zip(particles, weights(particles).tolist(), strict=True):
        written = b"".join(byte_vocab[i].byte_string for i in particle.token_ids)
        strings[written.decode()] += weight
    for text, weight in strings.most_common(10):
        print(f"{weight:7.3f}  {text!r}")
    size = effective_size(particles)
    print(
        f"log normalising constant {log_constant:.3f}, effective sample size {size:.1f} of "
        f"{len(particles)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--backend", default="hf", help="hf, mock, or any other that `genlm backends` lists"
    )
    parser.add_argument("--model", help="a folder or a hub name")
    parser.add_argument("--prompt", default="The best thing about a walk in the hills is")
    parser.add_argument("--avoid", default="e", metavar="LETTERS")
    parser.add_argument("--particles", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = options.model or MODELS.get(options.backend, options.backend)
    with load_model_by_name(model, backend=options.backend) as lm:
        prompt = lm.tokenizer.encode(options.prompt)
        allowed = allowed_tokens(lm, options.avoid)
        rng = random.Random(options.seed)
        start = time.perf_counter()
        result = asyncio.run(smc(lm, prompt, allowed, options.particles, options.max_tokens, rng))
        report(lm, *result, time.perf_counter() - start)


if __name__ == "__main__":
    main()
