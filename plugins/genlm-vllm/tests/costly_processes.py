"""Workers in processes of their own: tensor parallelism, and the engine core in a process of its
own.

Takes minutes, most of them for starting processes; collected only when it is named.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from genlm.core import AsyncLM, EngineDeadError, EngineError, Query
from genlm.vllm import AsyncVirtualLM
from genlm.vllm.internals import EngineCore
from tests.adapter_outcomes import reference_rows

from .driven import SMALL, random_program, text

PROMPT = list(range(3000, 3040))
ATOL = 5e-4


@pytest.fixture(scope="module")
def expected(padded_path):
    """The rows of transformers after every token of the prompt and one more."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(padded_path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([[*PROMPT, 7]])).logits[0, :, :-64].log_softmax(-1)


def check(lm: AsyncLM, expected: torch.Tensor) -> None:
    for ids, row in zip((PROMPT, [*PROMPT, 7]), expected[-2:], strict=True):
        torch.testing.assert_close(lm.next_token_logprobs_sync(ids), row, atol=ATOL, rtol=0)
        torch.testing.assert_close(lm.next_token_logprobs_uncached(ids), row, atol=ATOL, rtol=0)
    batch = lm.batch_next_token_logprobs_sync([[*PROMPT, 7], PROMPT[:30], PROMPT])
    torch.testing.assert_close(batch[[2, 0]], expected[-2:], atol=ATOL, rtol=0)
    scores = asyncio.run(lm.sequence_logprobs(PROMPT[:10], PROMPT[10:]))
    assert lm.stats.scores == 1, "vLLM's own"
    entries = expected[9:39].gather(1, torch.tensor(PROMPT[10:])[:, None])[:, 0]
    torch.testing.assert_close(scores, entries, atol=ATOL, rtol=0)


def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The blocks that this process will make workers copy for forks."""
    from vllm.v1.core.sched.scheduler import Scheduler

    usual, copied = Scheduler.schedule, []

    def schedule(self, *given, **options):
        output = usual(self, *given, **options)
        copied.extend(output.kv_cache_block_copies or [])
        return output

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    return copied


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages that workers have sent for rows."""
    usual, replies = EngineCore.call_workers, []

    def call_workers(self, method, *args):
        results = usual(self, method, *args)
        if method == "genlm_take_rows":
            replies.extend(reply for reply in results if reply is not None)
        return results

    monkeypatch.setattr(EngineCore, "call_workers", call_workers)
    return replies


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """For each message to workers about extended sessions, the tokens of each session."""
    usual, messages = EngineCore.call_workers, []

    def call_workers(self, method, *args):
        if method == "genlm_append_tokens":
            messages.append([token_ids for _, _, token_ids in args[0]])
        return usual(self, method, *args)

    monkeypatch.setattr(EngineCore, "call_workers", call_workers)
    return messages


def dies_clearly(lm: AsyncLM, victim: int) -> None:
    """Kill one of the engine's processes: callers get an error, and nothing hangs."""
    os.kill(victim, signal.SIGKILL)
    for ids in ([1, 2], [3, 4]):
        with pytest.raises(EngineDeadError):
            lm.next_token_logprobs_sync(ids)


def test_two_tensor_parallel_workers_give_right_rows(
    padded_path, expected, sent, told, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    before = {child.pid for child in multiprocessing.active_children()}
    copied = copies(monkeypatch)
    with AsyncVirtualLM.from_name(
        padded_path, engine_opts=SMALL | {"tensor_parallel_size": 2}
    ) as lm:
        workers = [
            child.pid for child in multiprocessing.active_children() if child.pid not in before
        ]
        assert len(workers) == 2
        told.clear()  # of the row that was compared at load
        check(lm, expected)
        assert copied, "PROMPT[:30] takes over what its live continuation has computed"
        assert told == [[[7]]], "only the extension of PROMPT, which each worker gets at once"
        assert {*map(type, sent)} == {int}, "rows go through shared memory"
        dies_clearly(lm, workers[1])
    assert not shared_memory()


def test_sessions_of_a_worker_process_stay_in_the_batch(load_briefly, told):
    with capture_logs() as logs:
        engine = load_briefly(distributed_executor_backend="mp")
    assert "vllm.sessions_pause" not in {line["event"] for line in logs}
    known = [Query(text(seed, 12)) for seed in range(4)]
    engine.ask(*known)
    told.clear()
    longer = [query.extended((7, 8)[: 1 + at % 2]) for at, query in enumerate(known)]
    rows = dict(zip(longer, engine.ask(*longer), strict=True))
    assert told == [[[7], [7, 8], [7], [7, 8]]]
    engine.assert_cold_rows(rows)
    random_program(engine, random.Random(3)).run(20)


def test_engine_core_in_another_process_gives_right_rows(padded_path, expected, sent, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with AsyncVirtualLM.from_name(padded_path, engine_opts=SMALL) as lm:
        (core,) = [
            child.pid
            for child in psutil.Process().children()
            if "EngineCore" in " ".join(child.cmdline())
        ]
        check(lm, expected)
        assert {*map(type, sent)} == {int}, "rows go through shared memory"
        dies_clearly(lm, core)
    assert not shared_memory()


def test_rows_are_sent_where_no_memory_can_be_shared(padded_path, expected, sent, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delattr(os, "memfd_create")
    with AsyncVirtualLM.from_name(padded_path, engine_opts=SMALL) as lm:
        check(lm, expected)
    assert {*map(type, sent)} == {bytes}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_weights_that_another_process_leaves_out_are_named(make_tiny, monkeypatch, method):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    folder = make_tiny("Cohere", head_dim=32, tie_word_embeddings=False)
    with pytest.raises(EngineError, match=r"has lm_head\.weight \(1 .*of cohere; .*backend='hf'"):
        AsyncVirtualLM.from_name(folder, engine_opts=SMALL)


def test_nan_in_the_cache_of_another_process_reaches_no_other_context(make_tiny, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    folder, bad = make_tiny("Llama", vocab_size=256), 99
    weights = load_file(f"{folder}/model.safetensors")
    weights["model.embed_tokens.weight"][bad] = torch.inf
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    prompt, others = [*range(1, 71)], [[*range(100, 103 + at), *range(60)] for at in range(8)]
    expected = reference_rows(folder, None, [prompt, *others])
    with AsyncVirtualLM.from_name(folder, engine_opts=SMALL) as lm:
        spoilt = [*prompt, bad, *range(1, 40)]

        async def ask():
            asked = map(lm.next_token_logprobs, (prompt, spoilt, *others))
            drawn = lm.sample([*prompt, bad], 2, [])
            return await asyncio.gather(*asked, drawn, return_exceptions=True)

        for _ in range(2):
            row, error, *rows, no_draw = asyncio.run(ask())
            assert "row is NaN" in str(error)
            assert "NaN in torch.float32 in a draw" in str(no_draw)
            torch.testing.assert_close(
                torch.stack([row, *rows]), torch.stack(expected), atol=ATOL, rtol=0
            )
            lm.clear_cache()


def shared_memory() -> list[str]:
    """The shared memory of rows that this process holds."""
    return [file.path for file in psutil.Process().memory_maps() if "genlm-rows" in file.path]


def test_sessions_are_released_if_a_separate_core_stands_still(tiny_path, monkeypatch):
    """The engine's process sends no messages then, so the steps are those of waiting for it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    less_than_they_take = lambda groups, block_size: lambda length: 1  # noqa: E731
    monkeypatch.setattr("genlm.vllm.internals.footprint_of", less_than_they_take)
    monkeypatch.setattr("genlm.vllm.internals.LIVENESS_SECONDS", 0.1)
    lm = AsyncVirtualLM.from_name(tiny_path, engine_opts=SMALL, cache_size=0)
    with lm, capture_logs() as logs:
        for first in range(12):  # about 100 tokens each; the cache holds 864
            row = lm.next_token_logprobs_sync([first, *range(100)])
            assert float(row.logsumexp(0)) == pytest.approx(0, abs=1e-3)
    assert "vllm.stood_still" in {line["event"] for line in logs}


@pytest.mark.parametrize("workers", [1, 2])
def test_batch_with_and_without_an_adapter_has_right_rows(
    tiny_path, write_adapter, monkeypatch, workers
):
    """vLLM's mistake on a CPU is made in the workers."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("01"[:workers]))
    path = write_adapter("a", 1)
    options = {"enable_lora": True, "max_lora_rank": 8, "tensor_parallel_size": workers}
    with AsyncVirtualLM.from_name(tiny_path, engine_opts=SMALL | options) as lm:
        lm.add_new_lora(path, "a")

        async def together():
            names = (None, "a", None)
            asked = (lm.next_token_logprobs(PROMPT[i:], lora_name=n) for i, n in enumerate(names))
            return await asyncio.gather(*asked)

        rows = asyncio.run(together())
    for i, adapter in enumerate((None, path, None)):
        (expected,) = reference_rows(tiny_path, adapter, [PROMPT[i:]])
        torch.testing.assert_close(rows[i], expected, atol=ATOL, rtol=0)
