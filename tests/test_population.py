"""Populations: the rows of many particles in tensors, beside those that coroutines get."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from genlm.core import (
    AsyncLM,
    EngineError,
    InvalidInputError,
    InvalidOptionError,
    InvalidQueryError,
)
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.core.reductions import draw, draw_among

from .doubles import Processor
from .particle_forms import ALLOWED, END, FORMS, PROMPT, ByRows, smc

pytestmark = pytest.mark.any_version

BOTH = pytest.mark.parametrize("options", [{}, {"continuous": True, "steps": 1}], ids=str)


# --- one program in all forms ---------------------------------------------------------------------


@BOTH
def test_all_forms_of_a_program_give_the_same_particles(mock, options):
    found = [asyncio.run(smc(form, mock(**options))) for form in FORMS]
    texts, constant, times = found[0]
    assert times >= 2
    assert len({*map(len, texts)}) > 1  # some particles have ended
    for other in found[1:]:
        assert other[::2] == (texts, times)
        assert other[1] == pytest.approx(constant, abs=1e-9)


def test_population_with_adapter_wrapper_and_no_cache_is_right(mock):
    def sharper(queries, rows):
        return (1.3 * rows).log_softmax(-1)

    results = []
    for form in FORMS:
        lm = mock(wrappers=[Processor(sharper)], cache_size=0)
        lm.add_new_lora("folder/of/poems", "poems")
        results.append(asyncio.run(smc(form, lm, lora_name="poems"))[0])
    assert results == [results[0]] * len(FORMS)
    assert results[0] != asyncio.run(smc(ByRows, mock()))[0]


@BOTH
def test_concurrent_and_cancelled_programs_leave_a_population_right(mock, options):
    alone = [asyncio.run(smc(form, mock(**options), seed=3))[0] for form in FORMS]

    async def crowd():
        lm = mock(**options)
        leaves = [asyncio.ensure_future(smc(form, lm, seed=9)) for form in FORMS]
        await asyncio.sleep(0)
        stay = [asyncio.ensure_future(smc(form, lm, seed=3)) for form in FORMS]
        await lm.next_token_logprobs([1])
        for task in leaves:
            task.cancel()
        gone = await asyncio.gather(*leaves, return_exceptions=True)
        assert any(isinstance(each, asyncio.CancelledError) for each in gone)
        return [texts for texts, *_ in await asyncio.gather(*stay)]

    assert asyncio.run(crowd()) == alone


# --- its tensors ----------------------------------------------------------------------------------


def test_tokens_lengths_and_ends(mock):
    lm = mock()
    particles = lm.population(PROMPT, 3)
    assert particles.tokens.tolist() == [PROMPT] * 3
    particles.extend([1, 2, 3])
    particles.extend(torch.tensor([4, 5, END]), ended=torch.tensor([False, False, True]))
    particles.extend([6, 6, 200], ended=[True, False, False])
    assert particles.tokens.tolist() == [[7, 8, 1, 4, 0], [7, 8, 2, 5, 6], [7, 8, 3, 0, 0]]
    assert particles.length.tolist() == [4, 5, 3]
    assert particles.ended.tolist() == [True, False, True]
    assert particles.continuations == [[1, 4], [2, 5, 6], [3]]
    particles.select([1, 1, 2])
    assert particles.continuations == [[2, 5, 6], [2, 5, 6], [3]]
    assert particles.ended.tolist() == [False, False, True]
    assert (particles.n, len(particles.prompt), particles.device.type) == (3, 2, "cpu")


def test_ended_particles_have_rows_of_their_last_token(mock):
    lm = mock()
    particles = lm.population(PROMPT, 3)
    particles.extend([1, 2, END], ended=[False, True, True])
    rows = asyncio.run(particles.logprobs())
    assert rows[0].equal(lm.next_token_logprobs_sync([*PROMPT, 1]))
    for at, last in ((1, 2), (2, END)):
        assert rows[at].exp().tolist() == [float(token == last) for token in range(258)]
    particles.extend([1, 9, 9], ended=[True] * 3)  # now all particles have ended
    rows = asyncio.run(particles.logprobs())
    assert rows.argmax(-1).tolist() == [1, 2, END]
    assert rows.exp().sum(-1).tolist() == [1.0] * 3
    assert asyncio.run(particles.logprobs(then=draw(0.7, None))) == [(1, 0.0), (2, 0.0), (END, 0.0)]


def test_equal_particles_are_computed_once_and_rows_belong_to_the_caller(mock, gate):
    lm = mock()
    particles = lm.population(PROMPT, 100)
    particles.extend([1, 2] * 50)
    rows = asyncio.run(particles.logprobs())
    assert [len(batch) for batch in gate.batches] == [2]
    kept = rows.clone()
    rows.zero_()
    assert asyncio.run(particles.logprobs()).equal(kept)
    assert [len(batch) for batch in gate.batches] == [2]  # the other rows come from the cache


class Wide(MockEngine):
    """An engine with 100,000 tokens, whose rows are cheap to compute."""

    def __init__(self):
        super().__init__(ByteTokenizer(), row=self.by_length)
        self.vocab_size = len(WideTokenizer())
        self.tokenizer = WideTokenizer()

    def by_length(self, ids):
        logits = torch.zeros(self.vocab_size)
        logits[ids[-1]] = 3.0
        return logits.log_softmax(-1)


class WideTokenizer(ByteTokenizer):
    def __len__(self):
        return 100_000

    def token_bytes(self):
        return [*super().token_bytes(), *(b"%d" % at for at in range(258, 100_000))]


def test_a_large_population_gives_its_rows_in_parts():
    n = 1500
    with AsyncLM(Wide, backend="wide", cache_size=0) as lm:
        particles = lm.population(PROMPT, n)
        particles.extend(range(n))

        async def walk():
            sizes, seen = [], []
            async for part, rows in particles.parts():
                sizes.append(len(rows))
                seen += zip(range(n)[part], rows.argmax(-1).tolist(), strict=True)
            return sizes, seen

        sizes, seen = asyncio.run(walk())
        assert seen == [(at, at) for at in range(n)]
        assert max(sizes) == 2  # as many rows as a processor's cache holds
        assert lm.stats.largest_batch * 100_000 <= 1 << 26
        assert lm.stats.rows == n


def test_failed_request_leaves_the_population_unchanged(mock):
    lm = mock(fail_on=lambda query: query.token_ids == (*PROMPT, 66))
    particles = lm.population(PROMPT, 2)
    particles.extend([65, 66])
    with pytest.raises(EngineError):
        asyncio.run(particles.logprobs())
    with pytest.raises(EngineError):
        asyncio.run(particles.logprobs(then=draw(0.5, None)))
    particles.select([0, 0])
    assert asyncio.run(particles.logprobs())[1].equal(lm.next_token_logprobs_sync([*PROMPT, 65]))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda p: p.extend([1]), InvalidInputError, "3 integers"),
        (lambda p: p.extend([1.0, 2.0, 3.0]), InvalidInputError, "3 integers"),
        (lambda p: p.extend([1, 2, 258]), InvalidQueryError, "258"),
        (lambda p: p.extend([1, 2, -1]), InvalidQueryError, "-1"),
        (lambda p: p.extend([1, 2, 3], ended=[0, 0, 1]), InvalidInputError, "3 booleans"),
        (lambda p: p.extend("abc"), InvalidInputError, "3 integers"),
        (lambda p: p.select([0, 1]), InvalidInputError, "3 integers"),
        (lambda p: p.select([0, 1, 3]), InvalidInputError, "0 to 2"),
        (lambda p: p.select([-1, 1, 2]), InvalidInputError, "0 to 2"),
    ],
)
def test_wrong_arguments_are_rejected_and_change_nothing(mock, call, error, said):
    particles = mock().population(PROMPT, 3)
    with pytest.raises(error, match=said):
        call(particles)
    assert particles.continuations == [[]] * 3
    assert particles.length.tolist() == [2] * 3
    assert not particles.ended.any()


def test_a_population_takes_reversed_arrays(mock):
    particles = mock().population(PROMPT, 3)
    particles.extend(np.array([3, 2, 1])[::-1], ended=np.array([True, False, False])[::-1])
    assert particles.continuations == [[1], [2], []]
    particles.select(np.array([0, 1, 1])[::-1])
    assert particles.continuations == [[2], [2], [1]]


def test_token_given_for_an_ended_particle_is_ignored(mock):
    particles = mock().population(PROMPT, 2)
    particles.extend([1, 2], ended=[True, False])
    particles.extend([999, 3])
    assert particles.continuations == [[], [2, 3]]


@pytest.mark.parametrize("n", [0, -1, 1.5, "3"])
def test_the_number_of_particles_is_checked(mock, n):
    with pytest.raises(InvalidOptionError):
        mock().population(PROMPT, n)


def test_contexts_that_grow_too_long_are_rejected(mock):
    particles = mock(max_context=4).population(PROMPT, 2)
    for _ in range(2):
        asyncio.run(particles.logprobs())
        particles.extend([1, 2])
    asyncio.run(particles.logprobs())
    particles.extend([1, 2], ended=[True, False])
    with pytest.raises(InvalidQueryError, match="5 tokens"):
        asyncio.run(particles.logprobs())


def test_a_ready_made_draw_serves_a_population(mock):
    lm = mock()
    particles = lm.population(PROMPT, 20)
    among = draw_among(ALLOWED)
    for _ in range(3):
        found = asyncio.run(particles.logprobs(then=map(among, [at / 20 for at in range(20)])))
        ids, _ = zip(*found, strict=True)
        assert {*ids} <= {*ALLOWED.tolist()}
        particles.extend(ids, ended=[token == END for token in ids])
