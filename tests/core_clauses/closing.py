"""Clauses on a model that is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from genlm.conformance.compare import check
from genlm.conformance.subject import Subject
from genlm.core.errors import ModelClosedError


class ClosingClauses:
    """After the end."""

    def test_close_again_and_use_after_close(self, live: Subject) -> None:
        """Closing twice is nothing; everything asked of a closed model is a ``ModelClosedError``,
        at once."""
        lm, six = live.lm, live.contexts.stem[:6]
        live.ask(six)
        outcomes = [live.outcome(live.thread(lm.close)) for _ in range(2)]
        live.model.end(closed=True)
        for which, outcome in zip(("close()", "a second close()"), outcomes, strict=True):
            check(outcome is None, f"{which} ended in {outcome!r:.200}")

        async def asked(ask: Callable[[], object]) -> object:
            answer = ask()
            return await answer if asyncio.iscoroutine(answer) else answer

        calls: dict[str, Callable[[], object]] = {
            "next_token_logprobs": lambda: lm.next_token_logprobs(six),
            "batch_next_token_logprobs": lambda: lm.batch_next_token_logprobs([six]),
            "sample": lambda: lm.sample(six, 1, []),
            "next_token_logprobs_sync": lambda: lm.next_token_logprobs_sync(six),
            "next_token_logprobs_uncached": lambda: lm.next_token_logprobs_uncached(six),
            "cache_kv": lambda: lm.cache_kv(six),
            "clear_kv_cache": lm.clear_kv_cache,
        }
        for method, ask in calls.items():
            call = live.thread(lambda ask=ask: live.run(asked(ask)))  # type: ignore[misc]
            outcome = live.outcome(call)
            check(
                isinstance(outcome, ModelClosedError),
                f"{method} on a closed model ended in {outcome!r:.200}",
            )
