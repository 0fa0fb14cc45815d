"""Clauses on errors: the engine fails in the middle of its work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds


class FaultClauses:
    """The engine fails in the middle of its work."""

    @advise(
        "an adapter that was switched on or merged, or a half-written block, stays after an "
        "exception",
        "state_after_an_error",
        capability="errors",
    )
    def test_error_inside_the_engine(self, live: Subject) -> None:
        """After an error in the middle of a batch, with adapters and without, each request without
        a row gets the error, and the same batches then have the right rows."""
        names = [None, *live.loras][:3]
        most = live.contexts.limit - 1
        contexts = [live.contexts.long(min(n, most), i) for i, n in enumerate((3, 3, 5, 18))]
        mixed = [(context, name) for context in contexts[:2] for name in names]
        plain = [(context, None) for context in contexts]
        for context, name in {*mixed, *plain}:
            live.cold(context, name)
        failing = self._failing(live)
        for asked in (mixed, plain, mixed[:1]):
            for times in (1, 1 << 20):
                live.model.clear()
                with failing(times):
                    outcomes = live.gather(*zip(*asked, strict=True))
                for outcome, (context, name) in zip(outcomes, asked, strict=True):
                    if not isinstance(outcome, Exception):
                        live.expect.row(
                            outcome, context, name, how="in a batch in which an evaluation failed"
                        )
                # Then the same batch, the base model alone, and both are asked for again.
                for again in (asked, plain, mixed, mixed[::-1]):
                    live.lm.clear_cache()
                    failed = "one evaluation" if times == 1 else "every evaluation"
                    how = f"after {failed} of a batch had failed inside the engine"
                    live.check_rows(*zip(*again, strict=True), how=how)

    @advise("state is kept before it is computed", "error_inside_the_engine", capability="errors")
    def test_state_after_an_error(self, live: Subject) -> None:
        """A row, sample, score or pin that fails part-way leaves no incomplete state: the same
        context, its prefixes and its extensions are right afterwards."""
        most = min(live.longest, live.contexts.limit - 4)
        tail = tuple(live.contexts.tokens[:3])
        lengths = sorted({min(n, most) for n in (5, 33, 130)})
        contexts = [live.contexts.long(n, 2) for n in lengths]
        adapter = next(iter(live.loras), None)
        # Cold rows are computed before anything fails.
        for context in contexts:
            for end in range(len(tail)):
                live.cold(context + tail[:end], adapter)
        failing = self._failing(live)
        ways: dict[str, Callable[[TokenIds], Any]] = {
            "a row": lambda ids: live.gather([ids], [adapter]),
            "a draw": lambda ids: live.sample(ids, 3, temperature=0.0, lora_name=adapter),
            "a score": lambda ids: live.score(ids, tail, adapter),
            "a pin": lambda ids: live.lm.cache_kv(ids, lora_name=adapter),
        }
        for context in contexts:
            for what, ask in ways.items():
                live.model.clear()
                half = context[: len(context) // 2]
                live.ask(half, adapter)  # The request that fails begins with state that is kept.
                with failing(1 << 20), contextlib.suppress(Exception):
                    ask(context)
                # The longest context comes first: it would go on from a wrong state.
                for end in (2, 0, 1):
                    how = f"after {what} of {len(context)} tokens had failed half-way"
                    live.check_row(context + tail[:end], adapter, how=how)
                live.lm.clear_cache()
                live.check_row(half, adapter, how=f"after {what} that began with it had failed")

    def _failing(self, live: Subject) -> Callable[[int], AbstractContextManager[None]]:
        failing = live.suite.fail_inside(live.lm)
        if failing is None:
            pytest.skip(
                "the suite cannot make this engine fail from inside; override fail_inside() where "
                "you can"
            )

        @contextlib.contextmanager
        def provoked(times: int) -> Iterator[None]:
            live.gate.is_provoked = True
            with failing(times):
                yield
            live.gate.is_provoked = False

        return provoked
