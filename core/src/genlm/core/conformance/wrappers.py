"""Clauses on wrappers: one that changes rows is heard by every method, and one that loses an answer
is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from genlm.core.conformance.compare import TOP_FACTOR, brief, check
from genlm.core.conformance.subject import Subject
from genlm.core.errors import PluginError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import Query, TokenIds

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


class LostAnswerClauses:
    """What a wrapper loses."""

    def test_lost_answer_is_an_error(self, live: Subject) -> None:
        """Where a wrapper loses the row of one request of several, that request gets a
        ``PluginError`` that names the wrapper, and the others their rows."""
        contexts = live.contexts.many(8)
        lost = contexts[3]
        for context in contexts:
            live.cold(context)
        live.reset()
        live.gate.lose(lost)
        for outcome, context in zip(live.gather(contexts), contexts, strict=True):
            if context == lost:
                check(
                    isinstance(outcome, PluginError) and "EngineGate" in str(outcome),
                    f"a wrapper, EngineGate, lost the row of {brief(lost)}; its caller got "
                    f"{outcome!r:.200}, and not a PluginError that names the wrapper",
                )
            else:
                live.expect(outcome, context, how=f"while a wrapper lost the row of {brief(lost)}")
        live.gate.reset()
        live.check_row(lost, how="after a wrapper had lost its row once")


class ChangedRowClauses:
    """What a wrapper changes."""

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
                expected = float(changed[token_id])
                behind = float(changed.max()) - expected
                near = TOP_FACTOR * live.atol * max(1.0, abs(expected))
                check(behind <= near, f"{what}: {behind:.3g} (log) behind the most likely one")
                check(
                    abs(float(score[i]) - expected) <= near,
                    f"{what}: scores {float(score[i]):.6g}, its row has {expected:.6g}",
                )
