"""A failing request fails alone, with its reason; the next one succeeds, and no process gets a
signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from genlm.core import EngineDeadError, EngineError, Query
from genlm.core.types import SampleRequest, SamplingParams

UNKNOWN_TOKEN = 10**6  # makes the forward pass raise; the core would have rejected it


@pytest.fixture(scope="module")
def hooks(load_tiny):
    return load_tiny(max_total_tokens=600, max_running_requests=16)


@pytest.fixture(autouse=True)
def cold(hooks):
    hooks.genlm_clear_kv_cache()


def test_too_long_prompt_fails_alone(hooks, contexts, reference):
    """SGLang runs another request in its place, whose row must not be taken for an answer."""
    (long,) = contexts(1, hooks.max_context + 1, hooks.max_context + 1)
    (short,) = contexts(1, 10, 10)
    refused, row = hooks.ask(Query(long), Query(short))
    with pytest.raises(EngineError, match=rf"{len(long)} tokens"):
        raise refused
    torch.testing.assert_close(row, reference([short])[0], atol=1e-4, rtol=0)


def test_a_failing_step_drops_what_is_in_flight(hooks, contexts, reference):
    asked = contexts(30, 10, 20)  # 16 run at once, and the others wait
    with pytest.raises(IndexError):
        hooks.step(*map(Query, [(UNKNOWN_TOKEN,), *asked]))
    torch.testing.assert_close(hooks.rows(asked), reference(asked), atol=1e-4, rtol=0)


def test_failing_steps_leave_the_pool_whole(hooks, contexts):
    for seed in range(20):
        with pytest.raises(IndexError):
            hooks.step(
                *(Query((*context, UNKNOWN_TOKEN)) for context in contexts(4, 80, 100, seed))
            )
    assert hooks.tokens(contexts(1, 400, 400)) == 400


def test_a_prefix_is_pinned_again_after_a_failing_step(hooks, contexts):
    (prefix,) = contexts(1, 100, 100)
    hooks.genlm_cache_prefix(Query(prefix))
    with pytest.raises(IndexError):
        hooks.step(Query((UNKNOWN_TOKEN,)))
    hooks.genlm_cache_prefix(Query(prefix))  # as the core requests
    hooks.rows(contexts(20, 80, 100, seed=1))
    assert hooks.tokens([(*prefix, 1)]) == 1


def test_full_pool_rejects_only_requests_that_do_not_fit(hooks, contexts, reference):
    (prefix,) = contexts(1, 400, 400)
    hooks.genlm_cache_prefix(Query(prefix))
    (long,), (short,) = contexts(1, 300, 300, seed=1), contexts(1, 50, 50, seed=2)
    refused, row = hooks.ask(Query(long), Query(short))
    with pytest.raises(
        EngineError,
        match=r"300 in all, do not .* pool of 600 tokens, .* hold 400; call clear_kv_cache",
    ):
        raise refused
    torch.testing.assert_close(row, reference([short])[0], atol=1e-4, rtol=0)
    with pytest.raises(EngineError, match=r"300 in all, do not"):
        hooks.genlm_cache_prefix(Query(long))
    assert hooks.scheduler.locked_tokens == 400
    hooks.genlm_clear_kv_cache()
    torch.testing.assert_close(hooks.rows([long]), reference([long]), atol=1e-4, rtol=0)


def test_a_scheduler_that_drops_nothing_is_declared_dead(hooks, monkeypatch):
    def refuse(**options):
        return False

    with monkeypatch.context() as patch:
        patch.setattr(hooks.scheduler._scheduler, "flush_cache", refuse)
        with pytest.raises(EngineDeadError, match=r"cannot drop its requests .* reload the model"):
            hooks.step(Query((UNKNOWN_TOKEN,)))


#: A model whose steps fail, and which is not closed.
LIFE = textwrap.dedent(
    """
    import signal, sys
    from genlm.core import EngineError
    from genlm.sgl import AsyncSGLTransformer

    def handlers():
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    before = handlers()
    lm = AsyncSGLTransformer.from_name(sys.argv[1])
    model = lm.underlying_model
    forward = model.forward

    def fail_on_13(ids, *args, **kwargs):
        if 13 in ids.tolist():
            raise IndexError("no such token")
        return forward(ids, *args, **kwargs)

    model.forward = fail_on_13
    for attempt in (1, 2):
        try:
            lm.next_token_logprobs_sync([13])
        except EngineError:
            print("failed")
    print("answered", len(lm.next_token_logprobs_sync([1, 2, 3])))
    print("handlers kept" if handlers() == before else "handlers changed")
    """
)

SAID = ("failed", "handlers", "answered")


def test_no_process_is_signalled(tiny):
    """SGLang would signal the parent of the process with the engine."""
    received: list[int] = []
    original = signal.signal(signal.SIGQUIT, lambda number, frame: received.append(number))
    try:
        done = subprocess.run(
            [sys.executable, "-c", LIFE, tiny], capture_output=True, text=True, timeout=300
        )
    finally:
        signal.signal(signal.SIGQUIT, original)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.startswith(SAID)] == [
        "failed",
        "failed",
        "answered 257",
        "handlers kept",
    ]
    assert received == []


def test_rows_of_a_step_that_failed_in_its_sampler_are_not_taken_for_later_ones(
    hooks, contexts, reference, monkeypatch
):
    """They were read before it."""
    first, second = contexts(2, 10, 10)
    sampler = hooks.scheduler._scheduler.tp_worker.model_runner.sampler

    def fail(*_, **__):
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "forward", fail)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            hooks.ask(Query(first), SampleRequest(Query(first), SamplingParams(max_tokens=2)))
    torch.testing.assert_close(hooks.rows([second]), reference([second]), atol=1e-4, rtol=0)
