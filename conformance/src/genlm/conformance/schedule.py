"""Schedules: requests of every kind that arrive, leave and meet, on a clock that counts the calls
of the engine. Each must get what it gets alone. (Why :mod:`genlm.conformance.programs` is another
random tester is said there.)"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import define, frozen
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from genlm.conformance.advice import advise
from genlm.conformance.agreement import MovedDraw, for_each_seed
from genlm.conformance.compare import Violation
from genlm.conformance.declaration import Declaration
from genlm.conformance.driver import Outcome, submitted
from genlm.conformance.properties import for_all
from genlm.conformance.scheduled import (
    REBOUND_ADAPTER,
    REQUESTS_OF_KIND,
    ScheduledRequest,
    ScheduledRow,
    growing_tokens,
    requests_of,
)
from genlm.conformance.subject import Subject
from genlm.core.errors import UnknownAdapterError

#: How many events a schedule has at most.
MAX_EVENTS = 10

#: How many lines of a long story are told from its beginning, and as many from its end.
STORY_LINES = 10

#: How many requests come at once: one, a few, more than 8, more than 64.
BURST_SIZES = (1, 2, 4, 9, 17, 66, 80)

#: After how many calls of the engine callers leave, in the turns of the clause.
CALLS_UNTIL_LEAVING = (1, 2, 1, 3, 1, 5)


@frozen
class Arrival:
    """Requests of one kind arrive together."""

    after: int  # calls of the engine since the event before
    kind: str
    count: int
    first: int  # of the requests of that kind


@frozen
class Leaving:
    """A caller goes, alone or with all who came together with it, unless it has been answered."""

    after: int
    which: int  # of all that were asked
    all: bool = False


@frozen
class Rebinding:
    """The name :data:`~genlm.conformance.scheduled.REBOUND_ADAPTER` is bound to another adapter, or
    its adapter is removed and added."""

    after: int
    to: int
    removed: bool = False


Event = Arrival | Leaving | Rebinding


#: Long scores that come once many samples have grown: after how many calls of the engine, and
#: which.
LATE_SCORES = ((8, 11), (0, 7), (0, 3), (8, 7), (0, 3))

#: More requests than an engine has places, or memory, for: they stay, and they leave.
CROWDS: tuple[Sequence[Event], ...] = (
    [
        Arrival(0, "growing draws", 66, 0),
        Arrival(0, "draws", 9, 0),
        Leaving(2, 0),
        Leaving(0, 1),
    ],
    # The contexts of the first three are prefixes of others that wait.
    [Arrival(0, "long rows", 18, 15), Leaving(1, 0), Leaving(0, 1), Leaving(0, 2)],
    [
        Arrival(0, "rows", 66, 0),
        Leaving(1, 0, all=True),
        Arrival(0, "rows", 9, 66),
    ],
    [
        Arrival(0, "growing draws", 80, 0),
        Leaving(2, 0, all=True),
        Arrival(1, "rows", 3, 0),
        Arrival(0, "draws", 2, 1),
    ],
    [
        Arrival(0, "growing draws", 40, 0),
        *(Arrival(after, "scores", 1, which) for after, which in LATE_SCORES),
    ],
)


class ScheduleClauses:
    """Requests in flight do not disturb each other."""

    @advise(
        "a slot, block or generator of a dropped request is reused with its old contents",
        "cancelled_requests_give_their_places_back",
        "dropped_under_one_adapter",
        capability="cancelling",
    )
    def test_cancelled_requests_leave_nothing(self, live: Subject) -> None:
        """Hundreds of running samples, long prompts and scores are cancelled beside other requests,
        and then the same and other requests are made: all get the answers that they get alone."""
        for crowd in CROWDS:
            check_schedule(live, crowd)
        check_schedule(live, _leaving_at_the_end())
        for turn in range(live.scaled(24, 3)):
            check_schedule(live, _leaving(turn))
        check_schedule(live, _leaving_alone("long rows", live.scaled(71, 13)))
        # On a slow engine this takes minutes.
        if live.effort >= 1:
            check_schedule(live, _leaving_alone("scores", 71))

    @advise(
        "requests in flight together share a slot, block, option or generator",
        "scores_together",
        "adapters_in_one_batch",
        "seed_fixes_the_draw",
    )
    def test_requests_on_a_schedule(self, live: Subject) -> None:
        """Rows, samples and scores of all lengths, options and adapters arrive singly and in
        bursts, some are cancelled, and adapters change in between: each gets the answer that it
        gets alone."""
        found = schedules(len(live.loras) > 1, live.scaled(80, 17))

        @for_all(live, examples=14, least=4, schedule=found)
        def requests_on_a_schedule(schedule: list[Event]) -> None:
            check_schedule(live, schedule)


def schedules(adapters: bool, most: int) -> SearchStrategy[list[Event]]:
    """Schedules with changes of adapters or without, and bursts of at most ``most``. Most of their
    places for events are filled, where the lists of Hypothesis are short on average; shrinking
    empties them."""
    after = st.sampled_from((0, 1, 1, 2, 3, 5, 8))
    bursts = st.sampled_from([count for count in BURST_SIZES if count <= most])
    events: list[SearchStrategy[Any]] = [
        st.builds(Arrival, after, st.just(kind), bursts, st.integers(0, different - 1))
        for kind, different in REQUESTS_OF_KIND.items()
    ]
    all_leave = st.sampled_from((False, False, False, True))
    events.append(st.builds(Leaving, after, st.integers(0, 99), all_leave))
    if adapters:
        events.append(st.builds(Rebinding, after, st.integers(0, 1), st.booleans()))
    places = st.tuples(*[st.one_of(st.none(), st.one_of(*events))] * MAX_EVENTS)
    return places.map(lambda found: [each for each in found if each is not None])


def _leaving(turn: int) -> list[Event]:
    # In some engines no other request is in flight beside a score, so not every turn has one.
    long_score = turn % 3 == 0
    some = range(4) if turn % 2 else [turn % 4]
    return [
        Arrival(0, "draws", 4, 9 * turn),  # of 5, 2, 3 and 4 tokens
        Arrival(0, "growing draws", 8, turn),
        *([Arrival(0, "scores", 1, 3 + 4 * turn)] if long_score else []),
        Arrival(1, "long rows", 14, turn),
        Arrival(0, "long rows", 2, turn + 14),
        Leaving(CALLS_UNTIL_LEAVING[turn % len(CALLS_UNTIL_LEAVING)], 4, all=True),
        Leaving(0, 12 + long_score, all=True),
        *([Leaving(0, 12)] if long_score else []),
        *(Leaving(0, which) for which in some),
        Arrival(0, "rows", 3, 7 * turn),
        Arrival(0, "draws", 2, 5 * turn + 1),
        *([Arrival(0, "scores", 2, 3 + 4 * (turn + 1))] if long_score else []),
        Arrival(1, "long rows", 3, turn),
    ]


def _leaving_at_the_end() -> list[Event]:
    """Of five equal samples one stays, and the others leave some calls before they would end."""
    kinds, early = REQUESTS_OF_KIND["growing draws"], (0, 1, 2, 3)
    ends = [growing_tokens(kind) for kind in range(kinds)]
    leaving = [(ends[i] - n, kinds * n + i) for i in range(kinds) for n in early]
    events: list[Event] = [Arrival(0, "growing draws", kinds * (len(early) + 1), 0)]
    now = 0
    for at, which in sorted(leaving):
        events.append(Leaving(at - now, which))
        now = at
    return events


def _leaving_alone(kind: str, times: int) -> list[Event]:
    """Requests that begin with nothing else in flight, and leave: who has the last place."""
    events: list[Event] = []
    for turn in range(times):
        events += [Arrival(0, kind, 1, turn), Leaving(1, turn)]
    # The first of these requests comes as the last caller leaves.
    events.append(Arrival(0, "long rows", 1, times))
    return [*events, Arrival(1, "rows", 3, 0), Arrival(0, "long rows", 2, 0)]


def show(suite: Declaration, *schedule: Event) -> None:
    """Perform a schedule alone, on a model that is loaded for it.

    Raises:
        Violation: some request got something else than alone.
    """
    with contextlib.closing(Subject(suite)) as live:
        check_schedule(live, schedule)


def program(live: Subject, schedule: Sequence[Event]) -> str:
    """A program that performs a schedule alone."""
    suite = live.suite
    name, module = type(suite).__name__, type(suite).__module__
    lines = [f"from {module} import {name}", f"suite = {name}()"]
    if module.startswith("genlm."):
        lines[0] = f"from genlm.conformance import {name}"
        lines += [
            f"suite.backend, suite.model = {suite.backend!r}, {os.fspath(suite.model)!r}",
            f"suite.adapters, suite.options = {live.adapters}, {dict(suite.options)}",
        ]
    lines += [
        f"suite.longest, suite.atol = {live.longest}, {suite.atol!r}",
        f"suite.effort = {live.effort!r}",  # it chooses among the requests
        "from genlm.conformance.schedule import Arrival, Leaving, Rebinding, show",
        f"show(suite, {', '.join(map(repr, schedule))})",
    ]
    return "\n".join(["  A program that shows it alone:", *(f"    {line}" for line in lines)])


def check_schedule(live: Subject, schedule: Sequence[Event]) -> None:
    """Raises: Violation: some request got something else than alone."""

    @for_each_seed
    def each_is_as_alone(seed: int) -> None:
        live.model.reset()
        performance = Performance(live, schedule, seed)
        live.drive(performance.run())
        performance.check()

    each_is_as_alone(0)


@define(eq=False)
class Asked:
    """A request of a performance, and what came of it."""

    number: int
    arrival: Arrival
    request: ScheduledRequest
    owner: str | None  # whose adapter its name stood for
    task: asyncio.Future[Outcome]
    left: bool = False
    hangs: bool = False
    disturbed: bool = False  # its adapter was rebound or removed while it was in flight

    def wrong(self, live: Subject) -> Violation | None:
        if self.hangs:
            return Violation("it was not answered: it hangs")
        if self.task.cancelled():
            return None if self.left else Violation("it was cancelled; its caller had not gone")
        outcome = self.task.exception() or self.task.result()
        # The core rejects a sample that it makes from several rows if its adapter goes.
        if self.disturbed and isinstance(outcome, UnknownAdapterError):
            return None if not isinstance(self.request, ScheduledRow) else Violation(str(outcome))
        try:
            self.request.compare(live, outcome, self.owner)
        except Violation as violation:
            return violation
        return None


class Performance:
    """A schedule while it is performed.

    The clock counts calls of the engine. What is due after a call is asked before the call returns,
    so the next one finds it. While nothing is in flight, the clock jumps to the next event.
    """

    def __init__(self, live: Subject, schedule: Sequence[Event], salt: int) -> None:
        self.live = live
        self._schedule = schedule
        self._salt = salt
        self._clock = 0
        self._asked: list[Asked] = []
        self._lines: list[str] = []  # the events so far, for messages
        self._events: list[tuple[int, Event]] = []
        self._change: asyncio.Future[None] | None = None  # of an adapter, under way
        self._moving: str | None = None  # whose adapter the moving name stands for
        self._names = list(live.adapters)[:2]
        self._ready: dict[tuple[ScheduledRequest, str | None], ScheduledRequest] = {}
        self._happening = asyncio.Lock()
        at, moves = 0, False
        bound = {0, *(event.to for event in schedule if isinstance(event, Rebinding))}
        for event in schedule:
            at += event.after
            self._events.append((at, event))
            moves |= isinstance(event, Rebinding)
            for request in self._arriving(event) if isinstance(event, Arrival) else ():
                moved = request.adapter == REBOUND_ADAPTER
                moves |= moved
                owners = [self._names[to] for to in bound] if moved else [request.adapter]
                for owner in owners:
                    self._ready[request, owner] = request.alone(live, owner)
        if moves:
            self._moving = self._names[0]
            live.model.bind(REBOUND_ADAPTER, self._moving)
        live.model.clear()

    def _arriving(self, event: Arrival) -> list[ScheduledRequest]:
        known = self.live.noted(
            (event.kind, self._salt), lambda: requests_of(self.live, event.kind, self._salt)
        )
        return [known[(event.first + i) % len(known)] for i in range(event.count)]

    # --- performing -------------------------------------------------------------------------------

    async def run(self) -> None:
        async with self.live.after_each_call(self._tick):
            try:
                await self._to_the_end()
            finally:
                for one in self._asked:
                    one.hangs = not one.task.done()
                    one.task.cancel()

    async def _to_the_end(self) -> None:
        while True:
            await self._happen()
            waiting = [one.task for one in self._asked if not one.task.done()]
            if self._change is not None:
                waiting.append(self._change)
            if waiting:
                if not await self.live.all_done(waiting):
                    return  # Some requests are never answered.
            elif self._events:
                self._clock = max(self._clock, self._events[0][0])
            else:
                return

    async def _tick(self) -> None:
        self._clock += 1
        await self._happen()

    async def _happen(self) -> None:
        """Let all events happen that are due. While an adapter changes, later events wait."""
        async with self._happening:
            if self._change is not None and self._change.done():
                self._change.result()
                self._change = None
            while self._change is None and self._events and self._events[0][0] <= self._clock:
                _, event = self._events.pop(0)
                if isinstance(event, Rebinding):
                    await submitted()  # Requests that were made before it must be on their way.
                what = {Arrival: self._arrive, Leaving: self._leave, Rebinding: self._rebind}
                line = what[type(event)](event)  # type: ignore[operator]
                self._lines.append(f"call {self._clock}: {line}")
            await submitted()

    def _arrive(self, event: Arrival) -> str:
        first = len(self._asked) + 1
        for request in self._arriving(event):
            owner = self._moving if request.adapter == REBOUND_ADAPTER else request.adapter
            ready = self._ready[request, owner]
            task = asyncio.ensure_future(ready.ask(self.live))
            self._asked.append(Asked(len(self._asked) + 1, event, ready, owner, task))
        if event.count == 1:
            return f"{first} asks for a {self._asked[-1].request}"
        kinds = Counter(str(one.request).partition(",")[0] for one in self._asked[first - 1 :])
        shown = ", ".join(list(kinds)[:3]) + (", ..." if len(kinds) > 3 else "")
        return f"{first} to {len(self._asked)} ask for {event.kind}: {shown}"

    def _leave(self, event: Leaving) -> str:
        chosen = self._asked[event.which % len(self._asked)] if self._asked else None
        leaving = [
            one
            for one in self._asked
            if not one.task.done()
            and (one is chosen or (event.all and chosen and one.arrival is chosen.arrival))
        ]
        if not leaving:
            return "no caller leaves: those who were to leave have been answered"
        for one in leaving:
            one.left = True
            one.task.cancel()
        who = ", ".join(str(one.number) for one in leaving[:6])
        return f"{who}{' and more' if len(leaving) > 6 else ''} leave{'s' * (len(leaving) == 1)}"

    def _rebind(self, event: Rebinding) -> str:
        live, to = self.live, self._names[event.to]
        for one in self._asked:
            one.disturbed |= one.request.adapter == REBOUND_ADAPTER and not one.task.done()

        def change() -> None:
            if event.removed:
                live.model.remove(REBOUND_ADAPTER)
            live.model.bind(REBOUND_ADAPTER, to)

        self._moving = to
        self._change = asyncio.wrap_future(live.thread(change))
        return f"{REBOUND_ADAPTER!r} is {'removed, and ' if event.removed else ''}bound to {to!r}"

    # --- what came of it --------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: Violation: the first request that is wrong, with the schedule; a sample that
        rounding may have moved only where no other is."""
        moved = None
        for one in self._asked:
            violation = one.wrong(self.live)
            if violation is None:
                continue
            story = "\n  ".join([*self._lines[:STORY_LINES], "...", *self._lines[-STORY_LINES:]])
            if len(self._lines) <= 2 * STORY_LINES:
                story = "\n  ".join(self._lines)
                story += f"\n{program(self.live, self._schedule)}"
            bound = f" (bound to {one.owner!r} then)" if one.request.adapter != one.owner else ""
            message = f"request {one.number}, a {one.request}{bound}: {violation}\n  {story}"
            if not isinstance(violation, MovedDraw):
                raise Violation(message)
            moved = moved or MovedDraw(message)
        if moved is not None:
            raise moved
