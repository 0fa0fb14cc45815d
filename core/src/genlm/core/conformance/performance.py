"""A schedule as it is performed, on a clock that counts the calls of the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from attrs import define, field

from genlm.core.conformance.agreement import MovedDraw, for_each_seed
from genlm.core.conformance.cast import MOVING, Request, Row, owners_of, requests_of
from genlm.core.conformance.clock import after_each_call
from genlm.core.conformance.compare import Violation
from genlm.core.conformance.driver import Outcome, submitted
from genlm.core.conformance.events import Arrival, Event, Leaving, Rebinding
from genlm.core.conformance.subject import Subject
from genlm.core.errors import UnknownAdapterError


def check_schedule(live: Subject, schedule: Sequence[Event]) -> None:
    """Raises: Violation: some request got something else than alone."""

    @for_each_seed
    def each_is_as_alone(seed: int) -> None:
        live.reset()
        performance = Performance(live, schedule, seed)
        live.drive(performance.run())
        performance.check()

    each_is_as_alone(0)


@define(eq=False)
class Asked:
    """A request that was asked."""

    number: int
    arrival: Arrival
    request: Request
    owner: str | None  # whose adapter its name stood for
    task: asyncio.Future[Outcome]
    left: bool = False
    hangs: bool = False
    disturbed: bool = False  # its adapter was bound anew or removed while it was in flight

    def wrong(self, live: Subject) -> Violation | None:
        if self.hangs:
            return Violation("it was not answered")
        if self.task.cancelled():
            return None if self.left else Violation("it was cancelled; its caller had not gone")
        outcome = self.task.exception() or self.task.result()
        # Where the core makes a draw of several rows, it is refused if its adapter goes.
        if self.disturbed and isinstance(outcome, UnknownAdapterError):
            return None if not isinstance(self.request, Row) else Violation(str(outcome))
        try:
            self.request.compare(live, outcome, self.owner)
        except Violation as violation:
            return violation
        return None


@define(eq=False)
class Performance:
    """A schedule while it is performed.

    The clock counts calls of the engine. What is due after a call is asked before the call returns,
    so the next one finds it. While nothing is in flight, the clock jumps to the next event.
    """

    live: Subject
    schedule: Sequence[Event]
    salt: int
    clock: int = 0
    asked: list[Asked] = field(factory=list)
    lines: list[str] = field(factory=list)  # what has happened
    _events: list[tuple[int, Event]] = field(factory=list)
    _change: asyncio.Future[None] | None = None  # of an adapter, under way
    _moving: str | None = None  # whose adapter the moving name stands for
    _names: list[str] = field(factory=list)
    _ready: dict[tuple[Request, str | None], Request] = field(factory=dict)
    _happening: asyncio.Lock = field(factory=asyncio.Lock)

    def __attrs_post_init__(self) -> None:
        self._names = list(self.live.adapters)[:2]
        at = 0
        moves = False
        for event in self.schedule:
            at += event.after
            self._events.append((at, event))
            for request in self._arriving(event) if isinstance(event, Arrival) else ():
                moves |= request.adapter == MOVING
                for owner in owners_of(request, self._names):
                    self._ready[request, owner] = request.alone(self.live, owner)
            moves |= isinstance(event, Rebinding)
        if moves:
            self._moving = self._names[0]
            self.live.bind(MOVING, self.live.adapters[self._moving])
        self.live.lm.clear_cache()
        self.live.lm.clear_kv_cache()

    def _arriving(self, event: Arrival) -> list[Request]:
        known = self.live.noted(
            (event.kind, self.salt), lambda: requests_of(self.live, event.kind, self.salt)
        )
        return [known[(event.first + i) % len(known)] for i in range(event.count)]

    # --- performing -------------------------------------------------------------------------------

    async def run(self) -> None:
        async with after_each_call(self.live, self._tick):
            try:
                await self._to_the_end()
            finally:
                for one in self.asked:
                    one.hangs = one.hangs or not one.task.done()
                    one.task.cancel()

    async def _to_the_end(self) -> None:
        while True:
            await self._happen()
            waiting = [one.task for one in self.asked if not one.task.done()]
            if self._change is not None:
                waiting.append(self._change)
            if waiting:
                if not await self.live.all_done(waiting):
                    return  # some are never answered
            elif self._events:
                self.clock = max(self.clock, self._events[0][0])
            else:
                return

    async def _tick(self) -> None:
        self.clock += 1
        await self._happen()

    async def _happen(self) -> None:
        """All that is due. While an adapter changes, what comes after it waits."""
        async with self._happening:
            if self._change is not None and self._change.done():
                self._change.result()
                self._change = None
            while self._change is None and self._events and self._events[0][0] <= self.clock:
                _, event = self._events.pop(0)
                if isinstance(event, Rebinding):
                    await submitted()  # what is asked before it is on its way
                what = {Arrival: self._arrive, Leaving: self._leave, Rebinding: self._rebind}
                line = what[type(event)](event)  # type: ignore[operator]
                self.lines.append(f"call {self.clock}: {line}")
            await submitted()

    def _arrive(self, event: Arrival) -> str:
        first = len(self.asked) + 1
        for request in self._arriving(event):
            owner = self._moving if request.adapter == MOVING else request.adapter
            ready = self._ready[request, owner]
            task = asyncio.ensure_future(ready.ask(self.live))
            self.asked.append(Asked(len(self.asked) + 1, event, ready, owner, task))
        if event.count == 1:
            return f"{first} asks for a {self.asked[-1].request}"
        kinds = Counter(str(one.request).partition(",")[0] for one in self.asked[first - 1 :])
        shown = ", ".join(list(kinds)[:3]) + (", ..." if len(kinds) > 3 else "")
        return f"{first} to {len(self.asked)} ask for {event.kind}: {shown}"

    def _leave(self, event: Leaving) -> str:
        chosen = self.asked[event.which % len(self.asked)] if self.asked else None
        leaving = [
            one
            for one in self.asked
            if not one.task.done()
            and (one is chosen or (event.all and chosen and one.arrival is chosen.arrival))
        ]
        if not leaving:
            return "somebody leaves who has been answered"
        for one in leaving:
            one.left = True
            one.task.cancel()
        who = ", ".join(str(one.number) for one in leaving[:6])
        return f"{who}{' and more' if len(leaving) > 6 else ''} leave"

    def _rebind(self, event: Rebinding) -> str:
        live, to = self.live, self._names[event.to]
        path = live.adapters[to]
        for one in self.asked:
            one.disturbed |= one.request.adapter == MOVING and not one.task.done()

        def change() -> None:
            if event.removed:
                live.remove(MOVING)
            live.bind(MOVING, path)

        self._moving = to
        self._change = asyncio.wrap_future(live.thread(change))
        return f"{MOVING!r} is {'removed, and ' if event.removed else ''}bound to {to!r}"

    # --- what came of it --------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: Violation: the first request that is wrong, with the schedule; a draw that
        rounding may have moved only where no other is."""
        moved = None
        for one in self.asked:
            violation = one.wrong(self.live)
            if violation is None:
                continue
            story = "\n  ".join(self.lines)
            message = f"request {one.number}, a {one.request}: {violation}\n  {story}"
            if not isinstance(violation, MovedDraw):
                raise Violation(message)
            moved = moved or MovedDraw(message)
        if moved is not None:
            raise moved
