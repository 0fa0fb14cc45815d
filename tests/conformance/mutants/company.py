"""Faults of continuous engines: somebody waits for somebody else's long work."""

from __future__ import annotations

from collections.abc import Sequence

from genlm.core import Answer, Query, hookimpl
from genlm.core.mock import ContinuousMockEngine
from genlm.core.types import Request, SampleRequest, ScoreRequest

from ..blind import of_the_mock
from .registry import breaks

breaks("nobody_is_passed_over")(of_the_mock.NewcomersAlwaysFirst)


class Continuous(ContinuousMockEngine):
    """Hands its steps to :meth:`step`."""

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
    ) -> list[Answer]:
        return self.step([*queries, *samples, *scores], dropped)

    def step(self, newcomers: list[Request], dropped: Sequence[Request]) -> list[Answer]:
        raise NotImplementedError


@breaks("short_draw_returns_before_a_long_one")
class DrawsEndTogether(Continuous):
    """A batch of draws is returned when the longest of them ends."""

    def step(self, newcomers: list[Request], dropped: Sequence[Request]) -> list[Answer]:
        longest = max(
            (r.params.max_tokens for r in newcomers if isinstance(r, SampleRequest)), default=0
        )
        answers = self.advance(newcomers, dropped)
        ended = [a for a in answers if isinstance(a.query, SampleRequest) and longest > 1]
        for answer in ended:
            self._in_flight[answer.query] = longest
        return [answer for answer in answers if answer not in ended]


@breaks("row_during_a_draw")
class RowsWaitForTheDraw(Continuous):
    """While a draw is in flight, rows are admitted and make no progress."""

    def step(self, newcomers: list[Request], dropped: Sequence[Request]) -> list[Answer]:
        in_flight = [*self._in_flight, *newcomers]
        if any(isinstance(request, SampleRequest) for request in in_flight):
            for request in in_flight:
                if isinstance(request, Query):
                    self._in_flight[request] = self._steps + 1
            newcomers = [request for request in newcomers if not isinstance(request, Query)]
        return self.advance(newcomers, dropped)


@breaks("cancelled_draw_ends")
class DroppedDrawsRunOn(Continuous):
    """What is dropped is drawn to its end, and then answered."""

    def step(self, newcomers: list[Request], dropped: Sequence[Request]) -> list[Answer]:
        answers = self.advance(newcomers)
        while any(request in self._in_flight for request in dropped):
            answers += self.advance([])
        return answers
