"""The fleet: the ways of a request, of a replica, and of an entry of the log.

Each journey is one method, which yields a :class:`~genlm.ray.member.Call` and continues with its
outcome. The **log** (:mod:`~genlm.ray.log`) lists what every replica must have; only entries that
work enter it. The **watch** (:mod:`~genlm.ray.watch`) alone decides whether a replica is dead.
**Placing** (:mod:`~genlm.ray.placing`) keeps requests where they can still move to another replica,
and tries suspects separately. None of these modules knows Ray or the time, so a test can kill
replicas on a clock of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from genlm.core import Answer, EngineDeadError, EngineError
from genlm.core.errors import BackendUnavailableError
from genlm.core.logs import get_logger
from genlm.core.together import together
from genlm.core.types import ReductionRequest, Request, query_of
from genlm.ray.functions import Functions, Lacking
from genlm.ray.log import Action, Change, Entry, Log
from genlm.ray.member import Call, Job, Journey, Member, State, alive
from genlm.ray.placing import MAX_DEATHS, Placing
from genlm.ray.watch import MAX_REFUSED_STARTS, STARTING_SECONDS, Watch
from genlm.ray.wire import Ask, Busy, Description, Gone, Unanswered, ask

log = get_logger()

#: The outcome of a call that was cancelled.
CANCELLED = object()


@define(eq=False)
class Fleet:
    """The fleet, which one thread uses. The outcome of each call on a line is given to
    :meth:`take`: a result, :data:`CANCELLED`, or an exception, which is
    :class:`~genlm.ray.wire.Gone` if the replica is lost."""

    _program: str  # a unique name of this program
    _lines: Sequence[Any]  # the lines to the replicas, see :class:`~genlm.ray.line.Line`
    _loading: Action  # the arguments with which a replica loads the model
    _patience: float  # seconds for which all replicas may be lost
    _now: float
    _shared: bool = field(kw_only=True)  # whether requests of other programs may kill a replica
    _log: Log = field(factory=Log, init=False)
    _placing: Placing = field(factory=Placing, init=False)
    _flying: dict[Request, Job] = field(factory=dict, init=False)
    # Errors of lost adapters, by version.
    _lost: dict[int, Exception] = field(factory=dict, init=False)
    _started: bool = field(default=False, init=False)
    _watch: Watch = field(init=False)
    members: list[Member] = field(init=False)
    # Answers since the engine last took them.
    answers: list[Answer] = field(factory=list, init=False)
    # The functions that requests have used.
    functions: Functions = field(factory=Functions, init=False)
    # Description of the replicas' engine.
    description: Description | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.members = [Member(index, line) for index, line in enumerate(self._lines)]
        self._watch = Watch(self.members, self._patience, self._now)
        for member in self.members:
            self._go(self._live(member))

    @property
    def pulse(self) -> float:
        """A number of seconds in which :meth:`tick` must be called several times."""
        return self._watch.pulse

    @property
    def started(self) -> bool:
        """Whether all replicas have been ready."""
        self._started = self._started or all(member.ready for member in self.members)
        return self._started

    # --- requests ---------------------------------------------------------------------------------

    def step(self, new_requests: Iterable[Request], dropped: Iterable[Request]) -> None:
        """Take new requests, and forget dropped ones. If an equal request is still in flight, it is
        forgotten too: the engine had dropped it while its answer was on the way."""
        jobs = {request: Job(request) for request in new_requests}
        gone = (*dropped, *(jobs.keys() & self._flying.keys()))
        self._drop([job for request in gone if (job := self._flying.pop(request, None))])
        self._flying.update(jobs)
        self._refuse_without_adapter(jobs.values())
        self._placing.add(alive(jobs.values()))
        self._proceed()

    def _ask(self, member: Member, jobs: Sequence[Job], on_trial: bool) -> Journey:
        """The journey of requests, from waiting to being answered."""
        # A tuple, because Ray pickles each element of a list separately.
        asked = tuple(self._asked(member, [job.request for job in jobs]))
        outcome = yield Call(member, ("answer", asked, on_trial), [*jobs], on_trial)
        if isinstance(outcome, Busy):
            self._placing.postpone(member, jobs)
        elif outcome is CANCELLED:
            self._placing.add(alive(jobs))
        elif isinstance(outcome, Lacking):  # the call that sent the function was cancelled
            member.functions.clear()
            self._placing.add(alive(jobs))
        elif isinstance(outcome, Exception) and len(jobs) > 1:
            # For example, the object store has no room for all rows.
            self._placing.split(alive(jobs))
        else:
            results = [outcome] if isinstance(outcome, Exception) else outcome
            self._answer(jobs, results)
            self._placing.add(alive(jobs))  # unanswered by the replica

    def _asked(self, member: Member, requests: Sequence[Request]) -> list[Ask]:
        """Requests in the form that is sent to a replica. A function is sent to each replica
        once."""
        asked: list[Ask] = []
        keys: dict[together[Any], str] = {}
        for request in requests:
            if not isinstance(request, ReductionRequest):
                asked.append(ask(request, self._program))
                continue
            function, pickled = request.then.function, None
            if (key := keys.get(function)) is None:
                code = self.functions.code(function)
                key = keys[function] = code.key
                pickled = None if key in member.functions else code.pickled
                member.functions.add(key)
            asked.append(ask(request, self._program, (key, pickled, request.then.given)))
        return asked

    def _answer(self, jobs: Sequence[Job], results: Sequence[Any]) -> None:
        for job, result in zip(jobs, results, strict=True):
            if not (job.done or isinstance(result, Unanswered)):
                job.done = True
                del self._flying[job.request]
                self.answers.append(Answer(job.request, result))

    def _drop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.done = True
        if jobs:
            self._placing.remove_done()
            for call in [call for member in self.members for call in member.asked]:
                if not alive(call.jobs):
                    call.member.line.cancel(call)

    # --- replicas ---------------------------------------------------------------------------------

    def _live(self, member: Member) -> Journey:
        """The journey of a replica: it loads, and from then on one call of the watch is always
        under way."""
        self._watch.enter(member, State.STARTING)
        member.life += 1
        member.have, member.functions = {}, set()
        member.line.start()
        outcome = yield Call(member, ("open", *self._loading))
        if isinstance(outcome, Exception):
            if not self.started:
                raise outcome
            log.warning("replica.load_failed", replica=member.index, error=str(outcome))
            member.failures += 1
            member.refusals += 1
            return self._watch.enter(member, State.RESTING)
        member.refusals = 0
        self.description = outcome
        self._watch.enter(member, State.LOADED)
        while not isinstance(outcome, Exception):
            member.heard_at = self._watch.now
            outcome = yield Call(member, ("beat", self.pulse))
        self._die(member, Gone(str(outcome)))

    def _die(self, member: Member, gone: Gone) -> None:
        """Handle a death: find the requests to blame, send the others elsewhere, and start the
        replica again."""
        log.warning("replica.lost", replica=member.index, error=str(gone))
        killers = self._placing.leave(member, gone.computing)
        self._answer(killers, [died_of(job, gone) for job in killers])
        self._blame(member, gone)
        self._start_again(member, gone)

    def _blame(self, member: Member, gone: Gone) -> None:
        """Blame the entry that the replica was applying, or count a failed start."""
        calls, member.calls = member.calls, set()
        entry = next((c.entry for c in calls if c.entry and c.entry.applied_by(c.action)), None)
        if entry is not None and gone.computing:
            member.died_of = entry
            entry.deaths += 1
            if entry.deaths >= MAX_DEATHS:
                why = (
                    f"{MAX_DEATHS} replicas died, one after the other, while they loaded it: {gone}"
                )
                self._fail(entry, EngineError(why))
        elif not member.ready:
            member.failures += 1

    def _start_again(self, member: Member, gone: Gone) -> None:
        """Start a replica again: at once, after a rest, or not at all.

        Raises:
            EngineDeadError: a program has ended the fleet, including replicas that are starting.
            BackendUnavailableError: the replica has failed too often, before all replicas were
                ready for the first time.
        """
        if gone.ended and self.started:
            raise EngineDeadError("the fleet has been ended; load the model again")
        if not member.failures:
            self._go(self._live(member))
        elif member.failures < MAX_REFUSED_STARTS or self.started or self._shared:
            self._watch.enter(member, State.RESTING)
        else:
            why = f"a replica ended {MAX_REFUSED_STARTS} times while it was loading: {gone}"
            raise BackendUnavailableError(why)

    # --- what every replica must have -------------------------------------------------------------

    def add(self, entry: Entry, done: Callable[[Exception | None], None]) -> None:
        """Apply an entry on every replica, or on none."""
        if any(other.apply == entry.apply for other in self._log.entries):
            return done(None)
        self._log.change = Change(entry, done)
        self._proceed()

    def remove_adapter(self, version: int, done: Callable[[Exception | None], None]) -> None:
        """Drop an adapter, and the prompts that are pinned with it."""
        self._lost.pop(version, None)
        self._forget(lambda entry: entry.pinned and entry.version == version)
        self._log.remove(lambda entry: entry.version == version)
        self._log.change = Change(None, done)
        self._proceed()

    def clear(self, order: Entry, done: Callable[[Exception | None], None]) -> None:
        """Drop the whole KV cache. A replica that is not ready may miss the order; it drops its
        pinned prompts one by one."""
        self._placing.affinity.forget()
        ready = [member for member in self.members if member.ready]
        self._forget(lambda entry: entry.pinned, at=ready)
        self._log.entries[order] = None
        self._log.change = Change(order, done)
        self._proceed()

    def _forget(self, which: Callable[[Entry], bool], at: Iterable[Member] | None = None) -> None:
        """Remove entries from the log that the replicas ``at`` (all, by default) drop by
        themselves."""
        for entry in self._log.remove(which):
            for member in self.members if at is None else at:
                member.have.pop(entry, None)

    def _reconcile(self, member: Member) -> Journey:
        """The journey in which a loaded replica follows the log, one entry at a time."""
        while step := self._log.next_for(member, member.have):
            entry, action = step
            outcome = yield Call(member, action, entry=entry)
            if isinstance(outcome, Busy):
                self._placing.busy.add(member)
                return
            if action is not entry.apply:
                member.have.pop(entry, None)
            elif isinstance(outcome, Exception):
                self._fail(entry, outcome)
            else:
                member.have[entry] = None
                self._log.worked(entry)
        if not member.ready:
            self._watch.enter(member, State.READY)
            member.failures, member.died_of = 0, None
            log.info("replica.ready", replica=member.index)
            self._placing.join(member)

    def _fail(self, entry: Entry, error: Exception) -> None:
        """Take an entry back everywhere. The error goes to its caller or, if that no longer waits,
        to the requests that use the entry."""
        if self._log.failed(entry, error):
            return
        log.warning("replica.entry_lost", entry=entry.apply[0], error=str(error))
        if entry.version is not None and not entry.pinned:
            self._forget(lambda other: other.version == entry.version)
            self._lost[entry.version] = error
            self._refuse_without_adapter([*self._flying.values()])
            self._placing.remove_done()

    def _refuse_without_adapter(self, jobs: Iterable[Job]) -> None:
        for job in jobs if self._lost else ():
            adapter = query_of(job.request).adapter
            error = self._lost.get(adapter.version) if adapter else None
            if adapter and error:
                why = f"adapter {adapter.name!r} could not be loaded when a replica started again"
                self._answer([job], [EngineError(f"{why}: {error}; add it again")])

    def _advance_change(self) -> None:
        """Find a replica for an entry on trial, or end the change once all replicas have applied
        it. A replica that died of an entry tries it again itself, so that no other replica dies of
        it."""
        change = self._log.change
        if change is None:
            return
        if self._log.on_trial():
            at = change.member
            if not (at and (at.ready or self._watch.awaited(at, self._patience))):
                change.member = next((member for member in self.members if member.ready), None)
        elif not any(map(self._delays, self.members)):
            self._log.change = None
            if change.entry and change.entry.take_back is None:
                self._forget(lambda entry: entry is change.entry)
            change.done(change.error)

    def _delays(self, member: Member) -> bool:
        """Whether the change waits for this replica, because it has not applied the entry yet, or
        died of it and tries again."""
        if member.ready:
            return self._log.next_for(member, member.have) is not None
        died = member.died_of in self._log.entries
        return died and self._watch.awaited(member, self._patience)

    # --- everything ------------------------------------------------------------------------------

    def take(self, call: Call, outcome: Any) -> None:
        """Continue the journey of a call with its outcome."""
        if call not in call.member.calls:
            return  # the call belongs to an earlier life of the replica
        if isinstance(outcome, Gone):
            self._die(call.member, outcome)
        elif call.journey is not None:
            call.member.calls.remove(call)
            self._go(call.journey, outcome)
        self._proceed()

    def tick(self, now: float) -> None:
        """Check all replicas. Must be called about every second.

        Raises:
            EngineDeadError: no replica will answer any more.
        """
        for member in self._watch.look(now):
            if member.state is State.RESTING:
                self._go(self._live(member))
            else:
                silence = self._watch.now - member.heard_at
                self._die(member, Gone(f"no answer in {silence:.0f} seconds"))
        self._placing.busy.clear()
        why = self._watch.hopeless()
        if why and self.started:
            raise EngineDeadError(f"{why}; load the model again")
        self._proceed()

    def _proceed(self) -> None:
        """Start every journey that can start."""
        self._advance_change()
        for member in self.members:
            idle = member.loaded and not any(call.entry for call in member.calls)
            if idle and member not in self._placing.busy:
                self._go(self._reconcile(member))
        coming = any(self._watch.awaited(member, STARTING_SECONDS) for member in self.members)
        while portion := self._placing.next(coming):
            self._go(self._ask(*portion))

    def _go(self, journey: Journey, outcome: Any = None) -> None:
        """Start or continue a journey, up to its next call."""
        with contextlib.suppress(StopIteration):
            call = journey.send(outcome)
            call.journey = journey
            call.member.calls.add(call)
            method, *arguments = call.action
            token = (self._program, call.member.life)
            call.member.line.send(call, method, token, *arguments)


def died_of(job: Job, gone: Gone) -> EngineError:
    return EngineError(
        f"{job.deaths} replicas died, one after the other, while they worked on this request "
        f"alone, a context of {query_of(job.request).length} tokens: {gone}; other requests go on"
    )
