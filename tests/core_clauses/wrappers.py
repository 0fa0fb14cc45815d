"""Clauses on wrappers: one that changes rows is heard by every method, one that loses a row is
named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from genlm.conformance.agreement import expect_score
from genlm.conformance.compare import TOP_FACTOR, brief, check
from genlm.conformance.driver import Outcome
from genlm.conformance.subject import Subject
from genlm.core.errors import PluginError
from genlm.core.hookspecs import hookimpl
from genlm.core.lm import AsyncLM
from genlm.core.types import Answer, Query, TokenIds

if TYPE_CHECKING:
    import torch


class Changing:
    """Bans the most likely token of every row, and remembers what it returned."""

    def __init__(self) -> None:
        self.returned: dict[TokenIds, torch.Tensor] = {}

    @hookimpl
    def genlm_process_logprobs(self, queries: Sequence[Query], rows: torch.Tensor) -> torch.Tensor:
        best = rows.argmax(dim=-1, keepdim=True)
        changed = rows.scatter(-1, best, -float("inf")).log_softmax(dim=-1)
        for query, row in zip(queries, changed, strict=True):
            self.returned[query.token_ids] = row.clone()
        return changed


class Losing:
    """Loses every row of one context."""

    def __init__(self, token_ids: TokenIds) -> None:
        self.token_ids: TokenIds | None = token_ids

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(
        self, queries: Sequence[Query]
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        rows = yield
        return rows[1:] if self.token_ids in [query.token_ids for query in queries] else rows

    @hookimpl(wrapper=True)
    def genlm_step(self) -> Generator[None, Sequence[Answer], Sequence[Answer]]:
        answers = yield
        return [a for a in answers if getattr(a.request, "token_ids", ()) != self.token_ids]


async def gathered(lm: AsyncLM, contexts: Sequence[TokenIds]) -> list[Outcome]:
    """Outcomes of requests that are asked together."""
    return await asyncio.gather(*map(lm.next_token_logprobs, contexts), return_exceptions=True)


class WrapperClauses:
    """What a wrapper changes, and loses."""

    def test_lost_answer_is_an_error(self, live: Subject) -> None:
        """Where a wrapper loses the row of one request of several, that request gets a
        ``PluginError`` that names the wrapper, and the others their rows."""
        contexts = live.contexts.many(8)
        lost = contexts[3]
        for context in contexts:
            live.cold(context)
        live.end()
        losing = Losing(lost)
        with contextlib.closing(live.suite.load([losing])) as lm:
            outcomes = live.run(gathered(lm, contexts))
            for outcome, context in zip(outcomes, contexts, strict=True):
                if context == lost:
                    check(
                        isinstance(outcome, PluginError) and "Losing" in str(outcome),
                        f"a wrapper, Losing, lost the row of {brief(lost)}; its caller got "
                        f"{outcome!r:.200}, and not a PluginError that names the wrapper",
                    )
                else:
                    live.expect(outcome, context, how=f"while a wrapper lost that of {brief(lost)}")
            losing.token_ids = None
            row = live.run(lm.next_token_logprobs(lost))
            live.expect(row, lost, how="after a wrapper had lost its row once")

    def test_changed_rows_are_what_every_method_gives(self, live: Subject) -> None:
        """With a wrapper that changes rows, all ways of asking, draws and scores tell the changed
        distribution."""
        prompt, other = live.contexts.stem[:4], live.contexts.stem[:2]
        length = min(8, live.contexts.limit - len(prompt))
        live.end()  # there may be no room for two
        changing = Changing()
        with contextlib.closing(live.suite.load([changing])) as lm:
            rows = {
                "next_token_logprobs": live.run(lm.next_token_logprobs(prompt)),
                "next_token_logprobs, asked again": live.run(lm.next_token_logprobs(prompt)),
                "batch_next_token_logprobs": lm.batch_next_token_logprobs_sync([other, prompt])[1],
                "next_token_logprobs_uncached": lm.next_token_logprobs_uncached(prompt),
            }
            # The cold row comes last, and is what the wrapper has returned last.
            cold = changing.returned[prompt]
            for method, row in rows.items():
                live.expect_row(row, cold, f"{method}, where a wrapper bans a token")
            drawn = live.run(lm.sample(prompt, length, [], temperature=0.0))
            score = live.run(lm.sequence_logprobs(prompt, drawn))
            for i, token_id in enumerate(drawn):
                changed = changing.returned.get((*prompt, *drawn[:i]))
                what = f"token {token_id} at place {i} of a draw, where a wrapper bans a token"
                check(changed is not None, f"{what}: not of a row that the wrapper had")
                assert changed is not None
                behind = float(changed.max() - changed[token_id])
                check(
                    behind <= TOP_FACTOR * live.atol,
                    f"{what}: {behind:.3g} (log) behind the most likely one",
                )
                expect_score(live, float(score[i]), float(changed[token_id]), what)
