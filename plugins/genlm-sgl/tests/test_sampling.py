"""SGLang's own samples follow the distribution of its rows. Other samples are left to the core."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from sgl_torch_cpu import without_pinned_memory

from genlm.core import Adapter, EngineError, Query, SamplingParams
from genlm.core.types import SampleRequest

END = 256


@pytest.fixture(scope="module")
def folders(make_adapter):
    return [make_adapter(1, "q_proj v_proj"), make_adapter(2, "o_proj gate_proj up_proj")]


@pytest.fixture(scope="module")
def hooks(load_tiny, tiny_without_padding, folders):
    options = {"max_total_tokens": 600, "max_running_requests": 16, "enable_lora": True}
    with without_pinned_memory():
        yield load_tiny(tiny_without_padding, **options)


def ask(hooks, context, adapter=None):
    (row,) = hooks.ask(Query(tuple(context), adapter))
    return row


def draw_each(hooks, queries, params):
    drawn = hooks.ask(*map(SampleRequest, queries, params))
    for each in drawn:
        if isinstance(each, Exception):
            raise each
    return drawn


def draw(hooks, contexts, **params):
    return draw_each(hooks, map(Query, contexts), [SamplingParams(**params)] * len(contexts))


def assert_most_likely(hooks, query, drawn):
    for i, token in enumerate(drawn):
        row = ask(hooks, [*query.token_ids, *drawn[:i]], query.adapter)
        assert row[token] >= row.max() - 1e-4


def test_samples_of_several_adapters_share_a_batch(hooks, contexts, folders):
    adapters = [Adapter(path, path, version) for version, path in enumerate(folders, start=1)]
    for adapter in adapters:
        hooks.genlm_add_lora(adapter, hooks.genlm_read_lora(adapter))
    (context,) = contexts(1, 20, 20)
    queries = [Query(context, adapter) for adapter in (None, *adapters)]
    drawn = draw_each(hooks, queries, [SamplingParams(max_tokens=8, temperature=0.0)] * 3)
    assert len(set(map(tuple, drawn))) == 3
    for query, ids in zip(queries, drawn, strict=True):
        assert_most_likely(hooks, query, ids)
    for adapter in adapters:
        hooks.genlm_remove_lora(adapter)


def test_samples_of_several_kinds_share_a_batch(hooks, contexts):
    (context,) = contexts(1, 20, 20)
    best = int(ask(hooks, context).argmax())
    kinds = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=5, top_k=1 << 40),
        SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=frozenset({END, best})),
    ]
    greedy, free, stopped = draw_each(hooks, [Query(context)] * 3, kinds)
    assert (greedy, len(free), stopped) == ([best], 5, [])


@pytest.mark.parametrize(
    "cut", [{}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 0.5}]
)
def test_sample_frequencies_match_the_row(hooks, contexts, cut):
    torch.manual_seed(0)
    hooks.check_frequencies(Query(*contexts(1, 10, 10)), **cut)


def test_stop_tokens_end_a_sample_and_are_left_out(hooks, contexts):
    asked = contexts(40, 3, 20)
    stops = frozenset({END, *range(64)})
    drawn = draw(hooks, asked, max_tokens=12, stop_token_ids=stops)
    assert all(not stops & set(ids) for ids in drawn)
    assert len({len(ids) for ids in drawn}) > 2


def test_stop_token_at_the_token_limit_is_left_out(hooks, contexts):
    asked = contexts(8, 3, 20)
    first = draw(hooks, asked, max_tokens=1, temperature=0.0)
    stops = frozenset({END, *(token for (token,) in first)})
    assert draw(hooks, asked, max_tokens=1, temperature=0.0, stop_token_ids=stops) == [[]] * 8


def test_samples_beyond_the_pool_are_resumed(hooks, contexts):
    asked = contexts(40, 60, 80)
    drawn = draw(hooks, asked, max_tokens=60)
    assert [len(ids) for ids in drawn] == [60] * 40


def test_sample_too_long_for_the_pool_is_an_error(hooks, contexts, monkeypatch):
    (pinned,), (context,) = contexts(1, 400, 400), contexts(1, 100, 100, seed=1)
    hooks.genlm_cache_prefix(Query(pinned))
    with pytest.raises(
        EngineError,
        match=r"250 in all, do not fit .* pool of 600 tokens, .* hold 400; call clear_kv_cache",
    ):
        draw(hooks, [context], max_tokens=150)
    with monkeypatch.context() as patch:
        # SGLang reserves room for only this many tokens of a longer sample, and runs out in the
        # middle.
        patch.setattr("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS", 10)
        asked = SampleRequest(Query(context), SamplingParams(max_tokens=150, temperature=0.0))
        answers = hooks.step(asked)
        for one in range(250):  # other requests keep coming
            answers |= hooks.step(Query((one,)))
    said = r"half way: its pool of 600 tokens is full, .* ask for fewer max_tokens"
    assert re.search(said, str(answers[asked]))
    assert len(answers) == 251
    assert hooks.tokens([[*pinned, 1]]) == 1, "what was pinned stays"
    assert [len(ids) for ids in draw(hooks, [context], max_tokens=90)] == [90]
    hooks.genlm_clear_kv_cache()


def test_a_draw_that_fails_leaves_nothing_in_flight(hooks, contexts, monkeypatch):
    asked = contexts(4, 10, 20)
    before = [ask(hooks, context) for context in asked]
    forward, steps = hooks.model.forward, itertools.count()

    def fail_in_the_middle(*args, **kwargs):
        if next(steps) == 2:
            raise RuntimeError("out of order")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.model, "forward", fail_in_the_middle)
        with pytest.raises(RuntimeError, match="out of order"):
            draw(hooks, asked, max_tokens=5)
    for row, context in zip(before, asked, strict=True):
        torch.testing.assert_close(ask(hooks, context), row, atol=1e-4, rtol=0)
    assert [len(ids) for ids in draw(hooks, asked, max_tokens=5)] == [5] * 4


def test_samples_that_sglang_would_draw_otherwise_are_left_to_the_core(hooks, contexts):
    asked = contexts(2, 3, 20)
    assert draw(hooks, asked, max_tokens=2, seed=1) == [None] * 2
    assert draw(hooks, asked, max_tokens=2, top_k=5, top_p=0.5) == [None] * 2
    assert draw(hooks, asked, max_tokens=2, temperature=1e10) == [None] * 2
    assert draw(hooks, asked, max_tokens=2, stop_token_ids=frozenset({5})) == [None] * 2


def request(context, **params):
    return SampleRequest(Query(context), SamplingParams(**params))


def test_rows_and_draws_share_steps_and_the_rows_are_right(hooks, contexts):
    """The sampler overwrites the logits of a batch with samples, but the rows stay right."""
    asked = contexts(8, 10, 40)
    alone = [ask(hooks, context) for context in asked]
    hooks.genlm_clear_kv_cache()
    draws = [request(context, max_tokens=6, temperature=0.5) for context in asked]
    answers = hooks.ask(*map(Query, asked), *draws)
    for row, expected in zip(answers[:8], alone, strict=True):
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
        row += 1.0  # the row is the caller's own
    assert {len(ids) for ids in answers[8:]} == {6}


def test_rows_do_not_wait_for_a_long_draw(hooks, contexts):
    first, second, third = contexts(3, 10, 20)
    long, short, row = request(first, max_tokens=200), request(second, max_tokens=1), Query(third)
    hooks.step(long)
    for new_request in (row, short):
        answered = hooks.step(new_request)
        steps = 1
        while new_request not in answered:
            answered |= hooks.step()
            steps += 1
        assert steps <= 3
        assert long not in answered
    hooks.step(dropped=[long])


def test_a_dropped_draw_ends_and_its_room_is_free(hooks, contexts):
    hooks.genlm_clear_kv_cache()
    running, waiting, short = contexts(3, 200, 200)
    draws = [request(running, max_tokens=250), request(waiting, max_tokens=250)]
    hooks.step(*draws)  # the pool of 600 tokens can hold only one of them to its end
    assert hooks.step(dropped=draws) == {}
    hooks.genlm_clear_kv_cache()  # fails if SGLang still had a request
    assert hooks.tokens([short]) == 200
    kept = request(short, max_tokens=3)
    (drawn,) = hooks.ask(kept)
    assert len(drawn) == 3
