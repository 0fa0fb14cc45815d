"""The fleet: what happens to a request, to a change of state, and to a replica that dies.

The design, in four rooms and this one. What a replica must have is a **log**, which only entries
that work enter (:mod:`~genlm.ray.log`). Death has one judge, the **watch**
(:mod:`~genlm.ray.watch`). Requests wait where they can still go elsewhere, and suspects are tried
apart: **placing** (:mod:`~genlm.ray.placing`). These know neither Ray nor the time, and nor does
this module, so that a test can kill what it likes on a clock of its own. **Sending**
(:mod:`~genlm.ray.sending`) calls Ray, on a thread that watches whether there is work or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from genlm.core import EngineDeadError, EngineError
from genlm.core.errors import BackendUnavailableError
from genlm.core.logs import get_logger
from genlm.core.types import Request, query_of
from genlm.ray.log import Action, Change, Entry, Log
from genlm.ray.placing import DEATHS, Job, Placing, Portion
from genlm.ray.watch import HOPE, SILENT, STARTS, Call, Gone, Member, State, Watch
from genlm.ray.wire import Busy, Description, ask

log = get_logger()

#: What comes back of a call that was cancelled.
CANCELLED = object()


class Fleet:
    """For one thread.

    Args:
        program: A name of this program that no other one has.
        lines: The ways to the replicas: ``start()``, ``send(call, action)``, ``cancel(call)``. What
            comes back is given to :meth:`take`: a result, :data:`CANCELLED`, or an exception, which
            is :class:`~genlm.ray.watch.Gone` for a replica that is lost.
        loading: What a replica needs to load the model.
        patience: Seconds for which all replicas may be lost.
        now: The time.
        shared: Whether a replica may die by a neighbour's fault.

    Attributes:
        answers: Requests with their results or errors, since they were last taken away.
        description: What the replicas say of their engine.
        pulse: Seconds within which :meth:`tick` must be called several times.
    """

    def __init__(
        self,
        program: str,
        lines: Sequence[Any],
        loading: Action,
        patience: float,
        now: float,
        *,
        shared: bool,
    ) -> None:
        self._program = program
        self._loading = loading
        self._patience = patience
        self._shared = shared
        self._log = Log()
        self._placing: Placing[Member] = Placing()
        self._flying: dict[Request, Job] = {}
        self._lost: dict[int, Exception] = {}  # adapters, by version
        self._started = False
        self.answers: list[tuple[Request, Any]] = []
        self.description: Description | None = None
        self.members = [Member(index, line) for index, line in enumerate(lines)]
        self._watch = Watch(self.members, now)
        self.pulse = self._watch.pulse
        for member in self.members:
            self._start(member)

    @property
    def started(self) -> bool:
        """Whether all replicas have been ready."""
        self._started = self._started or all(member.ready for member in self.members)
        return self._started

    # --- the journey of a request -----------------------------------------------------------------

    def step(self, newcomers: Iterable[Request], dropped: Iterable[Request]) -> None:
        """Take newcomers, and forget what nobody waits for."""
        self._drop([job for request in dropped if (job := self._flying.pop(request, None))])
        jobs = [Job(request) for request in newcomers]
        self._flying.update((job.request, job) for job in jobs)
        self._placing.add(job for job in jobs if not self._without_adapter(job))
        self._proceed()

    def _send(self) -> None:
        coming = any(self._watch.awaited(member, HOPE) for member in self.members)
        while portion := self._placing.next(coming):
            asked = [ask(job.request, self._program) for job in portion.jobs]
            action = ("answer", asked, portion.on_trial)
            self._call(portion.member, partial(self._answered, portion), action, portion=portion)

    def _answered(self, portion: Portion[Member], outcome: Any) -> None:
        """A call for requests has come back."""
        if isinstance(outcome, Busy):
            return self._placing.postpone(portion)
        self._placing.end(portion)
        jobs = [job for job in portion.jobs if not job.done]
        if outcome is CANCELLED:
            self._placing.add(jobs)
        elif isinstance(outcome, Exception) and len(portion.jobs) > 1:
            self._placing.split(jobs)  # such as an object store without room for so many rows
        else:
            results = [outcome] if isinstance(outcome, Exception) else outcome
            for job, result in zip(portion.jobs, results, strict=True):
                self._answer(job, result)

    def _answer(self, job: Job, result: Any) -> None:
        if not job.done:
            job.done = True
            del self._flying[job.request]
            self.answers.append((job.request, result))

    def _drop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.done = True
        if not jobs:
            return
        self._placing.remove_done()
        for member in self.members:
            for call in member.calls:
                if call.portion and all(job.done for job in call.portion.jobs):
                    member.line.cancel(call)

    # --- the journey of a death -------------------------------------------------------------------

    def _die(self, member: Member, gone: Gone) -> None:
        """Find who is to blame, ask the rest elsewhere, and start the replica again."""
        log.warning("replica.lost", replica=member.index, error=str(gone))
        calls, member.calls = member.calls, set()
        for job in self._placing.leave(member, gone.computing):
            self._answer(job, died_of(job, gone))
        entries = [call.entry for call in calls if call.entry and call.applies and gone.computing]
        for entry in entries:
            self._blame(member, entry, gone)
        if not (member.ready or entries):
            member.failures += 1
        if gone.ended and self.started:
            self._watch.enter(member, State.ENDED)
        elif not member.failures:
            self._start(member)
        else:
            self._watch.enter(member, State.RESTING)
            if not (self.started or self._shared) and member.failures >= STARTS:
                why = f"a replica ended {STARTS} times while it was loading: {gone}"
                raise BackendUnavailableError(why)

    def _blame(self, member: Member, entry: Entry, gone: Gone) -> None:
        entry.deaths += 1
        member.died_of = entry
        if entry.deaths >= DEATHS:
            why = f"{DEATHS} replicas died, one after the other, while they loaded it: {gone}"
            self._fail(entry, EngineError(why))

    # --- replicas that start ----------------------------------------------------------------------

    def _start(self, member: Member) -> None:
        self._watch.enter(member, State.STARTING)
        member.life += 1
        member.have = {}
        member.line.start()
        self._call(member, partial(self._loaded, member), ("open", *self._loading))

    def _loaded(self, member: Member, outcome: Description | Exception) -> None:
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
        self._listen(member)

    def _listen(self, member: Member, outcome: object = None) -> None:
        """Have one call of the watch under way, always."""
        if isinstance(outcome, Exception):
            return self._die(member, Gone(str(outcome)))
        member.heard_at = self._watch.now
        self._call(member, partial(self._listen, member), ("beat", self.pulse))

    # --- state on every replica -------------------------------------------------------------------

    def add(self, entry: Entry, done: Callable[[Exception | None], None]) -> None:
        """Have something on every replica, or on none."""
        if any(other.apply == entry.apply for other in self._log.entries):
            return done(None)
        self._log.change = Change(entry, done)
        self._proceed()

    def remove_adapter(self, version: int, done: Callable[[Exception | None], None]) -> None:
        """Drop an adapter, and the prompts that are pinned with it."""
        self._lost.pop(version, None)
        self._forget(lambda entry: entry.pinned and entry.version == version)
        self._log.remove(lambda entry: entry.version == version)
        self._log.change = Change(None, done, tried=True)
        self._proceed()

    def clear(self, order: Entry, done: Callable[[Exception | None], None]) -> None:
        """Drop all key/value state."""
        self._placing.affinity.forget()
        self._forget(lambda entry: entry.pinned)
        self._log.entries[order] = None
        self._log.change = Change(order, done, tried=True)
        self._proceed()

    def _forget(self, which: Callable[[Entry], bool]) -> None:
        """Entries leave the log, which the replicas drop by themselves."""
        for entry in self._log.remove(which):
            for member in self.members:
                member.have.pop(entry, None)

    def _reconcile(self, member: Member) -> None:
        """Bring a replica that is loaded to what the log says, one entry at a time."""
        if member in self._placing.busy or any(call.entry for call in member.calls):
            return
        step = self._log.next_for(member, member.have)
        if step is not None:
            entry, action = step
            then = partial(self._reconciled, member, entry, action is entry.apply)
            applies = action is entry.apply and entry.take_back is not None
            self._call(member, then, action, entry=entry, applies=applies)
        elif not member.ready:
            self._watch.enter(member, State.READY)
            member.failures, member.died_of = 0, None
            log.info("replica.ready", replica=member.index)
            self._placing.join(member)

    def _reconciled(self, member: Member, entry: Entry, applied: bool, outcome: object) -> None:
        error = outcome if isinstance(outcome, Exception) else None
        if isinstance(error, Busy):
            self._placing.busy.add(member)
        elif not applied:
            member.have.pop(entry, None)
        elif error is None:
            member.have[entry] = None
            self._log.worked(entry)
        else:
            self._fail(entry, error)

    def _fail(self, entry: Entry, error: Exception) -> None:
        """An entry is taken back everywhere: its caller gets the error, or those who use it."""
        if self._log.failed(entry, error):
            return
        log.warning("replica.entry_lost", entry=entry.apply[0], error=str(error))
        if entry.version is not None and not entry.pinned:
            self._forget(lambda other: other.version == entry.version)
            self._lost[entry.version] = error
            for job in list(self._flying.values()):
                self._without_adapter(job)
            self._placing.remove_done()

    def _without_adapter(self, job: Job) -> bool:
        adapter = query_of(job.request).adapter
        error = self._lost.get(adapter.version) if adapter else None
        if adapter is None or error is None:
            return False
        why = f"adapter {adapter.name!r} could not be loaded again when a replica started again"
        self._answer(job, EngineError(f"{why}: {error}; add it again"))
        return True

    def _try_change(self) -> None:
        """Find a replica for an entry on trial. If it dies of it, no other one is to: it tries
        again."""
        change = self._log.change
        if change is None or change.tried:
            return
        member = change.member
        if not (member and (member.ready or self._watch.awaited(member, self._patience))):
            change.member = next((member for member in self.members if member.ready), None)

    def _end_change(self) -> None:
        """End the change under way when all replicas have it."""
        change = self._log.change
        if change is None or not change.tried or any(map(self._delays, self.members)):
            return
        if change.entry and change.entry.take_back is None:
            self._forget(lambda entry: entry is change.entry)
        self._log.change = None
        change.done(change.error)

    def _delays(self, member: Member) -> bool:
        """Whether the change under way waits for this replica: it is not so far, or it has died of
        it and is to try again."""
        if member.ready:
            return self._log.next_for(member, member.have) is not None
        died = member.died_of in self._log.entries
        return died and self._watch.awaited(member, self._patience)

    # --- everything ------------------------------------------------------------------------------

    def take(self, call: Call, outcome: Any) -> None:
        """What came back of a call."""
        if call not in call.member.calls:
            return  # of a life that is over
        if isinstance(outcome, Gone):
            self._die(call.member, outcome)
        else:
            call.member.calls.remove(call)
            call.then(outcome)
        self._proceed()

    def tick(self, now: float) -> None:
        """Look at the replicas; to be called every second or so.

        Raises:
            EngineDeadError: no replica will answer any more.
        """
        for member in self._watch.look(now, self._patience):
            patience = SILENT * self.pulse if member.loaded else self._patience
            self._die(member, Gone(f"no answer in {patience:g} seconds"))
        for member in self._watch.rested():
            self._start(member)
        self._placing.busy.clear()
        why = self._watch.hopeless(self._patience)
        if why and self.started:
            raise EngineDeadError(f"{why}; load the model again")
        self._proceed()

    def _proceed(self) -> None:
        self._try_change()
        for member in self.members:
            if member.loaded:
                self._reconcile(member)
        self._end_change()
        self._send()

    def _call(self, member: Member, then: Callable[[Any], None], action: Action, **of: Any) -> None:
        call = Call(member, then, **of)
        member.calls.add(call)
        method, *arguments = action
        member.line.send(call, method, (self._program, member.life), *arguments)


def died_of(job: Job, gone: Gone) -> EngineError:
    return EngineError(
        f"{job.deaths} replicas died, one after the other, while they worked on this request "
        f"alone, a context of {query_of(job.request).length} tokens: {gone}; other requests go on"
    )
