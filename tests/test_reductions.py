"""The ready-made functions of rows, beside the same in plain Python."""

from __future__ import annotations

import asyncio
import math
import random

import numpy as np
import pytest
import torch

from genlm.core import InvalidInputError, TokenCharacterTrie
from genlm.core.reductions import (
    draw,
    draw_among,
    likeliest,
    log_mass,
    logprobs_of,
    prefix_masses,
)
from tools.launched import Launched

from .conftest import gathered

pytestmark = pytest.mark.any_version

IDS = [*range(3, 258, 3)]
MASK = torch.tensor([at in IDS for at in range(258)])

#: Forms of the argument ``allowed``, each with the ids that it allows.
ALLOWED = {
    "ids": (torch.tensor(IDS), IDS),
    "a list": (IDS, IDS),
    "a mask": (MASK, IDS),
    "all": (None, [*range(258)]),
}


def by_hand(row, uniform, ids):
    """The token drawn, and the log of the mass of all ids, one addition at a time."""
    weights = [math.exp(row[at]) for at in ids]
    whole, so_far = sum(weights), 0.0
    for token_id, weight in zip(ids, weights, strict=True):
        so_far += weight
        if so_far > uniform * whole:
            return token_id, pytest.approx(math.log(whole), abs=1e-9)
    raise AssertionError("no token")


@pytest.mark.parametrize("name", ALLOWED)
def test_samples_invert_the_cumulative_distribution(mock, name):
    lm, source = mock(), random.Random(5)
    allowed, ids = ALLOWED[name]
    uniforms = [0.0, 0.999999, *(source.random() for _ in range(60))]
    found = gathered(
        *(lm.next_token_logprobs([at], then=draw(u, allowed)) for at, u in enumerate(uniforms))
    )
    rows = lm.batch_next_token_logprobs_sync([[at] for at in range(len(uniforms))])
    for row, uniform, result in zip(rows.tolist(), uniforms, found, strict=True):
        assert result == by_hand(row, uniform, ids)


def test_callers_with_different_masks_share_a_call(mock):
    lm, source = mock(), random.Random(6)
    masks = [ALLOWED[name][0] for name in ALLOWED] * 5
    ids = [ALLOWED[name][1] for name in ALLOWED] * 5
    uniforms = [source.random() for _ in masks]
    given = zip(uniforms, masks, strict=True)
    found = gathered(
        *(lm.next_token_logprobs([at], then=draw(*each)) for at, each in enumerate(given))
    )
    rows = lm.batch_next_token_logprobs_sync([[at] for at in range(20)]).tolist()
    assert found == [*map(by_hand, rows, uniforms, ids)]
    masses = gathered(
        *(lm.next_token_logprobs([at], then=log_mass(each)) for at, each in enumerate(masks))
    )
    assert masses == [pytest.approx(mass, abs=1e-9) for _, mass in found]


def test_a_draw_depends_on_the_set_of_ids_and_not_on_other_callers(mock):
    """A repeated id has its mass once, and the order of the ids is not that of the cumulative sum,
    whether the other callers of a step give the same object or not."""
    lm, source = mock(), random.Random(7)
    uniforms = [source.random() for _ in range(40)]
    other = lm.next_token_logprobs([2], then=draw(0.5, [200]))
    shuffled = [*reversed(IDS), *IDS[:20]]
    alone = gathered(*(lm.next_token_logprobs([1], then=draw(u, shuffled)) for u in uniforms))
    *beside, _ = gathered(
        *(lm.next_token_logprobs([1], then=draw(u, shuffled)) for u in uniforms), other
    )
    among = draw_among(shuffled)
    same = gathered(*(lm.next_token_logprobs([1], then=among(u)) for u in uniforms))
    row = lm.next_token_logprobs_sync([1]).tolist()
    assert alone == beside == same == [by_hand(row, uniform, IDS) for uniform in uniforms]
    mass = lm.next_token_logprobs_sync([1], then=log_mass(shuffled))
    assert mass == pytest.approx(alone[0][1], abs=1e-9)


@pytest.mark.parametrize(
    "allowed",
    [
        np.array(IDS, dtype=np.int16),
        np.array(IDS, dtype=np.uint8),
        np.array(IDS, dtype=np.uint16),
        np.array(IDS, dtype=np.uint64),
        np.array(IDS, dtype=">i4"),
        np.array(IDS)[::-1],
        np.array(IDS, dtype=np.int32),
        MASK.numpy(),
        {*IDS},
        range(3, 258, 3),
    ],
    ids=lambda given: f"{type(given).__name__} {getattr(given, 'dtype', '')}",
)
def test_allowed_tokens_may_be_any_array_of_ids_and_a_set(mock, allowed):
    lm = mock()
    wanted = lm.next_token_logprobs_sync([1], then=draw(0.3, torch.tensor(IDS)))
    assert lm.next_token_logprobs_sync([1], then=draw(0.3, allowed)) == wanted
    assert lm.next_token_logprobs_sync([1], then=draw_among(allowed)(0.3)) == wanted
    beside, _ = gathered(
        lm.next_token_logprobs([1], then=draw(0.3, allowed)),
        lm.next_token_logprobs([1], then=draw(0.3, None)),
    )
    assert beside == wanted


def test_a_number_that_is_not_one_is_rejected_beside_right_ones(mock):
    lm = mock()
    right, wrong = gathered(
        *(lm.next_token_logprobs([1], then=draw(u, None)) for u in (0.5, math.nan))
    )
    assert right == lm.next_token_logprobs_sync([1], then=draw(0.5, None))
    assert isinstance(wrong, InvalidInputError)


def test_draws_follow_the_distribution_exactly():
    """Of 2**14 equally spaced uniform numbers, each token gets its share, rounded up or down."""
    row = torch.log_softmax(torch.linspace(-3, 2, 7), 0)
    n = 1 << 14
    uniforms = [(at + 0.5) / n for at in range(n)]
    drawn = [token for token, _ in draw.function(row.repeat(n, 1), uniforms, [None] * n)]
    counts = torch.bincount(torch.tensor(drawn), minlength=7)
    assert (counts - n * row.double().exp()).abs().max() < 1 + 1e-3


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_without_mass_is_never_drawn(uniform):
    row = torch.full((6,), -math.inf)
    row[2], row[3] = math.log(0.25), math.log(0.75)
    for allowed in (None, [0, 1, 2, 3, 4, 5]):
        ((token, mass),) = draw.function(row[None].clone(), [uniform], [allowed])
        assert token == (2 if uniform == 0 else 3)
        assert mass == pytest.approx(0.0, abs=1e-7)


def test_log_mass_is_minus_infinity_if_nothing_allowed_has_mass():
    row = torch.tensor([[0.0, -math.inf, -math.inf]])
    ((token, mass),) = draw.function(row.clone(), [0.5], [[1, 2]])
    assert token in (1, 2)
    assert mass == -math.inf == log_mass.function(row.clone(), [[1, 2]])[0]


@pytest.mark.parametrize(
    "then",
    [
        draw(1.0, None),
        draw(-0.1, None),
        draw(math.nan, None),
        draw(0.5, [258]),
        draw(0.5, [-1]),
        draw(0.5, []),
        draw(0.5, torch.ones(3, dtype=torch.bool)),
        draw(0.5, torch.ones(3)),
        draw(None, None),
        draw("x", None),
        draw(torch.zeros(2), None),
        draw(0.5, "ab"),
        draw(0.5, torch.ones(258, dtype=torch.uint8)),
        log_mass([900]),
        logprobs_of([258]),
        logprobs_of([-1]),
        logprobs_of([1.7]),
        logprobs_of(7),
        logprobs_of(MASK),
        likeliest(-1),
        likeliest(2.0),
        likeliest(None),
        prefix_masses(TokenCharacterTrie([b"a", b"b"]))([b"a"]),
        prefix_masses(TokenCharacterTrie([b"a", b"b"]))(None),
    ],
)
def test_wrong_arguments_concern_their_caller_alone(mock, then):
    lm = mock()
    right = draw(0.5, None)
    refused, result = gathered(
        lm.next_token_logprobs([1], then=then), lm.next_token_logprobs([2], then=right)
    )
    assert isinstance(refused, InvalidInputError)
    assert result == lm.next_token_logprobs_sync([2], then=right)


def test_chosen_log_probabilities_and_the_likeliest(mock):
    lm = mock()
    row = lm.next_token_logprobs_sync([1])
    chosen = gathered(
        *(lm.next_token_logprobs([1], then=logprobs_of(ids)) for ids in ([7], [], [9, 257, 9]))
    )
    assert chosen == [[float(row[7])], [], [float(row[9]), float(row[257]), float(row[9])]]
    values, ids = row.sort(descending=True)
    ordered = [*zip(ids.tolist(), values.tolist(), strict=True)]
    best = gathered(*(lm.next_token_logprobs([1], then=likeliest(k)) for k in (0, 3, 999)))
    assert best == [[], ordered[:3], ordered]


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_masses_of_prefixes_match_the_trie(mock, device):
    lm = mock()
    trie = TokenCharacterTrie(lm.byte_vocab, device)
    masses = prefix_masses(trie)
    prefixes = [[b"a", b"zz"], [b""], [], [b"<", b"\xff", b"a"]]
    found = gathered(
        *(lm.next_token_logprobs([at], then=masses(own)) for at, own in enumerate(prefixes))
    )
    rows = lm.batch_next_token_logprobs_sync([[at] for at in range(4)])
    for row, own, result in zip(rows, prefixes, found, strict=True):
        assert result == [pytest.approx(trie.mass(row, each), rel=2e-6) for each in own]


@pytest.mark.parametrize(
    "give",
    [
        lambda k: (draw, [0.3] * k, [torch.tensor(IDS)] * k),
        lambda k: (draw, [0.3] * k, [None] * k),
        lambda k: (log_mass, [None] * k),
        lambda k: (logprobs_of, [[3, 4]] * k),
        lambda k: (likeliest, [3] * k),
    ],
)
def test_waits_for_a_device_do_not_depend_on_the_number_of_callers(give):
    def launches(k):
        function, *columns = give(k)
        rows = torch.randn(k, 258).log_softmax(-1)
        with Launched() as launched:
            function.function(rows, *columns)
        return launched.count

    assert launches(200) == launches(2)


def test_program_with_reductions_draws_the_same_tokens_as_with_rows(mock):
    async def by_rows(lm, ids, uniform, allowed):
        row = await lm.next_token_logprobs(ids)
        mass = row[allowed].double().exp().cumsum(0)
        place = torch.searchsorted(mass, uniform * mass[-1:], right=True)
        return int(allowed[place]), float(mass[-1].log())

    async def by_then(lm, ids, uniform, allowed):
        return await lm.next_token_logprobs(ids, then=draw(uniform, allowed))

    async def program(lm, extend):
        source = random.Random(1)
        texts = [[7] for _ in range(50)]
        gains = [0.0] * 50
        for _ in range(6):
            found = await asyncio.gather(
                *(extend(lm, ids, source.random(), torch.tensor(IDS)) for ids in texts)
            )
            texts = [[*ids, token] for ids, (token, _) in zip(texts, found, strict=True)]
            gains = [gain + mine for gain, (_, mine) in zip(gains, found, strict=True)]
        return texts, gains

    (texts, gains), (same, close) = (
        asyncio.run(program(mock(), extend)) for extend in (by_rows, by_then)
    )
    assert texts == same
    assert gains == pytest.approx(close, abs=1e-9)
