"""Faults in single rows, and in those of a batch."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from genlm.core import Answer, hookimpl
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine
from genlm.core.types import ReductionRequest

from .registry import MUTANTS

BEGIN, END = ByteTokenizer.bos_token_id, ByteTokenizer.eos_token_id
BLOCK = 16


class OfAnother(MockEngine):
    """Its rows are those of the query that ``change`` makes of each."""

    def row(self, query):
        return super().row(self.change(query))


class Changed(MockEngine):
    """Its rows are what ``change`` makes of the right ones."""

    def row(self, query):
        return self.change(query, super().row(query))


class BatchOfOthers(MockEngine):
    """It answers a batch with the rows of the one that ``change`` makes of it."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return super().genlm_next_token_logprobs(self.change(queries))


class BatchChanged(MockEngine):
    """It answers a batch with what ``change`` makes of the right rows."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return self.change(queries, super().genlm_next_token_logprobs(queries))


def of(query, *token_ids):
    """The query with other tokens."""
    return evolve(query, token_ids=token_ids)


def without_padding(engine, query):
    ids = query.token_ids
    while len(ids) > 1 and ids[-1] == END:
        ids = ids[:-1]
    return of(query, *ids)


def with_a_flat_tail(engine, query, row):
    few = row < -11.5
    if few.any() and not query.cold:
        row[few] = row[few].logsumexp(0) - math.log(int(few.sum()))
    return row


MUTANTS.changes(
    Changed,
    # The sum of a row is computed in a shorter type.
    ("NormalisedRoughly", "row_is_normalised", lambda e, q, row: row + 1.5e-4),
    # Tokens less likely than 1e-5 share their total mass evenly.
    ("TailIsFlat", "warm_row_equals_cold_row", with_a_flat_tail),
)
MUTANTS.changes(
    Changed,
    # Long contexts take another path, whose output is in half precision.
    (
        "LongRowsInHalf",
        "rows_are_as_precise_at_every_length",
        lambda e, q, row: row if q.length < 200 else row.half().float().log_softmax(-1),
    ),
    max_context=1024,
)
MUTANTS.changes(
    Changed,
    # Warm rows of more than 1,500 tokens are computed more coarsely.
    (
        "CoarseBeyondFifteenHundred",
        "contexts_twice_as_long_each_time",
        lambda e, q, row: row.half().float() if q.length > 1500 and not q.cold else row,
    ),
    max_context=3000,
)
MUTANTS.changes(
    OfAnother,
    # A text begins with its first token, so a context without it gets one.
    (
        "AddsTheBeginning",
        "padding_is_not_known_by_its_value",
        lambda e, q: q if q.token_ids[0] == BEGIN else of(q, BEGIN, *q.token_ids),
    ),
    # The end token is the padding token, and padding is found by value.
    ("TrimsPadding", "padding_is_not_known_by_its_value", without_padding),
    # A long context loses a part of its state: https://github.com/jundot/omlx/issues/3777
    (
        "FirstTokenForgotten",
        "row_depends_on_every_token",
        lambda e, q: of(q, 0, *q.token_ids[1:]) if q.length > 48 else q,
    ),
    # Tokens at the end of the vocabulary have one embedding:
    # https://github.com/huggingface/trl/issues/3425
    (
        "AddedTokensUnknown",
        "every_token_has_a_row_of_its_own",
        lambda e, q: of(q, *(min(i, e.vocab_size - 8) for i in q.token_ids)),
    ),
    # One token less than ``max_context`` fits: the first one goes, in cold rows too.
    (
        "LimitOneTooLong",
        "longest_context",
        lambda e, q: of(q, *q.token_ids[1:]) if q.length == e.max_context else q,
    ),
    (
        "LastPositionMissing",
        "longest_context",
        lambda e, q: of(q, *q.token_ids[1:]) if q.length == e.max_context and not q.cold else q,
    ),
    ("AdaptersIgnored", "adapter_changes_the_rows", lambda e, q: evolve(q, adapter=None)),
)
MUTANTS.changes(
    OfAnother,
    # A last chunk of one token is taken for padding.
    (
        "LastChunkOfOneTokenIsPadding",
        "last_chunk_of_one_token",
        lambda e, q: of(q, *q.token_ids[:-1], 0) if q.length > 64 and q.length % 64 == 1 else q,
    ),
    # Positions are clamped to 511, in cold rows too: beyond it the order of tokens is lost.
    # https://github.com/kvcache-ai/ktransformers/issues/73
    (
        "PositionsEndAt512",
        "cold_rows_are_the_reference",
        lambda e, q: of(q, *q.token_ids[:511], *sorted(q.token_ids[511:])),
    ),
    max_context=1024,
)


# --- batches --------------------------------------------------------------------------------------


def shared_by(key):
    """Queries of a batch that have the same key share a row."""

    def change(engine, queries):
        known = {}
        return [known.setdefault(key(engine, query), query) for query in queries]

    return change


once_per_tokens = shared_by(lambda engine, query: query.token_ids)


def behind_pinned_prefixes(engine, query):
    """The tokens after a pinned prefix."""
    for pinned in engine.pinned:
        length = pinned.length
        begins = pinned.adapter == query.adapter and query.token_ids[:length] == pinned.token_ids
        if begins and BLOCK < length < query.length:
            return query.token_ids[length:]
    return query


def without_last_token_of_the_vocabulary(engine, queries):
    if len(queries) == 1:
        return queries
    last = engine.vocab_size - 1
    return [of(query, *(i if i != last else 0 for i in query.token_ids)) for query in queries]


MUTANTS.changes(
    BatchOfOthers,
    # A large batch is sorted by length for padding, and its rows are not put back.
    (
        "SortedAndNotPutBack",
        "batch_answers_in_order",
        lambda e, qs: sorted(qs, key=lambda q: -q.length) if len(qs) > 4 else qs,
    ),
    (
        "DeduplicationBySuffix",
        "same_tail_under_different_prefixes",
        shared_by(lambda e, q: q.token_ids[-1]),
    ),
    (
        "DeduplicationBehindPinnedPrefixes",
        "same_tail_under_different_prefixes",
        shared_by(behind_pinned_prefixes),
    ),
    # A batch computes each context once, with the adapter that comes first.
    ("OncePerTokens", "adapters_changed_in_flight", once_per_tokens),
    ("EqualContextsComputedOnce", "adapters_in_one_batch", once_per_tokens),
    # The adapter of the first query is applied to the whole batch.
    (
        "AdapterBleedsIntoTheBatch",
        "adapters_in_one_batch",
        lambda e, qs: [evolve(q, adapter=qs[0].adapter) for q in qs],
    ),
    # The last token of the vocabulary has no place in the table of a batch.
    (
        "LastTokenOutOfTheTable",
        "tokens_from_all_over_the_vocabulary",
        without_last_token_of_the_vocabulary,
    ),
)


def third_sibling_as_the_first(engine, queries, rows):
    """Of contexts in a batch of more than six that fork from one long parent."""
    children = {}
    for i, query in enumerate(queries):
        siblings = children.setdefault(query.token_ids[:-1], [])
        siblings.append(i)
        if query.length > 22 and len(siblings) == 3 and len(queries) > 6:
            rows[i] = rows[siblings[0]]
    return rows


def in_one_buffer(engine, queries, rows):
    """https://github.com/sgl-project/sglang/pull/35546"""
    buffer = engine.__dict__.setdefault("buffer", torch.empty(512, rows.shape[1]))
    return buffer[: len(rows)].copy_(rows)


MUTANTS.changes(
    BatchChanged,
    ("SharedOutputBuffer", "contract_is_kept_throughout", in_one_buffer),
    (
        "BatchesInHalf",
        "batch_answers_in_order",
        lambda e, qs, rows: rows.bfloat16().float().log_softmax(-1) if len(qs) > 2 else rows,
    ),
    # Rows beyond the first 128 come back in the opposite order:
    # https://github.com/ggml-org/llama.cpp/pull/14853
    (
        "SecondMicroBatchReversed",
        "large_batch",
        lambda e, qs, rows: torch.cat([rows[:128], rows[128:].flip(0)]),
    ),
    ("ThirdSiblingGetsTheFirst", "growing_particles", third_sibling_as_the_first),
)


class Reduces(ContinuousMockEngine):
    """Applies functions of rows itself."""

    @hookimpl
    def genlm_step(self, queries, samples, scores, reductions, dropped):
        return self.advance([*queries, *samples, *scores, *reductions], dropped)


@MUTANTS.breaks("functions_of_rows")
class ResultsInTheOrderOfContexts(Reduces):
    """Gives results of functions back in the order of the contexts, not of the requests."""

    def _answers(self, finished):
        answers = super()._answers(finished)
        made = [each for each in answers if isinstance(each.request, ReductionRequest)]
        others = [each for each in answers if not isinstance(each.request, ReductionRequest)]
        ordered = sorted(made, key=lambda each: each.request.query.token_ids)
        pairs = zip(made, ordered, strict=True)
        return [*others, *(Answer(one.request, other.result) for one, other in pairs)]


@MUTANTS.breaks("functions_of_rows")
class OneExceptionForAll(Reduces):
    """If a function raises for one caller, all of its callers get the exception."""

    def _answers(self, finished):
        answers = super()._answers(finished)
        failed = {}
        for request, result in answers:
            if isinstance(request, ReductionRequest) and isinstance(result, Exception):
                failed[request.then.function] = result
        return [
            Answer(request, failed.get(request.then.function, result))
            if isinstance(request, ReductionRequest)
            else Answer(request, result)
            for request, result in answers
        ]
