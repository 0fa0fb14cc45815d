"""Clauses on schedules: requests of every kind that arrive, leave and meet."""

from __future__ import annotations

from genlm.core.conformance.events import Arrival, Event, Leaving, schedules
from genlm.core.conformance.performance import check_schedule
from genlm.core.conformance.subject import Subject

#: After how many calls of the engine callers leave, in turn.
CALLS = (1, 2, 1, 3, 1, 5)


class ScheduleClauses:
    """Requests in flight do not disturb each other."""

    def test_cancelled_requests_leave_nothing(self, live: Subject) -> None:
        """Hundreds of draws that have begun, and of long prompts and scores that are half computed,
        are cancelled beside others, and then the same and others are asked: all give what they give
        alone."""
        for turn in range(live.scaled(24, 6)):
            check_schedule(live, _leaving(turn))
        if live.effort >= 1:  # minutes on a slow engine
            check_schedule(live, _leaving_alone(70))

    def test_requests_on_a_schedule(self, live: Subject) -> None:
        """Rows, draws and scores of all lengths, options and adapters arrive alone and in bursts,
        some leave, and adapters change in between: each of them gives what it gives alone."""

        @live.for_all(
            examples=14,
            least=4,
            schedule=schedules(len(live.loras) > 1, live.scaled(80, 17)),
        )
        def requests_on_a_schedule(schedule: list[Event]) -> None:
            check_schedule(live, schedule)


def _leaving(turn: int) -> list[Event]:
    long_score = turn % 3 == 0  # in some engines nothing else is in flight beside one
    some = range(4) if turn % 2 else [turn % 4]
    return [
        Arrival(0, "draws", 4, 9 * turn),  # of 5, 2, 3 and 4 tokens
        Arrival(0, "growing draws", 8, turn),
        *([Arrival(0, "scores", 1, 3 + 4 * turn)] if long_score else []),
        Arrival(1, "long rows", 14, turn),
        Arrival(0, "long rows", 2, turn + 14),
        Leaving(CALLS[turn % len(CALLS)], 4, all=True),
        Leaving(0, 12 + long_score, all=True),
        *([Leaving(0, 12)] if long_score else []),
        *(Leaving(0, which) for which in some),
        Arrival(0, "rows", 3, 7 * turn),
        Arrival(0, "draws", 2, 5 * turn + 1),
        *([Arrival(0, "scores", 2, 3 + 4 * (turn + 1))] if long_score else []),
        Arrival(1, "long rows", 3, turn),
    ]


def _leaving_alone(times: int) -> list[Event]:
    """Long contexts that begin with nothing else in flight, and leave: who has the last place."""
    events: list[Event] = []
    for turn in range(times):
        events += [Arrival(0, "long rows", 1, turn), Leaving(1, turn)]
    return [*events, Arrival(1, "rows", 3, 0), Arrival(0, "long rows", 2, 0)]
