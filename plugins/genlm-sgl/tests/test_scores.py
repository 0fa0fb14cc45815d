"""Scores: what they compute, and that they are the entries of cold rows."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from genlm.core import Query, SamplingParams
from genlm.core.types import SampleRequest, ScoreRequest
from tools.tiny import write_tokenizer


@pytest.fixture(scope="module")
def hooks(load_tiny, tiny_without_padding):
    return load_tiny(tiny_without_padding, chunked_prefill_size=64, max_total_tokens=1000)


@pytest.fixture(autouse=True)
def cold(request):
    if "hooks" in request.fixturenames:
        request.getfixturevalue("hooks").genlm_clear_kv_cache()


def scored(hooks, asked):
    """Their scores, which are the entries of cold rows; and how many tokens were computed."""
    forward = hooks.engine.model.forward
    with patch.object(hooks.engine.model, "forward", wraps=forward) as computed:
        scores = hooks.ask(*(ScoreRequest(Query(ids), ends) for ids, ends in asked))
    for given, (ids, ends) in zip(scores, asked, strict=True):
        rows = [hooks.rows([ids + ends[:at]], cold=True)[0] for at in range(len(ends))]
        expected = torch.stack([row[token] for row, token in zip(rows, ends, strict=True)])
        torch.testing.assert_close(given, expected, atol=2e-4, rtol=0)
    return sum(len(call.args[0]) for call in computed.call_args_list)


@pytest.mark.parametrize("is_known", [False, True])
def test_scores_compute_the_context_once_and_the_scored_tokens(hooks, contexts, is_known):
    """The context is computed once, and its last token, which gives the first score, for each
    score. This also holds if other requests have the scored tokens."""
    (context,), ends = contexts(1, 50, 50), contexts(3, 30, 30, seed=1)
    if is_known:
        hooks.rows([context])
    asked = [(context, end) for end in (*ends, ends[0][:25])]
    assert scored(hooks, asked) == 115 + (0 if is_known else 49)


def test_a_text_longer_than_a_step(hooks, contexts):
    (text,) = contexts(1, 250, 250)
    hooks.rows([text[:200]])
    assert scored(hooks, [(text[:200], text[200:])]) == 50
    hooks.genlm_clear_kv_cache()
    assert scored(hooks, [(text[:1], text[1:])]) == 249


def test_scores_share_steps_with_draws_and_rows(hooks, contexts):
    (context,), ends = contexts(1, 20, 20), contexts(2, 10, 10, seed=1)
    draw = SampleRequest(Query(context), SamplingParams(max_tokens=8, temperature=0.0))
    (alone,) = hooks.ask(draw)
    asked = [ScoreRequest(Query(context), end) for end in ends]
    drawn, row, *scores = hooks.ask(draw, Query(context), *asked)
    assert drawn == alone
    torch.testing.assert_close(row, hooks.rows([context], cold=True)[0], atol=2e-4, rtol=0)
    assert scores[0].shape == (10,)
    assert scored(hooks, [(context, end) for end in ends]) == 20


def test_few_tokens_are_left_to_rows(hooks):
    few, many = ScoreRequest(Query((5, 6)), (7,)), ScoreRequest(Query((5, 6)), tuple(range(9)))
    alone, *_ = hooks.ask(few)
    beside, scores = hooks.ask(few, many)
    assert alone is beside is None
    assert scores.shape == (9,)


def test_dropped_score_holds_up_no_other(hooks, contexts):
    (context,), ends = contexts(1, 150, 150), contexts(3, 10, 10, seed=1)
    first, *others = (ScoreRequest(Query(context), end) for end in ends)
    hooks.step(first, *others)
    answers = hooks.step(dropped=[first])
    for _ in itertools.repeat(None, 6):
        answers |= hooks.step()
    assert answers.keys() == {*others}


def test_cap_of_final_logits_is_applied(load_tiny, contexts, tmp_path):
    """The plugin applies the cap on a CPU."""
    config = Gemma2Config(
        vocab_size=write_tokenizer(tmp_path, "<end>"),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=0.5,
        initializer_range=0.3,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    (text,) = contexts(1, 30, 30)
    scored(load_tiny(str(tmp_path)), [(text[:10], text[10:])])
