"""Clauses on rows as the core hands them to callers: type, methods, whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from genlm.conformance.compare import check
from genlm.conformance.properties import for_all
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch


class RowClauses:
    """Clauses on the rows that a caller gets, and on who owns their memory."""

    def test_vocabulary_is_consistent(self, live: Subject) -> None:
        """``byte_vocab[i].token_id == i``, ``str_vocab`` is as long, and some tokens have bytes."""
        vocab, strings = live.lm.byte_vocab, len(live.lm.str_vocab)
        in_order = all(token.token_id == i for i, token in enumerate(vocab))
        check(in_order, "byte_vocab[i].token_id is not i")
        check(strings == len(vocab), f"{strings} strings for {len(vocab)} tokens")
        check(any(token.byte_string for token in vocab), "no token has bytes")

    def test_every_way_of_asking_agrees(self, live: Subject) -> None:
        """Asynchronous, blocking, batched, uncached: all the same row, float32 of one number per
        token of ``byte_vocab``, without autograd graph."""

        @for_all(live, context=live.contexts.any())
        def every_way_of_asking_agrees(context: TokenIds) -> None:
            for way, row in every_way(live, context).items():
                shape = tuple(row.shape)
                check(shape == (len(live.lm.byte_vocab),), f"{way}: shape {shape}")
                check(str(row.dtype) == "torch.float32", f"{way}: {row.dtype}, not torch.float32")
                check(not row.requires_grad, f"{way}: the row requires grad")
                live.expect.row(row, context, how=f"by {way}")

    def test_equal_questions_share_one_slot(self, live: Subject) -> None:
        """The engine sees each of the pending requests once, however many callers ask it."""

        @for_all(live, context=live.contexts.any(), callers=st.integers(2, 4))
        def equal_questions_share_one_slot(context: TokenIds, callers: int) -> None:
            live.gather([context] * callers)
            times = sum(query.token_ids == context for query in live.gate.seen)
            check(
                times == 1,
                f"{callers} callers asked for {list(context)} together: the engine saw it {times} "
                "times",
            )

    def test_row_belongs_to_its_caller(self, live: Subject) -> None:
        """Writing into a row changes no other caller's row, and nothing that is cached."""

        @for_all(live, context=live.contexts.any(), callers=st.integers(2, 4))
        def row_belongs_to_its_caller(context: TokenIds, callers: int) -> None:
            mine, *others = live.gather([context] * callers)
            mine.fill_(0.0)
            for row in others:
                live.expect.row(row, context, how="after another caller of it wrote into its row")
            live.ask(context).fill_(0.0)
            live.check_row(context, how="after an earlier caller wrote into its row")


def every_way(live: Subject, context: TokenIds) -> dict[str, torch.Tensor]:
    """The row of a context by every method that gives one. The first comes from the engine, the
    others perhaps from a cache."""
    lm = live.lm
    return {
        "next_token_logprobs": live.run(lm.next_token_logprobs(context)),
        "next_token_logprobs_sync": lm.next_token_logprobs_sync(context),
        "batch_next_token_logprobs": live.run(lm.batch_next_token_logprobs([context]))[0],
        "batch_next_token_logprobs_sync": lm.batch_next_token_logprobs_sync([context])[0],
        "next_token_logprobs_uncached": lm.next_token_logprobs_uncached(context),
    }
