"""A clause on errors: the engine fails in the middle of its work."""

from __future__ import annotations

import pytest

from genlm.conformance.subject import Subject


class FaultClauses:
    """The engine fails in the middle of its work."""

    def test_error_inside_the_engine(self, live: Subject) -> None:
        """An error in the middle of a batch, with adapters and without: whoever gets no row gets
        the error, and the same batches are right afterwards."""
        names = [None, *live.loras][:3]
        most = live.contexts.limit - 1
        contexts = [live.contexts.long(min(n, most), i) for i, n in enumerate((3, 3, 5, 18))]
        mixed = [(context, name) for context in contexts[:2] for name in names]
        plain = [(context, None) for context in contexts]
        for context, name in {*mixed, *plain}:
            live.cold(context, name)
        failing = live.suite.fail_inside(live.lm)
        if failing is None:
            pytest.skip(
                "the suite cannot make this engine fail from inside; override fail_inside() where "
                "you can"
            )
        for asked in (mixed, plain, mixed[:1]):
            for times in (1, 1 << 20):
                live.clear()
                with failing(times):
                    outcomes = live.gather(*zip(*asked, strict=True))
                for outcome, (context, name) in zip(outcomes, asked, strict=True):
                    if not isinstance(outcome, Exception):
                        live.expect(outcome, context, name, how="in a batch that failed inside")
                # The same batch, the base model alone, and both.
                for again in (asked, plain, mixed, mixed[::-1]):
                    live.lm.clear_cache()
                    how = f"after the engine had failed inside {times}x"
                    live.check_rows(*zip(*again, strict=True), how=how)
