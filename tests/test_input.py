"""Bad input is rejected before the engine sees it, with a helpful message, and the model still
works afterwards."""

from __future__ import annotations

import asyncio
import inspect
import itertools

import numpy as np
import pytest
import torch

from genlm.core import AsyncLM, GenlmError, InvalidOptionError, InvalidQueryError

from .doubles import Unshowable

BAD_CONTEXTS = [
    ([], "the context is empty"),
    (
        [258],
        "token id 258 at position 0 of the context is out of range; the model has ids 0 to 257",
    ),
    ([0, -1], "token id -1 at position 1"),
    ([1, 2.0], "token ids must be integers; position 1 of the context is 2.0"),
    ([True], "position 0 of the context is True"),
    ([None], "position 0 of the context is None"),
    ([[1, 2]], "position 0 of the context is [1, 2]"),
    ("text", "is text"),
    (b"text", "is text"),
    ({1, 2}, "the context is a set; give a sequence of token ids, which has an order"),
    ({1: 2}, "the context is a dict; give a sequence"),
    ([10**5000], "an integer of 16610 bits at position 0 of the context is out of range"),
    (7, "the context must be a sequence of token ids; got 7"),
    (torch.tensor(3), "it is 0-dimensional; give [x] for one id"),
    ({"input_ids": [1]}, "the context is a dict; give its 'input_ids'"),
    (torch.tensor([1, 2]).to_sparse(), "the context cannot be read as a list; give integers"),
    (torch.empty(2, dtype=torch.long, device="meta"), "the context cannot be read as a list"),
    (torch.tensor([[1, 2]]), "it is 2-dimensional; give x[0] for its first row"),
    (np.zeros((1, 1, 1), dtype=int), "it is 3-dimensional"),
    (range(10**9), "the context of 1000000000 tokens exceeds the 10 tokens that the model takes"),
    (Unshowable(), "must be a sequence of token ids; got <Unshowable, whose repr raised"),
    ([0] * 11, "the context of 11 tokens exceeds the 10 tokens that the model takes"),
]


@pytest.mark.parametrize(("context", "message"), BAD_CONTEXTS)
def test_invalid_contexts_are_rejected(mock, gate, context, message):
    lm = mock(max_context=10)
    for way in (lambda: lm.next_token_logprobs_sync(context), lambda: lm.cache_kv(context)):
        with pytest.raises(InvalidQueryError) as caught:
            way()
        assert message in str(caught.value)
    assert gate.batches == []
    assert lm.next_token_logprobs_sync([1]).shape == (258,)


@pytest.mark.parametrize(
    "way",
    [
        lambda lm, bad: lm.batch_next_token_logprobs_sync([[1], bad]),
        lambda lm, bad: lm.next_token_logprobs_uncached(bad),
        lambda lm, bad: asyncio.run(lm.next_token_logprobs(bad)),
        lambda lm, bad: asyncio.run(lm.batch_next_token_logprobs([[1], bad])),
        lambda lm, bad: asyncio.run(lm.sample(bad, 1, [])),
        lambda lm, bad: asyncio.run(lm.batch_sample([[1], bad], 1, [])),
        lambda lm, bad: asyncio.run(lm.sequence_logprobs(bad, [1])),
    ],
)
def test_every_way_of_asking_looks_at_the_context(mock, gate, way):
    for bad in ([], [258], [0] * 11):
        with pytest.raises(InvalidQueryError, match="the context") as caught:
            way(mock(max_context=10), bad)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, GenlmError)
    assert gate.batches == []


def test_an_error_of_the_callers_own_generator_is_not_hidden(mock):
    with pytest.raises(InvalidQueryError) as caught:
        mock().next_token_logprobs_sync(len(text) for text in ["a", None])
    assert "object of type 'NoneType' has no len()" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "context",
    [
        (1, 2),
        [1, 2],
        np.array([1, 2]),
        np.array([1, 2], dtype=np.uint8),
        torch.tensor([1, 2]),
        [np.int64(1), 2],
        iter([1, 2]),
    ],
)
def test_valid_contexts_are_accepted(mock, context):
    lm = mock()
    assert torch.equal(
        lm.next_token_logprobs_sync(context), lm.next_token_logprobs_uncached([1, 2])
    )


def test_context_of_the_greatest_length_is_accepted_and_a_longer_one_rejected(mock):
    lm = mock(max_context=10)
    assert lm.next_token_logprobs_sync([0] * 10).shape == (258,)
    assert len(lm.sample_sync([0] * 8, 3, [], seed=0)) == 3
    assert len(lm.sequence_logprobs_sync([0] * 8, [1, 2, 3])) == 3
    for call in (
        lambda: lm.sample_sync([0] * 8, 4, []),
        lambda: lm.sequence_logprobs_sync([0] * 8, [1, 2, 3, 4]),
    ):
        with pytest.raises(
            InvalidQueryError,
            match=r"a context of 8 tokens leaves room for 3 of the 4 tokens to follow, .* takes 10",
        ):
            call()
    with pytest.raises(InvalidQueryError, match="a context of 10 tokens leaves room for 1 of the"):
        lm.sample_sync([0] * 10, 2, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must be an integer of at least 0; got -1"),
        ({"max_tokens": 1.5}, "max_tokens must be .* got 1.5"),
        ({"eos_token_ids": [3, 999]}, "eos_token_ids has 999, which is out of range; .* 0 to 257"),
        ({"eos_token_ids": 7}, "eos_token_ids must be a list of token ids"),
        ({"eos_token_ids": torch.tensor(7)}, r"must be a list of token ids.* got tensor\(7\)"),
        ({"eos_token_ids": ["</s>"]}, "each of eos_token_ids must be .* got '</s>'"),
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0; got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number .* got nan"),
        ({"max_tokens": -(10**5000)}, "got an integer of 16610 bits"),
        ({"seed": -1}, "seed must be .* got -1"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, or None; got 0"),
        ({"top_p": 0.0}, "top_p must be a finite number above 0 and at most 1, or None; got 0.0"),
        ({"top_p": 1.5}, "top_p must be .* got 1.5"),
        ({"min_p": -0.1}, "min_p must be a finite number from 0 to 1, or None; got -0.1"),
        ({"min_p": 1.5}, "min_p must be .* got 1.5"),
    ],
)
def test_invalid_sampling_options_are_rejected(mock, gate, arguments, message):
    lm = mock()
    arguments = {"max_tokens": 1, "eos_token_ids": [], **arguments}
    with pytest.raises(InvalidOptionError, match=message) as caught:
        asyncio.run(lm.sample([1], **arguments))
    assert isinstance(caught.value, ValueError)
    assert gate.batches == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 0},
        {"eos_token_ids": [0]},
        {"temperature": 0},
        {"seed": 0},
        {"top_k": 1},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
    ],
)
def test_extreme_sampling_options_are_accepted(mock, arguments):
    arguments = {"max_tokens": 1, "eos_token_ids": [], **arguments}
    assert len(asyncio.run(mock().sample([1], **arguments))) <= 1


def test_endless_iterable_is_read_up_to_the_limit(mock, monkeypatch):
    lm = mock(max_context=10)
    read = itertools.count()
    with pytest.raises(InvalidQueryError, match="more than the 10 tokens that the model takes"):
        lm.next_token_logprobs_sync(0 for _ in read)
    assert next(read) == 11
    with pytest.raises(InvalidQueryError, match="the continuation has more than the 10 tokens"):
        lm.sequence_logprobs_sync([1], itertools.repeat(1))
    monkeypatch.setattr("genlm.core.context.MAX_TOKENS", 100)
    with pytest.raises(InvalidQueryError, match="more than the 100 tokens"):
        mock().next_token_logprobs_sync(itertools.repeat(1))


def test_batch_of_the_greatest_length_is_accepted_and_a_longer_one_rejected(mock, monkeypatch):
    monkeypatch.setattr("genlm.core.context.MAX_CONTEXTS", 3)
    lm = mock()
    assert lm.batch_next_token_logprobs_sync([[1]] * 3).shape == (3, 258)
    for many in ([[1]] * 4, itertools.repeat([1])):
        with pytest.raises(InvalidQueryError, match="a batch may have at most 3 contexts"):
            lm.batch_next_token_logprobs_sync(many)


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        ([1, 2, 3], "a list of contexts must be given, each a list of token ids; .* is 1"),
        (torch.tensor([7, 8]), r"a list of contexts .* element is tensor\(7\); for one context"),
        ("text", "a list of contexts must be given; got a str"),
        ({"input_ids": [[1]]}, "a list of contexts must be given; got a dict"),
        (7, "a list of contexts must be given; got 7"),
    ],
)
def test_batch_must_be_a_list_of_contexts(mock, contexts, message):
    lm = mock()
    for way in (
        lambda: lm.batch_next_token_logprobs_sync(contexts),
        lambda: asyncio.run(lm.batch_next_token_logprobs(contexts)),
        lambda: asyncio.run(lm.batch_sample(contexts, 1, [])),
    ):
        with pytest.raises(InvalidQueryError, match=message):
            way()


#: Every method that takes contexts.
METHODS = [
    name
    for name, method in inspect.getmembers(AsyncLM, inspect.isfunction)
    if "lora_name" in inspect.signature(method).parameters
    if name[0] != "_" and "_lora" not in name
]


@pytest.mark.parametrize("method", METHODS)
def test_unknown_arguments_of_methods_name_the_right_ones(mock, method):
    for other in ("lora", "adapter"):
        wanted = rf"{method} has no argument {other}: lora_name is .* add_new_lora"
        with pytest.raises(InvalidOptionError, match=wanted):
            getattr(mock(), method)(**{other: "poems"})


def test_temperature_for_rows_is_rejected_with_the_remedy(mock):
    with pytest.raises(InvalidOptionError, match=r"temperature: .*\(row / t\).log_softmax"):
        mock().next_token_logprobs_sync([1], temperature=0.5)


def test_missing_arguments_are_named(mock):
    lm = mock()
    with pytest.raises(
        InvalidOptionError, match=r"^sample_sync needs max_tokens; it has prompt_to"
    ):
        lm.sample_sync([1])
    with pytest.raises(InvalidOptionError, match=r"^sample needs prompt_token_ids; it has"):
        lm.sample(max_tokens=1)
    with pytest.raises(InvalidOptionError, match=r"^sample_particles needs max_tokens; it has"):
        lm.sample_particles([1], n=1)
    assert lm.sample_sync(max_tokens=0, prompt_token_ids=[1]) == []
    with pytest.raises(InvalidOptionError, match="load_model_by_name"):
        AsyncLM()


def test_too_many_positional_arguments_are_rejected(mock):
    lm = mock()
    wanted = r"stream takes .*eos_token_ids by position; got 1 more; write temperature=0.5"
    with pytest.raises(InvalidOptionError, match=wanted):
        lm.stream([1], 1, [], 0.5)
    with pytest.raises(
        InvalidOptionError, match=r"sample takes .*lora_name by position; .*top_k=5"
    ):
        lm.sample([1], 1, [], 1.0, 0, None, 5)
    with pytest.raises(InvalidOptionError, match=r"token_ids, lora_name by position; .*then=3$"):
        lm.next_token_logprobs([1], None, 3)
