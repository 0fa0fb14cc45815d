"""The suite never hangs: an engine that stops answering is a failure that says what was asked, and
what was found before is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from genlm.conformance.report import run
from genlm.core import hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine

from .faulty import OfTheMock

#: Lets go at the end what was held.
END = threading.Event()


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    END.clear()
    yield
    END.set()


class RowsStop(MockEngine):
    """The tenth batch never returns."""

    batches = 0

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        self.batches += 1
        if self.batches > 10:
            END.wait()
        return super().genlm_next_token_logprobs(queries)


class DrawsStop(MockEngine):
    @hookimpl
    def genlm_sample(self, queries, params):
        END.wait()
        return super().genlm_sample(queries, params)


class PinsStop(MockEngine):
    @hookimpl
    def genlm_cache_prefix(self, query):
        END.wait()
        return super().genlm_cache_prefix(query)


class ClearingStops(MockEngine):
    @hookimpl
    def genlm_clear_kv_cache(self):
        END.wait()


class AdaptersStop(MockEngine):
    @hookimpl
    def genlm_add_lora(self, adapter):
        END.wait()
        return super().genlm_add_lora(adapter)


class PlacesLeak(ContinuousMockEngine):
    """Two places for draws, which one that is dropped does not give back: the others wait, and the
    engine steps on."""

    taken = 0

    @hookimpl
    def genlm_step(self, queries, samples, scores, dropped):
        self.taken += len(dropped)
        if self.taken < 2:
            return self.advance([*queries, *samples, *scores], dropped)
        return []


@pytest.mark.parametrize(
    "engine", [RowsStop, DrawsStop, PinsStop, ClearingStops, AdaptersStop, PlacesLeak]
)
def test_an_engine_that_stops_answering(engine: Callable[..., MockEngine]) -> None:
    suite = OfTheMock(engine, effort=0.05)
    suite.patience = 1.0
    report = run(suite)
    END.set()
    assert not report.conforms
    assert "it hangs" in (report.not_loaded or report.failed[0].detail)


class Slow(MockEngine):
    """Answers everything, and would go on for hours."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        END.wait(0.2)
        return super().genlm_next_token_logprobs(queries)


def test_a_run_that_takes_too_long() -> None:
    """What was found until then is told, the clause under way fails, and the others are not
    tried."""
    suite = OfTheMock(Slow, effort=1.0)
    suite.longest = 64
    suite.deadline = 4.0
    report = run(suite)
    assert not report.conforms
    (late,) = report.failed
    assert "the time of the whole run was over, and " in late.detail
    passed = [verdict.clause for verdict in report.verdicts if verdict.status == "passed"]
    assert passed
    assert report.skipped[-1].detail.startswith("given up: the time of the whole run was over")
