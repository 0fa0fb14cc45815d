"""Samples with their log-probabilities: `lm.sample_particles`."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from genlm.core import InvalidOptionError, MockAsyncLM, Particle

END = 257
PROBABILITIES = {10: 0.5, 20: 0.3, 30: 0.15, END: 0.05}


class FewTokens(MockAsyncLM):
    """The same four tokens in every context."""

    def _get_logprobs(self, token_ids):
        row = torch.full((258,), -float("inf"))
        row[list(PROBABILITIES)] = torch.tensor(list(PROBABILITIES.values())).log()
        return row


@pytest.mark.parametrize(
    ("how", "proposal"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5, "top_k": 3, "min_p": 0.3}, {10: 0.25, 20: 0.09}),
        ({"temperature": 0}, {10: 1.0}),
    ],
)
def test_a_particle_has_the_probabilities_of_all_that_was_drawn(mock, how, proposal) -> None:
    lm = mock(FewTokens)
    particles = lm.sample_particles_sync([1], 30, 12, seed=3, **how)
    total = sum(proposal.values())
    for particle in particles:
        drawn = (*particle.token_ids, particle.stop_token_id)
        tokens = [token_id for token_id in drawn if token_id is not None]
        assert END not in particle.token_ids
        assert len(tokens) == 12 or tokens[-1] == END
        assert particle.logprob == pytest.approx(sum(math.log(PROBABILITIES[t]) for t in tokens))
        assert particle.proposal_logprob == pytest.approx(
            sum(math.log(proposal[t] / total) for t in tokens)
        )
        assert particle.log_weight == particle.logprob - particle.proposal_logprob
    if END in proposal and how == {}:
        assert {p.stop_token_id for p in particles} == {None, END}


def test_particles_equal_the_draws_of_batch_sample(mock) -> None:
    lm = mock()
    how = {"eos_token_ids": [], "seed": 4, "top_k": 30}
    particles = lm.sample_particles_sync([1, 2], 6, 9, **how)
    assert [list(each.token_ids) for each in particles] == lm.batch_sample_sync(
        [[1, 2]] * 6, 9, **how
    )
    scores = lm.sequence_logprobs_sync([1, 2], particles[0].token_ids)
    assert particles[0].logprob == pytest.approx(float(scores.double().sum()), abs=1e-5)


def test_an_adapter_is_chosen_by_its_name(mock) -> None:
    lm = mock()
    lm.add_new_lora("folder", "poems")
    (base,) = lm.sample_particles_sync([1], 1, 5, seed=1)
    (adapted,) = lm.sample_particles_sync([1], 1, 5, seed=1, lora_name="poems")
    assert base.token_ids != adapted.token_ids


def test_particles_share_batches_and_zero_particles_draw_nothing(mock, gate) -> None:
    lm = mock()
    asyncio.run(lm.sample_particles([1], 16, 1, seed=0))
    assert gate.batches == [[(1,)]]  # their first row is equal, so it is computed once
    (nothing,) = lm.sample_particles_sync([1], 1, 0)
    assert nothing == Particle((), None, 0.0, 0.0)


@pytest.mark.parametrize("n", [0, 1.5])
def test_number_of_particles_is_checked(mock, n) -> None:
    with pytest.raises(InvalidOptionError, match="n must be an integer of at least 1"):
        mock().sample_particles_sync([1], n, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": ["x"]}, "no argument stop: a stop string is for what is built on top"),
        ({"max_length": 3}, "no argument max_length: max_tokens is the most tokens to draw"),
        ({"n": 3}, "no argument n: .*sample_particles"),
        ({"temp": 3}, "no argument temp: temperature is its name"),
        ({"logit_bias": {}}, "no argument logit_bias: a hook changes rows"),
        ({"temprature": 3}, r"no argument temprature: did you mean temperature\?"),
        ({"xyzzy": 3}, "no argument xyzzy; it has prompt_token_ids, max_tokens, eos_token_ids,"),
    ],
)
def test_a_keyword_that_sample_lacks_is_an_option_rejected(mock, given, said) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        mock().sample_sync([1], **given)
    with pytest.raises(InvalidOptionError, match=r"^sample has no argument"):
        asyncio.run(mock().sample([1], **given))


def test_stop_tokens_may_be_given_by_position_as_for_a_draw(mock) -> None:
    lm = mock(FewTokens)
    by_position = lm.sample_particles_sync([1], 5, 12, [10], seed=3)
    assert by_position == lm.sample_particles_sync([1], 5, 12, eos_token_ids=[10], seed=3)
    assert 10 in {particle.stop_token_id for particle in by_position}
