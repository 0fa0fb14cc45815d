"""AsyncVirtualLM: what users hold in their hands."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from genlm.core import EngineError, UnsupportedError
from genlm.vllm import AsyncVirtualLM

PROMPT = list(range(3000, 3040))


@pytest.fixture(scope="module")
def small_opts(small_opts):
    """With room for as many tokens of the real model."""
    return small_opts | {"kv_cache_memory_bytes": 40 << 20}


@pytest.fixture(scope="module")
def lm(real_model, small_opts):
    with AsyncVirtualLM.from_name(real_model, engine_opts=small_opts, cache_size=50) as lm:
        yield lm


def test_particles_share_batches_and_one_step_costs_one_call(lm):
    async def main():
        contexts = [[*PROMPT, token] for token in range(8)]
        rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
        before = lm.stats
        longer = [[*ids, int(row.argmax())] for ids, row in zip(contexts, rows, strict=True)]
        await asyncio.gather(*map(lm.next_token_logprobs, longer))
        return lm.stats.batches - before.batches

    assert asyncio.run(main()) == 1


def test_the_underlying_model_is_vllms_module(lm):
    assert isinstance(lm.underlying_model, torch.nn.Module)


def test_a_request_that_breaks_the_engine_fails_alone(lm):
    """The model raises whenever a certain token is computed: only the context that has it fails."""
    poison = 1234

    def fail(module, args, kwargs):
        if (kwargs["input_ids"] == poison).any():
            raise RuntimeError("poisoned")

    hook = lm.underlying_model.register_forward_pre_hook(fail, with_kwargs=True)
    good = [[*PROMPT, 100 + i] for i in range(3)]

    async def main():
        asked = [*good, [*PROMPT, poison]]
        return await asyncio.gather(*map(lm.next_token_logprobs, asked), return_exceptions=True)

    try:
        *rows, error = asyncio.run(main())
    finally:
        hook.remove()
    assert isinstance(error, EngineError)
    assert "poisoned" in str(error)
    for ids, row in zip(good, rows, strict=True):
        torch.testing.assert_close(row, lm.next_token_logprobs_uncached(ids), atol=5e-4, rtol=0)
    assert lm.next_token_logprobs_sync([*PROMPT, poison]).isfinite().all()


def test_the_models_own_end_of_sequence_does_not_stop_unless_listed(lm):
    asked = lm.tokenizer.encode("<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n")
    drawn = lm.sample_sync(asked, 60, [], temperature=0.0)
    assert len(drawn) == 60
    assert lm.tokenizer.eos_token_id in drawn


def test_particles_beside_seeded_draws_fail_no_step(lm):
    """On a CPU vLLM fails on a seeded prompt that it computes in chunks; it computes what live
    sessions append before that prompt."""

    async def particle(dice):
        ids = [*PROMPT, dice.randrange(1000)]
        for _ in range(25):
            await lm.next_token_logprobs(ids)
            ids += dice.choices(range(1000), k=dice.randrange(1, 8))

    async def drawer(seed):
        dice = random.Random(seed)
        prompts = [dice.choices(range(1000), k=50) for _ in range(15)]
        return [await lm.sample(prompt, 2, [], seed=seed) for prompt in prompts]

    async def main():
        particles = [particle(random.Random(seed)) for seed in range(6)]
        *drawn, _ = await asyncio.gather(drawer(1), drawer(2), asyncio.gather(*particles))
        return drawn == [await drawer(seed) for seed in (1, 2)]

    before = lm.stats.failed_calls
    assert asyncio.run(main()), "a seed draws what it draws alone"
    assert lm.stats.failed_calls == before


def test_the_end_of_the_context_is_the_end_of_a_draw(lm):
    ids = [5] * 254
    assert len(asyncio.run(lm.sample(ids, 2, [], temperature=0.0))) == 2
    with pytest.raises(ValueError, match="255"):
        asyncio.run(lm.sample(ids, 3, []))


def test_two_models_never_compute_at_once(tiny_path, small_opts):
    """vLLM keeps the forward pass under way in a global: rows would be wrong, or the process die.
    Where both could, they meet here."""
    meeting, met = threading.Barrier(2), []

    def meet(*args):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(2)
            met.append(args)

    def ask(lm):
        return [lm.next_token_logprobs_sync([5, token]) for token in (6, 7, 8)]

    with (
        AsyncVirtualLM.from_name(tiny_path, small_opts) as one,
        AsyncVirtualLM.from_name(tiny_path, small_opts) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        expected = ask(one)
        for lm in (one, other):
            lm.clear_cache()
            lm.underlying_model.register_forward_pre_hook(meet)
        for rows in threads.map(ask, (one, other)):
            torch.testing.assert_close(rows, expected, atol=5e-4, rtol=0)
    assert met == []


def test_what_is_loaded_already_cannot_be_wrapped() -> None:
    with pytest.raises(UnsupportedError, match=r"AsyncVirtualLM\.from_name\(name\)"):
        AsyncVirtualLM(object(), object())
