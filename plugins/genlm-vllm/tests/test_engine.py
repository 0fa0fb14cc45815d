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


def cold(query: Query) -> Query:
    return Query(query.token_ids, query.adapter, cold=True)


def assert_rows_close(rows, expected):
    torch.testing.assert_close(torch.stack(rows), torch.stack(expected), atol=ATOL, rtol=0)


def test_rows_are_those_of_transformers(engine, rows_of, model_path):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    queries = [Query(context(seed, length)) for seed, length in enumerate([1, 7, 64, 65, 200])]
    rows = rows_of(engine, queries)
    with torch.no_grad():
        expected = [
            reference(torch.tensor([query.token_ids])).logits[0, -1].log_softmax(-1)
            for query in queries
        ]
    assert_rows_close(rows, expected)
    assert all(row.shape == (engine.vocab_size,) and row.dtype == torch.float32 for row in rows)


def test_extending_a_context_by_a_token_computes_one_token(engine, rows_of):
    queries = [Query(context(seed, 50)) for seed in range(4)]
    rows_of(engine, queries)
    longer = [Query((*query.token_ids, 77)) for query in queries]
    with engine.computed_tokens() as counts:
        rows = rows_of(engine, longer)
    assert counts == [4]
    assert_rows_close(rows, [rows_of(engine, [cold(query)])[0] for query in longer])


def test_ragged_extensions_append_what_is_new(engine, rows_of):
    queries = [Query(context(seed, 40 + seed)) for seed in range(3)]
    rows_of(engine, queries)
    longer = [
        Query(query.token_ids + context(9, 1 + extra))
        for query, extra in zip(queries, [0, 4, 11], strict=True)
    ]
    with engine.computed_tokens() as counts:
        rows = rows_of(engine, longer)
    assert sum(counts) == 1 + 5 + 12
    assert_rows_close(rows, [rows_of(engine, [cold(query)])[0] for query in longer])


def test_siblings_of_a_fork_compute_a_token_each(engine, rows_of):
    parent = Query(context(0, 70))
    rows_of(engine, [parent])
    siblings = [Query((*parent.token_ids, token)) for token in (5, 6, 7)]
    with engine.computed_tokens() as counts:
        rows = rows_of(engine, siblings)
    assert counts == [3], "one goes on with the session; two get copies of its partial block"
    assert_rows_close(rows, [rows_of(engine, [cold(query)])[0] for query in siblings])


@pytest.mark.parametrize("length", [20, 50], ids=["in the first block", "beyond it"])
def test_a_cold_query_computes_everything(engine, rows_of, length):
    query = Query(context(0, length))
    rows_of(engine, [query])
    with engine.computed_tokens() as counts:
        rows_of(engine, [Query((*query.token_ids, 5), cold=True)])
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


def test_the_longest_context(engine, rows_of):
    query = Query(context(0, engine.max_context))
    (row,) = rows_of(engine, [query])
    assert_rows_close([row], rows_of(engine, [cold(query)]))


def test_a_full_cache_and_more_requests_than_places(engine, rows_of):
    """Forty contexts of about 100 tokens where the cache holds about 900 tokens and a batch 16
    requests."""
    queries = [Query(context(seed, 90 + seed % 20)) for seed in range(40)]
    rows = rows_of(engine, queries)
    picked = range(0, 40, 7)
    assert_rows_close(
        [rows[i] for i in picked], [rows_of(engine, [cold(queries[i])])[0] for i in picked]
    )


def test_any_interleaving_gives_the_cold_rows(engine, rows_of):
    """A tree of contexts, extended, forked, repeated and left, under pressure; every row against
    its cold one."""
    dice = random.Random(7)
    known = [context(seed, 30) for seed in range(3)]
    asked = {}
    for _ in range(25):
        batch = []
        for _ in range(dice.randint(1, 8)):
            parent = dice.choice(known[-12:])
            batch.append(
                Query((parent + context(dice.randrange(6), dice.choice([1, 1, 1, 3, 40])))[:255])
            )
        batch = list(dict.fromkeys(batch))
        asked |= dict(zip(batch, rows_of(engine, batch), strict=True))
        known += [query.token_ids for query in batch if len(query.token_ids) < 200]
    sample = dice.sample(list(asked), 25)
    assert_rows_close(
        [asked[query] for query in sample], [rows_of(engine, [cold(query)])[0] for query in sample]
    )


# --- pinned prefixes ------------------------------------------------------------------------------


def test_a_pinned_prefix_survives_pressure(engine, rows_of):
    prefix = context(0, 96)
    assert engine.genlm_cache_prefix(Query(prefix)) is True
    rows_of(engine, [Query(context(seed, 200)) for seed in range(1, 9)])
    with engine.computed_tokens() as counts:
        rows_of(engine, [Query((*prefix, 5)), Query((*prefix, 6))])
    assert sum(counts) == 2


def test_clearing_forgets_pinned_prefixes(engine, rows_of):
    prefix = context(0, 96)
    engine.genlm_cache_prefix(Query(prefix))
    engine.genlm_clear_kv_cache()
    with engine.computed_tokens() as counts:
        rows_of(engine, [Query((*prefix, 5))])
    assert sum(counts) == 97


def test_pins_that_would_fill_the_cache_are_refused(engine, rows_of):
    for seed in range(2):
        engine.genlm_cache_prefix(Query(context(seed, 220)))
    with pytest.raises(EngineError, match="clear_kv_cache"):
        engine.genlm_cache_prefix(Query(context(2, 250)))
    with engine.computed_tokens() as counts:
        rows_of(engine, [Query((*context(0, 220), 5))])
    assert counts == [1], "what was pinned before is still there"
    query = Query(context(50, 250))
    assert_rows_close(rows_of(engine, [query]), rows_of(engine, [cold(query)]))


# --- failures -------------------------------------------------------------------------------------


@contextmanager
def failing_forward(engine, times: int = 1):
    """The model raises in the middle of its next forward passes."""
    left = [times]

    def fail(module, args):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the forward pass broke")

    hook = engine.model.model.layers[15].register_forward_pre_hook(fail)
    yield
    hook.remove()


def test_after_a_failed_step_every_answer_is_right(engine, rows_of):
    """vLLM enters blocks in its prefix cache before it computes them: those of a failed step must
    not be found again."""
    live, fresh = Query(context(0, 50)), Query(context(1, 60))
    rows_of(engine, [live])
    longer = Query((*live.token_ids, 5))
    with failing_forward(engine), pytest.raises(RuntimeError, match="broke"):
        engine.step(longer, fresh)
    assert_rows_close(
        rows_of(engine, [longer, fresh]),
        [rows_of(engine, [cold(query)])[0] for query in (longer, fresh)],
    )


def test_a_pinned_prefix_is_restored_after_a_failure(engine, rows_of):
    prefix = context(0, 96)
    engine.genlm_cache_prefix(Query(prefix))
    with failing_forward(engine), pytest.raises(RuntimeError, match="broke"):
        engine.step(Query(context(1, 20)))
    rows_of(engine, [Query(context(1, 20))])
    with engine.computed_tokens() as counts:
        rows_of(engine, [Query((*prefix, 5))])
    assert counts == [1]


def test_a_pinned_prefix_that_cannot_be_restored_harms_nobody(engine, rows_of):
    engine.genlm_cache_prefix(Query(context(0, 96)))
    query = Query(context(1, 20))
    with failing_forward(engine, times=2):
        with pytest.raises(RuntimeError, match="broke"):
            engine.step(query)
        assert_rows_close(rows_of(engine, [query]), rows_of(engine, [cold(query)]))


# --- sampling -------------------------------------------------------------------------------------


def test_seeded_draws_do_not_depend_on_the_batch(engine):
    queries = [Query(context(seed, 10)) for seed in range(4)]
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (3, 2**64 - 1, -1, 0)]
    together = engine.draw(queries, params)
    assert together == [engine.draw([q], [p])[0] for q, p in zip(queries, params, strict=True)]
    assert together != engine.draw(queries, [SamplingParams(max_tokens=6, seed=9)] * 4)


def test_seeds_hold_beside_requests_without_one(engine):
    query, seeded = Query(context(0, 10)), SamplingParams(max_tokens=6, seed=3)
    (alone,) = engine.draw([query], [seeded])
    draw = SampleRequest(query, seeded)
    others = [
        SampleRequest(Query(context(1, 10)), SamplingParams(max_tokens=3)),
        SampleRequest(Query(context(2, 10)), SamplingParams(max_tokens=3, temperature=0.0, seed=4)),
        Query(context(3, 10)),
    ]
    for together in ([*others, draw], [draw, *others]):
        assert dict(zip(together, engine.ask(*together), strict=True))[draw] == alone


def test_unseeded_draws_differ(engine):
    draws = engine.draw([Query(context(0, 10))] * 4, [SamplingParams(max_tokens=8)] * 4)
    assert len({tuple(draw) for draw in draws}) > 1


def test_zero_temperature_is_the_likeliest_token(engine, rows_of):
    query = Query(context(0, 10))
    (drawn,) = engine.draw([query], [SamplingParams(max_tokens=4, temperature=0.0)])
    ids = query.token_ids
    for token in drawn:
        assert token == int(rows_of(engine, [Query(ids)])[0].argmax())
        ids = (*ids, token)


def test_stop_tokens_end_a_draw_and_are_left_out(engine):
    query, greedy = Query(context(0, 10)), SamplingParams(max_tokens=8, temperature=0.0)
    (free,) = engine.draw([query], [greedy])
    stop = free[3]
    stopping = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=frozenset({stop}))
    assert engine.draw([query], [stopping]) == [free[: free.index(stop)]]


def test_the_models_own_end_of_sequence_does_not_stop_unless_listed(engine):
    end = engine.tokenizer.eos_token_id
    prompt = tuple(
        engine.tokenizer.encode("<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n")
    )
    (drawn,) = engine.draw([Query(prompt)], [SamplingParams(max_tokens=60, temperature=0.0)])
    assert len(drawn) == 60
    assert end in drawn


def test_top_k_of_one_is_greedy(engine):
    query = Query(context(0, 10))
    wishes = [
        SamplingParams(max_tokens=5, top_k=1, seed=1),
        SamplingParams(max_tokens=5, temperature=0.0),
    ]
    first, second = engine.draw([query, query], wishes)
    assert first == second


def test_frequencies_agree_with_the_row(engine, rows_of):
    query, n = Query(tuple(engine.tokenizer.encode("The sky is"))), 400
    draws = engine.draw([query] * n, [SamplingParams(max_tokens=1, seed=seed) for seed in range(n)])
    probabilities = rows_of(engine, [query])[0].exp()
    for token in probabilities.topk(3).indices.tolist():
        p = float(probabilities[token])
        observed = sum(draw == [token] for draw in draws) / n
        assert abs(observed - p) < 4.5 * (p * (1 - p) / n) ** 0.5


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


@pytest.mark.parametrize(
    "lengths", [(1, 1), (3, 20), (100, 155)], ids=["one token", "one chunk", "chunks to the limit"]
)
def test_scores_are_the_entries_of_the_rows(engine, rows_of, lengths):
    """Of two continuations in a batch. The last token of one may be just beyond the longest
    context."""
    (ids, other), drawn = (context(seed, lengths[0]) for seed in (0, 1)), context(2, lengths[1] + 1)
    scores = engine.score([Query(ids), Query(other)], [drawn, drawn[:-1]])
    assert [len(score) for score in scores] == [len(drawn), len(drawn) - 1]
    for i in {0, len(drawn) // 2, len(drawn) - 1}:
        (row,) = rows_of(engine, [Query(ids + drawn[:i], cold=True)])
        assert float(scores[0][i]) == pytest.approx(float(row[drawn[i]]), abs=ATOL)
    (row,) = rows_of(engine, [Query(other, cold=True)])
    assert float(scores[1][0]) == pytest.approx(float(row[drawn[0]]), abs=ATOL)


def test_scores_read_no_state_that_vllm_leaves_out_of_them(engine, rows_of):
    """vLLM gives nothing for tokens whose key/value state it finds: here that of all of them, in a
    full block and in a live request's."""
    ids, drawn = context(0, 10), context(1, 40)
    rows_of(engine, [Query(ids + drawn)])
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


def test_without_live_sessions(load_engine, rows_of):
    engine = load_engine(live_sessions=False, enable_prefix_caching=False)
    query = Query(context(0, 50))
    rows_of(engine, [query])
    longer = Query((*query.token_ids, 5))
    with engine.computed_tokens() as counts:
        rows = rows_of(engine, [longer])
    assert sum(counts) == 51
    assert_rows_close(rows, rows_of(engine, [cold(longer)]))
    with pytest.raises(UnsupportedError, match="prefix caching"):
        engine.genlm_cache_prefix(query)


# --- all kinds together ---------------------------------------------------------------------------


def steps_until(engine, request, *newcomers):
    """How many steps a request takes that is asked now; and what else was answered meanwhile."""
    answered, steps = engine.step(request, *newcomers), 1
    while request not in answered:
        answered |= engine.step()
        steps += 1
    return steps, answered


def test_nobody_waits_for_a_long_draw(engine, rows_of):
    long = SampleRequest(Query(context(0, 10)), SamplingParams(max_tokens=100))
    short = SampleRequest(Query(context(1, 10)), SamplingParams(max_tokens=1))
    score = ScoreRequest(Query(context(2, 3)), context(3, 4))
    row = Query(context(4, 12))
    engine.step(long)
    for request in (short, score, row):
        steps, answered = steps_until(engine, request)
        assert steps <= 3
        assert long not in answered
    assert engine.step(dropped=[long]) == {}
    assert engine.step() == {}, "nothing is in flight"
    assert_rows_close(rows_of(engine, [row]), rows_of(engine, [cold(row)]))


def test_a_draw_gets_room_from_idle_sessions(engine, rows_of):
    """Six sessions leave 96 of the 864 tokens of the cache."""
    rows_of(engine, [Query(context(seed, 120)) for seed in range(6)])
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


def test_rows_that_join_behind_a_seeded_draw_leave_its_prompt_whole(engine, rows_of):
    """vLLM computes what live sessions append before the prompts of new requests: 3 x 10 and 50
    tokens would not fit a step of 64. All wait for a prompt that takes two steps."""
    parents = [Query(context(seed, 20)) for seed in range(3)]
    rows_of(engine, parents)
    long = Query(context(7, 100))
    draw = SampleRequest(Query(context(9, 50)), SamplingParams(max_tokens=8, seed=1))
    longer = [Query(parent.token_ids + context(8, 10)) for parent in parents]
    assert engine.step(long, draw) == {}
    answers = engine.step(*longer)
    while len(answers) < 5:
        answers |= engine.step()
    engine.assert_cold_rows({query: answers[query] for query in (long, *longer)})
    assert engine.draw([draw.query], [draw.params]) == [answers[draw]]


def test_a_step_that_computes_less_of_a_prompt_than_it_has_room_for(load_engine):
    """vLLM chunks a prompt at ``long_prefill_token_threshold``, or where a step ends early."""
    for option in ("long_prefill_token_threshold", "max_num_scheduled_tokens"):
        engine = load_engine(**{option: 40})
        whole, chunked = Query(context(0, 40)), Query(context(1, 41))
        params = SamplingParams(max_tokens=2, seed=1)
        drawn, left = engine.draw([whole, chunked], [params, params])
        assert len(drawn) == 2
        assert left is None
