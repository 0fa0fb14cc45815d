"""The mathematics of examples/smc.py, against sums that are small enough to be exact."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from genlm.core import AsyncLM

pytestmark = pytest.mark.any_version

PROMPT = [7, 8, 9]
MAX_TOKENS = 3


@pytest.fixture(scope="module")
def program(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("smc")


@pytest.fixture(scope="module")
def allowed(lm: AsyncLM) -> torch.Tensor:
    """Five tokens. With so few, the weights differ much, and nearly every run resamples."""
    return torch.tensor([*range(0, 256, 64), lm.tokenizer.eos_token_id])


def exact_constant(
    lm: AsyncLM, allowed: torch.Tensor, context: list[int], max_tokens: int
) -> float:
    """The probability that the model draws allowed tokens only, until it ends or has drawn
    ``max_tokens``."""
    if max_tokens == 0:
        return 1.0
    row = lm.next_token_logprobs_sync(context).double().exp()
    end = lm.tokenizer.eos_token_id
    onward = (
        1.0 if token == end else exact_constant(lm, allowed, [*context, token], max_tokens - 1)
        for token in allowed.tolist()
    )
    return sum(
        row[token].item() * rest for token, rest in zip(allowed.tolist(), onward, strict=True)
    )


def run(program: ModuleType, lm: AsyncLM, allowed: torch.Tensor, seed: int) -> tuple[list, float]:
    return asyncio.run(program.smc(lm, PROMPT, allowed, 20, MAX_TOKENS, random.Random(seed)))


@pytest.fixture(scope="module")
def runs(program: ModuleType, lm: AsyncLM, allowed: torch.Tensor) -> list[tuple[list, float]]:
    return [run(program, lm, allowed, seed) for seed in range(400)]


def test_the_constant_is_estimated_without_bias(
    runs: list[tuple[list, float]], lm: AsyncLM, allowed: torch.Tensor
) -> None:
    exact = exact_constant(lm, allowed, PROMPT, MAX_TOKENS)
    estimates = [math.exp(log_constant) / exact for _, log_constant in runs]
    error = statistics.stdev(estimates) / math.sqrt(len(estimates))
    assert 0 < error < 0.05
    assert statistics.mean(estimates) == pytest.approx(1, abs=4 * error)


def test_weighted_particles_follow_the_restricted_distribution(
    runs: list[tuple[list, float]], program: ModuleType, lm: AsyncLM, allowed: torch.Tensor
) -> None:
    """The probability of stopping at once, by the particles of many runs, each weighed by its
    constant."""
    exact = exact_constant(lm, allowed, PROMPT, MAX_TOKENS)
    ends = (
        lm.next_token_logprobs_sync(PROMPT)[lm.tokenizer.eos_token_id].double().exp().item() / exact
    )
    estimates = []
    for particles, log_constant in runs:
        mass = sum(
            weight
            for particle, weight in zip(particles, program.weights(particles).tolist(), strict=True)
            if not particle.token_ids
        )
        estimates.append(mass * math.exp(log_constant) / exact)
    error = statistics.stdev(estimates) / math.sqrt(len(estimates))
    assert statistics.mean(estimates) == pytest.approx(ends, abs=4 * error)


def test_a_seed_fixes_the_result(program: ModuleType, lm: AsyncLM, allowed: torch.Tensor) -> None:
    first = run(program, lm, allowed, seed=3)
    lm.clear_cache()
    assert run(program, lm, allowed, seed=3) == first
    assert run(program, lm, allowed, seed=4) != first


def test_resampling_keeps_particles_in_proportion(program: ModuleType) -> None:
    kept = [program.Particle((i,), math.log(weight)) for i, weight in enumerate([1, 4, 1, 2])]
    after = program.resample(kept, uniform=0.5)
    assert [p.token_ids for p in after].count((1,)) == 2
    assert {p.log_weight for p in after} == {0.0}


def test_only_plain_text_without_the_letters_is_allowed(program: ModuleType, lm: AsyncLM) -> None:
    tokens = {lm.byte_vocab[i].byte_string for i in program.allowed_tokens(lm, avoid="e").tolist()}
    assert {b"a", b"Z", b" ", b"<|eos|>"} <= tokens
    assert not {b"e", b"E", b"\n", b"\xff", b"<|bos|>"} & tokens


def test_example_runs_on_the_mock(run_on_the_mock: Callable[..., str]) -> None:
    printed = run_on_the_mock("smc", "--particles", "8", "--max-tokens", "4")
    assert "log normalising constant" in printed
