from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from genlm.core import Query, UnsupportedError
from genlm.core.options import CoreOptions
from genlm.core.runtime.loaded_engine import LoadedEngine


@pytest.fixture(scope="module")
def hooks(load_tiny):
    return load_tiny(max_running_requests=16)


@pytest.fixture(autouse=True)
def cold(hooks):
    hooks.genlm_clear_kv_cache()


def test_error_without_lora_says_how_to_load_it(hooks):
    loaded = LoadedEngine(hooks.engine, "sgl", (), CoreOptions())
    with pytest.raises(UnsupportedError, match=r"load it with .*'enable_lora': True"):
        loaded.require("genlm_add_lora", "LoRA")


def test_requests_beyond_the_pool_wait(hooks, contexts, reference):
    asked = contexts(100, 80, 119)
    assert sum(map(len, asked)) > 2 * hooks.scheduler.pool_tokens
    for _ in range(2):
        torch.testing.assert_close(hooks.rows(asked), reference(asked), atol=1e-4, rtol=0)


def test_a_longer_context_costs_its_new_tokens(hooks, contexts):
    (context,) = contexts(1, 40, 40)
    assert hooks.tokens([context]) == 40
    assert hooks.tokens([(*context, 7)]) == 1
    assert hooks.tokens([(*context, 7, 8, 9)]) == 2
    assert hooks.tokens([(*context, 7, 8, 9)]) == 1  # the last token is computed again, for its row
    hooks.genlm_clear_kv_cache()
    assert hooks.tokens([context]) == 40


def test_siblings_cost_a_token_each(hooks, contexts):
    (context,) = contexts(1, 40, 40)
    hooks.rows([context])
    assert hooks.tokens([(*context, token) for token in range(10)]) == 10


def test_a_cold_query_reads_nothing_kept(hooks, contexts):
    (context,) = contexts(1, 40, 40)
    counts = [hooks.tokens([context], cold=cold) for cold in (False, True, True, False)]
    assert counts == [40, 40, 40, 1]


def test_a_pinned_prefix_outlives_pressure(hooks, contexts):
    (prefix,) = contexts(1, 100, 100)
    assert hooks.genlm_cache_prefix(Query(prefix)) is True
    assert hooks.genlm_cache_prefix(Query(prefix)) is True
    hooks.rows(contexts(100, 80, 119, seed=1))
    assert hooks.tokens([(*prefix, 1)]) == 1
    hooks.genlm_clear_kv_cache()
    assert hooks.tokens([(*prefix, 1)]) == 101
    # The prefix is no longer pinned, and can be pinned again.
    hooks.genlm_cache_prefix(Query(prefix))
    hooks.rows(contexts(100, 80, 119, seed=1))
    assert hooks.tokens([(*prefix, 1)]) == 1


def test_rows_are_read_before_anything_can_change_them(hooks, contexts, reference, monkeypatch):
    from sglang.srt.managers.scheduler import Scheduler

    process = Scheduler.process_batch_result
    spoiled = []

    def spoil(scheduler, batch, result):
        result.logits_output.next_token_logits.fill_(float("nan"))
        spoiled.append(batch)
        process(scheduler, batch, result)

    asked = contexts(4, 10, 20)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "process_batch_result", spoil)
        rows = hooks.rows(asked)
    assert spoiled
    torch.testing.assert_close(rows, reference(asked), atol=1e-4, rtol=0)


def test_sglangs_stream_and_the_threads_stream_wait_for_each_other(hooks, contexts, monkeypatch):
    """On a CPU PyTorch's streams do nothing, but they are there."""
    ours, seen, forward = torch.cpu.current_stream(), [], hooks.model.forward

    def noted(*arguments, **options):
        seen.append(torch.cpu.current_stream())
        return forward(*arguments, **options)

    monkeypatch.setattr(
        torch.cpu.Stream, "wait_stream", lambda stream, other: seen.append((stream, other))
    )
    monkeypatch.setattr(hooks.model, "forward", noted)
    hooks.rows(contexts(1, 5, 5))
    before, its, after = seen[:3]
    assert its is not ours
    assert before == (its, ours)
    assert after == (ours, its)
    assert torch.cpu.current_stream() is ours
    seen.clear()
    hooks.genlm_clear_kv_cache()
    assert seen == [(its, ours), (ours, its)] * 2, "it is idle, then it is flushed"


@pytest.mark.skipif(Version(version("sglang")) < Version("0.5.18"), reason="needs Triton for pages")
def test_the_longest_context_fits_in_a_pool_of_pages(load_tiny, contexts, reference):
    hooks = load_tiny(page_size=64, max_total_tokens=512)
    asked = contexts(2, hooks.max_context, hooks.max_context)
    torch.testing.assert_close(hooks.rows(asked), reference(asked), atol=1e-4, rtol=0)
