"""Clauses on wrappers: a wrapper that changes rows affects every method."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from genlm.conformance.compare import TOP_FACTOR, check
from genlm.conformance.subject import Subject
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


class WrapperClauses:
    """Clauses on what a wrapper changes."""

    def test_every_method_gives_the_changed_rows(self, live: Subject) -> None:
        """With a wrapper that changes rows, all ways of asking, samples and scores tell the changed
        distribution."""
        prompt, other = live.contexts.stem[:4], live.contexts.stem[:2]
        length = min(8, live.contexts.limit - len(prompt))
        live.model.end()  # there may be no room for two models
        changing = Changing()
        with contextlib.closing(live.suite.load(wrappers=[changing])) as lm:
            rows = {
                "next_token_logprobs": live.run(lm.next_token_logprobs(prompt)),
                "next_token_logprobs, asked again": live.run(lm.next_token_logprobs(prompt)),
                "batch_next_token_logprobs": lm.batch_next_token_logprobs_sync([other, prompt])[1],
                "next_token_logprobs_uncached": lm.next_token_logprobs_uncached(prompt),
            }
            # The cold row comes last, so it is the wrapper's last result.
            cold = changing.returned[prompt]
            for method, row in rows.items():
                live.expect.same(row, cold, f"{method}, where a wrapper bans a token")
            drawn = live.run(lm.sample(prompt, length, [], temperature=0.0))
            score = live.run(lm.sequence_logprobs(prompt, drawn))
            for i, token_id in enumerate(drawn):
                changed = changing.returned.get((*prompt, *drawn[:i]))
                what = f"token {token_id} at place {i} of a draw, where a wrapper bans a token"
                check(changed is not None, f"{what}: not of a row that the wrapper had")
                assert changed is not None
                behind = float(changed.max() - changed[token_id])
                check(
                    behind <= TOP_FACTOR * live.expect.atol,
                    f"{what}: {behind:.3g} (log) behind the most likely one",
                )
                live.expect.score(float(score[i]), float(changed[token_id]), what)
