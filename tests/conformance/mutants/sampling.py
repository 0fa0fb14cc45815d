"""Faults in samples and scores."""

from __future__ import annotations

import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine

from .registry import MUTANTS, OneAfterTheOther, breaks
from .rows import of


class DrawnWithOthers(MockEngine):
    """Draws with what ``change`` makes of the parameters, given those of the whole batch."""

    @hookimpl
    def genlm_sample(self, queries, params):
        return super().genlm_sample(queries, [self.change(p, params) for p in params])


MUTANTS.changes(
    DrawnWithOthers,
    # The whole batch has one generator, so every sample depends on the size of the batch.
    (
        "SeedDependsOnTheBatch",
        "seed_fixes_the_draw",
        lambda e, p, batch: p if p.seed is None else evolve(p, seed=p.seed + len(batch) - 1),
    ),
    ("SeedZeroIsNone", "seed_fixes_the_draw", lambda e, p, batch: evolve(p, seed=p.seed or None)),
    ("DrawsWithoutEntropy", "draws_are_separate", lambda e, p, batch: evolve(p, seed=p.seed or 0)),
    # Temperature 0 is a low temperature, at which the second most likely token may be drawn.
    (
        "ColdIsOnlyCool",
        "temperature_zero_is_argmax",
        lambda e, p, batch: p if p.temperature else evolve(p, temperature=0.5, seed=0),
    ),
    ("TopKIgnored", "top_k_and_top_p", lambda e, p, batch: evolve(p, top_k=None)),
    (
        "OneTooManyInTopK",
        "options_together",
        lambda e, p, batch: evolve(p, top_k=p.top_k + 1) if (p.top_k or 1) > 1 else p,
    ),
    # A top_p that is 0 in half precision counts as none.
    (
        "TinyNucleusIsNone",
        "top_k_and_top_p",
        lambda e, p, batch: evolve(p, top_p=None) if (p.top_p or 1.0) < 1e-5 else p,
    ),
    (
        "OneTokenTooFew",
        "max_tokens",
        lambda e, p, batch: evolve(p, max_tokens=max(p.max_tokens - 1, 1)),
    ),
    # The fast path for samples without top_k and top_p takes no temperature above 1.
    (
        "PlainTemperatureClipped",
        "frequencies_agree_with_rows",
        lambda e, p, batch: (
            p if p.top_k or p.top_p else evolve(p, temperature=min(p.temperature, 1.0))
        ),
    ),
    (
        "StopsOfTheFirst",
        "cancelled_requests_leave_nothing",
        lambda e, p, batch: evolve(p, stop_token_ids=batch[0].stop_token_ids),
    ),
    # It stops although it is not listed: https://github.com/vllm-project/vllm/issues/4589
    (
        "EndTokenAlwaysStops",
        "draws_of_full_length",
        lambda e, p, batch: evolve(
            p, stop_token_ids=p.stop_token_ids | {ByteTokenizer.eos_token_id}
        ),
    ),
    # Samples of a large batch have a top_k that another request asked for.
    (
        "NeighboursTopK",
        "first_and_last_token_stop",
        lambda e, p, batch: evolve(p, top_k=1) if len(batch) > 40 else p,
    ),
    # The token is tested as a truth value before it is looked for among the stop tokens.
    (
        "TokenZeroNeverStops",
        "first_and_last_token_stop",
        lambda e, p, batch: evolve(p, stop_token_ids=p.stop_token_ids - {0}),
    ),
)


class OneByOne(OneAfterTheOther, MockEngine):
    """Draws each token by a sample of its own, from the context and with the parameters that
    ``change`` makes of the right ones, given how many were drawn before."""

    def _draw(self, query, params):
        drawn = []
        while len(drawn) < params.max_tokens:
            context = query.extended(tuple(drawn))
            how = evolve(params, max_tokens=1)
            one = super()._draw(*self.change(context, how, len(drawn)))
            if not one:
                break
            drawn += one
        return drawn


def seeded(params, n):
    """Parameters for the token after ``n`` others."""
    return params if params.seed is None else evolve(params, seed=1000 * params.seed + n)


def stumbling(context):
    ids = context.token_ids
    return of(context, *ids[:-2], ids[-1]) if len(ids) > 64 and len(ids) % 64 == 1 else context


def nucleus_first(engine, context, params, n):
    """The nucleus is that of the row as it is, before the temperature and ``top_k``."""
    if params.top_p is not None and params.temperature > 0:
        mass = engine.row(context).exp().sort(descending=True).values.cumsum(0)
        nucleus = int((mass < params.top_p).sum()) + 1
        top_k = min(nucleus, params.top_k or nucleus)
        params = evolve(params, top_p=None, top_k=top_k)
    return context, seeded(params, n)


def third_of_a_draft(engine, context, params, n):
    """The third token of a greedy sample is taken from a draft, unseen."""
    if params.temperature == 0.0 and n == 2:
        params = evolve(params, temperature=100.0, seed=0)
    return context, seeded(params, n)


MUTANTS.changes(
    OneByOne,
    # Steps get seeds so alike that every token is drawn at the same quantile:
    # https://github.com/kekzl/imp/pull/1143
    (
        "EveryTokenTheSameQuantile",
        "successive_tokens_are_independent",
        lambda e, context, p, n: (context, p),
    ),
    # A sample has 32 random numbers, and begins with the first one again.
    (
        "NumbersRepeatAfter32",
        "long_draws_do_not_repeat",
        lambda e, context, p, n: (context, seeded(p, n % 32)),
    ),
    # https://github.com/ml-explore/mlx-lm/pull/388
    ("NucleusOfWhatWasThere", "options_together", nucleus_first),
    ("DraftAccepted", "temperature_zero_is_argmax", third_of_a_draft),
    # The prompt is computed with the adapter, and the steps after it without.
    (
        "SecondTokenOfTheBaseModel",
        "adapter_in_sampling",
        lambda e, context, p, n: (evolve(context, adapter=None) if n else context, seeded(p, n)),
    ),
)
MUTANTS.changes(
    OneByOne,
    # The token drawn first in a new block does not see the one before it:
    # https://github.com/vllm-project/vllm/pull/34587
    (
        "DrawStumblesOverTheBlock",
        "draws_at_every_length",
        lambda e, context, p, n: (stumbling(context) if n else context, seeded(p, n)),
    ),
    max_context=1024,
)


@breaks("unseeded_after_seeded")
class SeedStaysSet(OneAfterTheOther, MockEngine):
    """A seed sets the one generator of the process: samples without a seed follow from it."""

    last = None

    def _draw(self, query, params):
        if params.seed is None and self.last is not None:
            params = evolve(params, seed=self.last + 1)
        self.last = params.seed
        return super()._draw(query, params)


@breaks("several_stop_tokens", "https://github.com/vllm-project/vllm/issues/792")
class FourthStopTokenForgotten(OneAfterTheOther, MockEngine):
    """There is room for three stop tokens; of others only the text is taken out."""

    def _draw(self, query, params):
        stops = params.stop_token_ids
        drawn = super()._draw(query, evolve(params, stop_token_ids=frozenset(sorted(stops)[:3])))
        return [token_id for token_id in drawn if token_id not in stops]


@breaks("longest_context")
class DrawEndsBeforeTheLimit(OneAfterTheOther, MockEngine):
    """A sample that would fill the context ends one token before."""

    def _draw(self, query, params):
        room = max(self.max_context - 1 - query.length, 1)
        return super()._draw(query, params)[:room]


@breaks("long_continuations")
class TokenBeforeTheStopLost(OneAfterTheOther, MockEngine):
    """Tokens that are held back until it is known whether the sample stops are lost when it
    does."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        stopped = len(drawn) < params.max_tokens and len(params.stop_token_ids) == 1
        return drawn[:-1] if stopped else drawn


@breaks(
    "long_continuations",
    "https://github.com/huggingface/transformers/issues/37574",
    max_context=1024,
)
class DrawsInARingOf128(OneAfterTheOther, MockEngine):
    """Tokens that are drawn are written into a ring of 128."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        over = drawn[128:]
        return over + drawn[len(over) : 128] + over


# --- scores ---------------------------------------------------------------------------------------


@breaks("long_continuations", "https://github.com/vllm-project/vllm/pull/29216", max_context=1024)
class ScoresFromAHundredOn(MockEngine):
    """From position 100 of a continuation on, the score is that of the token before."""

    def _score(self, query, continuation):
        score = super()._score(query, continuation)
        return torch.cat([score[:100], score[99:-1]]) if len(score) > 100 else score


@breaks(
    "scores_at_every_length", "https://github.com/sgl-project/sglang/pull/2083", max_context=1024
)
class ScoresAcrossChunks(MockEngine):
    """A prompt computed in chunks scores the first token of each chunk with the wrong logits."""

    def _score(self, query, continuation):
        score = super()._score(query, continuation)
        at = 256 - query.length
        if 1 <= at < len(score):
            score[at] = score[at - 1]
        return score


@breaks("scores_at_every_length", max_context=1024)
class LongScoresFromTheEnd(ContinuousMockEngine):
    """A score that reaches beyond 512 tokens takes every place for one beyond: as a rope that
    changes there does, where the whole text is one forward."""

    def _score(self, query, continuation):
        if query.length + len(continuation) > 512:
            query = of(query, 0, *query.token_ids[1:])
        return super()._score(query, continuation)


@breaks("contract_is_kept_throughout")
class SameTokensRaise(MockEngine):
    """Raises where two scores have the same tokens in all; one by one both are right."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        pairs = zip(queries, continuations, strict=True)
        texts = [(query.adapter, (*query.token_ids, *tokens)) for query, tokens in pairs]
        if len(texts) > len({*texts}):
            raise IndexError("rows of another score")
        return super().genlm_sequence_logprobs(queries, continuations)


@breaks("scores_together")
class EqualContinuationsScoredOnce(MockEngine):
    """In one batch equal continuations are scored once, whatever stands before them."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        known: dict = {}
        return [known.setdefault(tuple(c), s) for c, s in zip(continuations, scores, strict=True)]
