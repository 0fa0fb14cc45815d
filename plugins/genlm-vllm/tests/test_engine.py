"""The hooks on a real vLLM, step by step."""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from genlm.core.errors import EngineError, UnsupportedError
from genlm.core.types import Query, SampleRequest, SamplingParams, ScoreRequest
from genlm.vllm.scoring import worth_scoring
from tests.adapter_outcomes import reference_rows

ATOL = 5e-4  # float32, on prompts computed in other chunks


@pytest.fixture(scope="module")
def engine(load_engine):
    return load_engine()


@pytest.fixture(autouse=True)
def _clean(engine):
    yield
    engine.genlm_clear_kv_cache()


def context(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000, 40000), k=length))


def test_rows_are_those_of_transformers(engine, tiny_path):
    contexts = [context(seed, length) for seed, length in enumerate([1, 7, 64, 65, 200])]
    rows = engine.ask(*map(Query, contexts))
    expected = reference_rows(tiny_path, None, contexts)
    torch.testing.assert_close(torch.stack(rows), torch.stack(expected), atol=ATOL, rtol=0)
    assert all(row.shape == (engine.vocab_size,) and row.dtype == torch.float32 for row in rows)


def test_extending_a_context_by_a_token_computes_one_token(engine):
    contexts = [context(seed, 50) for seed in range(4)]
    engine.ask(*map(Query, contexts))
    assert engine.computes(*((*ids, 77) for ids in contexts)) == [4]


def test_ragged_extensions_append_what_is_new(engine):
    contexts = [context(seed, 40 + seed) for seed in range(3)]
    engine.ask(*map(Query, contexts))
    longer = [ids + context(9, new) for ids, new in zip(contexts, [1, 5, 12], strict=True)]
    assert sum(engine.computes(*longer)) == 1 + 5 + 12


@pytest.mark.parametrize("length", [20, 50], ids=["in the first block", "beyond it"])
def test_a_cold_query_computes_everything(engine, length):
    query = Query(context(0, length))
    engine.ask(query)
    with engine.computed_tokens() as counts:
        engine.ask(Query((*query.token_ids, 5), cold=True))
    assert sum(counts) == length + 1


def test_newcomers_join_at_the_next_step(engine):
    """A long prompt takes several steps of 64 tokens; what is asked meanwhile does not wait for its
    end."""
    long, short = Query(context(0, 200)), Query(context(1, 5))
    assert engine.step(long) == {}
    seen, steps = list(engine.step(short)), 1
    while len(seen) < 2:
        seen += list(engine.step())
        steps += 1
    assert steps <= 3, "200 and 5 tokens fit four steps of 64, the first of which was made before"


def test_a_full_cache_and_more_requests_than_places(engine):
    """Forty contexts of about 100 tokens where the cache holds 864 tokens and a batch 16
    requests."""
    engine.computes(*(context(seed, 90 + seed % 20) for seed in range(40)))


# --- pinned prefixes ------------------------------------------------------------------------------


def test_a_pinned_prefix_survives_pressure_and_is_forgotten_when_all_is(engine):
    prefix = context(0, 96)
    assert engine.genlm_cache_prefix(Query(prefix)) is True
    engine.ask(*(Query(context(seed, 200)) for seed in range(1, 9)))
    assert sum(engine.computes((*prefix, 5), (*prefix, 6))) == 2
    engine.genlm_clear_kv_cache()
    assert sum(engine.computes((*prefix, 5))) == 97


def test_pins_that_would_fill_the_cache_are_refused(engine):
    for seed in range(2):
        engine.genlm_cache_prefix(Query(context(seed, 220)))
    with pytest.raises(EngineError, match="clear_kv_cache"):
        engine.genlm_cache_prefix(Query(context(2, 250)))
    assert engine.computes((*context(0, 220), 5)) == [1], "what was pinned before is still there"
    engine.computes(context(50, 250))


# --- failures -------------------------------------------------------------------------------------


@contextmanager
def failing_forward(engine, times: int = 1):
    """The model raises in the middle of its next forward passes."""
    left = [times]

    def fail(module, args):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the forward pass broke")

    hook = engine.model.model.layers[1].register_forward_pre_hook(fail)
    yield
    hook.remove()


def test_after_a_failed_step_every_answer_is_right(engine):
    """vLLM enters blocks in its prefix cache before it computes them: those of a failed step must
    not be found again."""
    live, fresh = context(0, 50), context(1, 60)
    engine.ask(Query(live))
    with failing_forward(engine), pytest.raises(RuntimeError, match="broke"):
        engine.step(Query((*live, 5)), Query(fresh))
    engine.computes((*live, 5), fresh)


def test_a_pinned_prefix_is_restored_after_a_failure(engine):
    prefix = context(0, 96)
    engine.genlm_cache_prefix(Query(prefix))
    with failing_forward(engine), pytest.raises(RuntimeError, match="broke"):
        engine.step(Query(context(1, 20)))
    engine.ask(Query(context(1, 20)))
    assert engine.computes((*prefix, 5)) == [1]


def test_a_pinned_prefix_that_cannot_be_restored_harms_nobody(engine):
    engine.genlm_cache_prefix(Query(context(0, 96)))
    with failing_forward(engine, times=2):
        with pytest.raises(RuntimeError, match="broke"):
            engine.step(Query(context(1, 20)))
        engine.computes(context(1, 20))


# --- sampling -------------------------------------------------------------------------------------


def test_seeded_draws_do_not_depend_on_the_batch(engine):
    queries = [Query(context(seed, 10)) for seed in range(4)]
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (3, 2**64 - 1, -1, 0)]
    together = engine.draw(queries, params)
    assert together == [engine.draw([q], [p])[0] for q, p in zip(queries, params, strict=True)]
    assert together != engine.draw(queries, [SamplingParams(max_tokens=6, seed=9)] * 4)


def test_unseeded_draws_differ(engine):
    draws = engine.draw([Query(context(0, 10))] * 4, [SamplingParams(max_tokens=8)] * 4)
    assert len({tuple(draw) for draw in draws}) > 1


@pytest.mark.parametrize(
    ("length", "params"),
    [
        (10, SamplingParams(max_tokens=3, temperature=0.001)),
        (10, SamplingParams(max_tokens=3, temperature=3.0)),
        (100, SamplingParams(max_tokens=3, seed=1)),
    ],
    ids=["temperature too low", "temperature too high", "seeded and chunked on CPU"],
)
def test_what_vllm_would_draw_wrongly_is_left_to_the_core(engine, length, params):
    assert engine.draw([Query(context(0, length))], [params]) == [None]


# --- scoring --------------------------------------------------------------------------------------


def test_scores_up_to_the_longest_context_in_chunks(engine):
    """Of two continuations in a batch; the last token of one is just beyond the longest context."""
    (ids, other), drawn = (context(seed, 100) for seed in (0, 1)), context(2, 156)
    scores = engine.score([Query(ids), Query(other)], [drawn, drawn[:-1]])
    assert [len(score) for score in scores] == [156, 155]
    for score, begun, at in (*((scores[0], ids, at) for at in (0, 78, 155)), (scores[1], other, 0)):
        (row,) = engine.ask(Query(begun + drawn[:at], cold=True))
        assert float(score[at]) == pytest.approx(float(row[drawn[at]]), abs=ATOL)


def test_scores_read_no_state_that_vllm_leaves_out_of_them(engine):
    """vLLM gives nothing for tokens whose key/value state it finds: here that of all of them, in a
    full block and in a live request's."""
    ids, drawn = context(0, 10), context(1, 40)
    engine.ask(Query(ids + drawn))
    (warm,) = engine.score([Query(ids)], [drawn])
    engine.genlm_clear_kv_cache()
    (cold_scores,) = engine.score([Query(ids)], [drawn])
    torch.testing.assert_close(warm, cold_scores, atol=ATOL, rtol=0)


def test_a_short_continuation_of_a_long_context_is_left_to_rows(engine):
    """They find the context's key/value state, which vLLM would compute anew."""
    assert engine.score([Query(context(0, 200))], [(5, 6)]) == [None]


@pytest.mark.parametrize(("mode", "worth"), [("raw_logprobs", True), ("raw_logits", False)])
def test_an_engine_told_to_give_logits_scores_by_rows(mode, worth):
    core = SimpleNamespace(block_size=32, logprobs_mode=mode)
    assert worth_scoring(ScoreRequest(Query((1, 2)), (3, 4, 5)), core) is worth


def test_after_a_failed_score_the_next_one_is_right(engine):
    ids, drawn = context(0, 20), context(1, 20)
    with failing_forward(engine), pytest.raises(RuntimeError, match="broke"):
        engine.score([Query(ids)], [drawn])
    (scores,) = engine.score([Query(ids)], [drawn])
    assert scores.shape == (20,)
    assert scores.isfinite().all()


# --- without live sessions, without prefix caching ------------------------------------------------


def test_without_live_sessions(load_briefly):
    engine = load_briefly(live_sessions=False, enable_prefix_caching=False)
    engine.ask(Query(context(0, 50)))
    assert sum(engine.computes((*context(0, 50), 5))) == 51
    with pytest.raises(UnsupportedError, match="prefix caching"):
        engine.genlm_cache_prefix(Query(context(0, 50)))


# --- all kinds together ---------------------------------------------------------------------------


def test_nobody_waits_for_a_long_draw(engine):
    long = SampleRequest(Query(context(0, 10)), SamplingParams(max_tokens=100))
    short = SampleRequest(Query(context(1, 10)), SamplingParams(max_tokens=1))
    score = ScoreRequest(Query(context(2, 3)), context(3, 4))
    row = Query(context(4, 12))
    engine.step(long)
    for request in (short, score, row):
        answered, steps = engine.step(request), 1
        while request not in answered:
            answered |= engine.step()
            steps += 1
        assert steps <= 3
        assert long not in answered
    assert engine.step(dropped=[long]) == {}
    assert engine.step() == {}, "nothing is in flight"
    engine.computes(row)


def test_a_draw_gets_room_from_idle_sessions(engine):
    """Six sessions leave 96 of the 864 tokens of the cache."""
    engine.ask(*(Query(context(seed, 120)) for seed in range(6)))
    (drawn,) = engine.draw([Query(context(9, 5))], [SamplingParams(max_tokens=110)])
    assert len(drawn) == 110


def test_seeded_draws_wait_for_room_and_are_what_they_are_alone(engine):
    """On a CPU vLLM fails on a seeded prompt that it computes in chunks of 64, or again after it
    has preempted it: the cache holds three of these at once."""
    queries = [Query(context(seed, 60)) for seed in range(6)]
    params = [SamplingParams(max_tokens=190 if seed < 3 else 4, seed=seed) for seed in range(6)]
    others = [Query(context(seed, 200)) for seed in range(10, 13)]
    mixed = engine.ask(*others, *map(SampleRequest, queries, params))
    assert [len(ids) for ids in mixed[3:]] == [190, 190, 190, 4, 4, 4]
    for i in (0, 5):
        assert engine.draw(queries[i : i + 1], params[i : i + 1]) == [mixed[3 + i]]


def test_rows_that_join_behind_a_seeded_draw_leave_its_prompt_whole(engine):
    """vLLM computes what live sessions append before the prompts of new requests: 3 x 10 and 50
    tokens would not fit a step of 64. All wait for a prompt that takes two steps."""
    parents = [Query(context(seed, 20)) for seed in range(3)]
    engine.ask(*parents)
    long = Query(context(7, 100))
    draw = SampleRequest(Query(context(9, 50)), SamplingParams(max_tokens=8, seed=1))
    longer = [Query(parent.token_ids + context(8, 10)) for parent in parents]
    assert engine.step(long, draw) == {}
    answers = engine.step(*longer)
    while len(answers) < 5:
        answers |= engine.step()
    engine.assert_cold_rows({query: answers[query] for query in (long, *longer)})
    assert engine.draw([draw.query], [draw.params]) == [answers[draw]]


def test_a_step_that_computes_less_of_a_prompt_than_it_has_room_for(load_briefly):
    """vLLM chunks a prompt at ``long_prefill_token_threshold``, or where a step ends early."""
    for option in ("long_prefill_token_threshold", "max_num_scheduled_tokens"):
        engine = load_briefly(**{option: 40})
        whole, chunked = Query(context(0, 40)), Query(context(1, 41))
        params = SamplingParams(max_tokens=2, seed=1)
        drawn, left = engine.draw([whole, chunked], [params, params])
        assert len(drawn) == 2
        assert left is None
