"""The fleet: its replicas, what each is at work on, and what waits. For the engine thread alone.

A replica has two calls for rows in flight, so that it never waits for the next one; further rows
wait here, where they are still free to go elsewhere. A draw or a score is a call of its own.

Ray says when a replica's process or node has died. It does not say when a process hangs, so
replicas at work are pinged; one that stays silent counts as dead.

When a replica dies, nothing is lost: what it was at work on is asked again, first together and
alone on a replica, then one by one. A request during which replicas die three times while they have
nothing else to do gets the error.
"""

from __future__ import annotations

import itertools
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from genlm.core import Adapter, Answer, EngineDeadError, EngineError, Query
from genlm.core.errors import BackendUnavailableError, ModelClosedError
from genlm.core.logs import get_logger
from genlm.core.mailbox import Mailbox
from genlm.core.types import Request, SampleRequest
from genlm.ray.affinity import Affinity
from genlm.ray.options import RayOptions
from genlm.ray.replica import Replica
from genlm.ray.wire import Ask, Description, ask, packed

if TYPE_CHECKING:
    import concurrent.futures

    import torch

log = get_logger()

#: Calls for rows that a replica has in flight at most: one at work, one that comes next.
LANES = 2

#: How often replicas may die of one request alone, before it gets the error.
DEATHS = 3

#: How often a replica that has been lost may fail to load again, one time after the other.
STARTS = 3

#: Seconds between two pings of a replica, and how many in a row find the one before them without an
#: answer until the replica counts as dead. Several, for the program itself may have been stopped.
PULSE, SILENT = 10.0, 6

#: Seconds for the replicas to release their engines before they are ended.
GRACE = 30.0


@define(eq=False)
class Job:
    """A request, and what happened to it so far."""

    request: Request
    losses: int = 0  # replicas that died while this was one of several requests
    deaths: int = 0  # replicas that died while this was all they had to do

    @property
    def query(self) -> Query:
        return self.request if isinstance(self.request, Query) else self.request.query

    @property
    def suspect(self) -> bool:
        return bool(self.losses)


@define(eq=False)
class Call:
    """What was asked of a replica, and has not come back."""

    reference: Any
    jobs: list[Job]


@define(eq=False)
class Member:
    """One replica, as the program knows it."""

    index: int
    actor: Any = None
    ready: bool = False
    failed_starts: int = 0
    ping: concurrent.futures.Future[Any] | None = None
    silent: int = 0  # pings in a row that found the one before them without an answer
    calls: dict[int, Call] = field(factory=dict)  # by number, in the order made
    waiting: deque[Job] = field(factory=deque)

    def load(self) -> int:
        """How many requests it has."""
        return len(self.waiting) + sum(len(call.jobs) for call in self.calls.values())

    def lanes(self) -> int:
        """How many calls for rows are in flight."""
        return sum(isinstance(c.jobs[0].request, Query) for c in self.calls.values() if c.jobs)


class Actors(Sequence[Any]):
    """The replicas' actor handles as they are now: a replica that starts again has a new one.
    ``None`` stands for a replica that could not be started again. May be read by any thread."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        return [member.actor for member in self._members][index]

    def __repr__(self) -> str:
        return repr(list(self))


class Fleet:
    """Starts the replicas and waits until all are ready.

    Args:
        ray: The module, connected to a cluster.
        model: The model's name.
        options: The user's.

    Raises:
        BackendUnavailableError: not all replicas have started in time.
        Exception: what the inner backend raised while it loaded the model.
    """

    def __init__(self, ray: Any, model: str, options: RayOptions) -> None:
        self._ray = ray
        self._model = model
        self._options = options
        self._program = uuid.uuid4().hex
        self._events = Mailbox[tuple[Member, int, Any] | None]()
        self._numbers = itertools.count()
        self._affinity: Affinity[Member] = Affinity()
        self._adapters: dict[int, Adapter] = {}
        self._pinned: dict[Query, None] = {}
        self._answers: list[Answer] = []
        self._flying: dict[Request, Job] = {}
        self._closed = False
        self.description: Description | None = None
        self._starting = True
        self._members = [Member(index) for index in range(options.replicas)]
        self._alive_at = time.monotonic()  # when a replica was last ready
        self._pinged_at = self._alive_at
        try:
            for member in self._members:
                self._start(member)
            self._await_start()
        except BaseException:
            self.close()
            raise

    # --- the engine's steps -----------------------------------------------------------------------

    def step(self, newcomers: Iterable[Request], dropped: Iterable[Request]) -> list[Answer]:
        """Take newcomers, and wait until something is answered or :meth:`wake` is called."""
        for request in dropped:
            self._drop(request)
        jobs = [Job(request) for request in newcomers]
        self._flying.update((job.request, job) for job in jobs)
        self._place(jobs)
        self._send()
        if self._flying and not self._answers:
            self._wait()
        self._ping()
        self._take_all()
        self._send()
        answers, self._answers = self._answers, []
        return answers

    def wake(self) -> None:
        """Let the step under way return, or the next one. From any thread."""
        self._events.put(None)

    def _wait(self) -> None:
        """Handle one event; give up if no replica has been there for too long."""
        try:
            event = self._events.get(timeout=self._patience())
        except queue.Empty:
            self._require_alive()
        else:
            self._take(event)

    def _take_all(self) -> None:
        while self._events:
            self._take(self._events.get())

    def _patience(self) -> float:
        """Seconds until the fleet counts as dead, or to the next ping while a replica is ready."""
        now = time.monotonic()
        if any(member.ready for member in self._members):
            return max(self._pinged_at + PULSE - now, 0.0)
        return max(self._alive_at + self._options.start_timeout - now, 0.0)

    def _require_alive(self) -> None:
        if not any(member.ready for member in self._members) and self._patience() == 0.0:
            raise EngineDeadError(
                f"none of the {len(self._members)} replicas has been ready for "
                f"start_timeout={self._options.start_timeout:g} seconds; look at `ray status`, "
                "then load the model again"
            )

    def _ping(self) -> None:
        """Ask the replicas whether they are there, from time to time; give up those that are not.

        Ray does not notice a process that hangs, and takes long to notice a lost connection.
        """
        now = time.monotonic()
        if now < self._pinged_at + PULSE:
            return
        self._pinged_at = now
        for member in self._members:
            if not member.ready:
                continue
            if member.ping is None or member.ping.done():
                member.ping, member.silent = member.actor.ping.remote().future(), 0
            elif (silent := member.silent + 1) < SILENT:
                member.silent = silent
            else:
                self._lost(member, TimeoutError(f"no answer in {SILENT * PULSE:g} seconds"))

    # --- placing and sending ----------------------------------------------------------------------

    def _place(self, jobs: Iterable[Job]) -> None:
        """Put requests into the queues of replicas."""
        loads: dict[Member, int] = {}
        for job in jobs:
            loads = loads or self._loads()  # counted once, for it takes a look at every replica
            member = min(loads, key=loads.__getitem__) if job.suspect else None
            member = member or self._affinity.choose(job.query, loads)
            member.waiting.append(job)
            loads[member] += 1

    def _loads(self) -> dict[Member, int]:
        """How many requests each replica has that may be given more."""
        there = [m for m in self._members if m.ready] or [m for m in self._members if m.actor]
        if not there:
            raise EngineDeadError(
                f"all {len(self._members)} replicas are lost, and none could be started again; "
                "load the model again"
            )
        return {member: member.load() for member in there}

    def _send(self) -> None:
        for member in self._members:
            while member.ready and member.waiting and self._send_next(member):
                pass

    def _send_next(self, member: Member) -> bool:
        """Send what stands first, with what may go along. ``False`` if it must wait."""
        first = member.waiting[0]
        if any(job.suspect for call in member.calls.values() for job in call.jobs):
            return False  # whoever is with a suspect would be blamed for it
        if first.suspect and member.calls:
            return False
        if not isinstance(first.request, Query):
            self._call(member, [member.waiting.popleft()])
            return True
        if member.lanes() >= LANES:
            return self._send_past_rows(member)
        jobs = [member.waiting.popleft()]
        if first.losses < 2:  # else alone
            rows = [job for job in member.waiting if goes_with(first, job)]
            together = set(map(id, rows))
            member.waiting = deque(job for job in member.waiting if id(job) not in together)
            jobs += rows
        self._call(member, jobs)
        return True

    def _send_past_rows(self, member: Member) -> bool:
        """Draws and scores need no lane: the first one behind rows that wait may go."""
        for job in member.waiting:
            if not isinstance(job.request, Query) and not job.suspect:
                member.waiting.remove(job)
                self._call(member, [job])
                return True
        return False

    def _call(self, member: Member, jobs: list[Job]) -> None:
        request = jobs[0].request
        if isinstance(request, Query):
            reference = member.actor.rows.remote([self._ask(job.query) for job in jobs])
        elif isinstance(request, SampleRequest):
            reference = member.actor.draw.remote(self._ask(request.query), request.params)
        else:
            continuation = packed(request.continuation)
            reference = member.actor.score.remote(self._ask(request.query), continuation)
        self._track(member, reference, jobs)

    def _ask(self, query: Query) -> Ask:
        return ask(query, self._program)

    def _track(self, member: Member, reference: Any, jobs: list[Job]) -> None:
        """Have the result of a call reported to the queue of events."""
        number = next(self._numbers)
        member.calls[number] = Call(reference, jobs)

        def report(future: concurrent.futures.Future[Any]) -> None:
            self._events.put((member, number, future))

        reference.future().add_done_callback(report)

    def _drop(self, request: Request) -> None:
        """Forget a request that nobody waits for. What a replica computes of it is cancelled."""
        job = self._flying.pop(request, None)
        if job is None:
            return
        for member in self._members:
            if job in member.waiting:
                member.waiting.remove(job)
            for call in member.calls.values():
                if call.jobs == [job]:  # rows of others may be with it: those go on
                    self._ray.cancel(call.reference)

    # --- taking results ---------------------------------------------------------------------------

    def _take(self, event: tuple[Member, int, Any] | None) -> None:
        if event is None:  # the core has something new
            return
        member, number, future = event
        call = member.calls.pop(number, None)
        if call is None:  # of a replica that has been given up since
            return
        error = future.exception()
        if isinstance(error, self._ray.exceptions.TaskCancelledError):
            self._place(job for job in call.jobs if job.request in self._flying)
        elif isinstance(error, (self._ray.exceptions.RayTaskError, EngineDeadError)):
            self._failed(member, call, cause_of(error))
        elif error is not None:
            member.calls[number] = call
            self._lost(member, error)
        elif not call.jobs:
            self._started(member, future.result())
        elif isinstance(call.jobs[0].request, Query):
            self._take_rows(member, call, future.result())
        else:
            self._answer(call.jobs[0], result_of(future.result()))

    def _take_rows(self, member: Member, call: Call, rows: Any) -> None:
        import numpy as np
        import torch

        array, errors = rows
        dead = next((e for e in errors.values() if fatal(e)), None)
        if dead is not None:
            member.calls[next(self._numbers)] = call
            self._lost(member, dead)
            return
        # Copied, because the array lies in memory that other processes read: once, for all rows.
        own = iter(() if array is None else torch.from_numpy(np.array(array)))
        for place, job in enumerate(call.jobs):
            self._answer(job, errors[place] if place in errors else next(own))

    def _answer(self, job: Job, result: torch.Tensor | list[int] | Exception) -> None:
        if self._flying.pop(job.request, None) is not None:  # else nobody waits for it any more
            self._answers.append(Answer(job.request, result))

    def _failed(self, member: Member, call: Call, error: Exception) -> None:
        """A replica raised for the whole call."""
        if not call.jobs:
            self._could_not_load(member, error)
        elif fatal(error):
            member.calls[next(self._numbers)] = call
            self._lost(member, error)
        elif len(call.jobs) == 1:
            self._answer(call.jobs[0], error)
        else:  # such as an object store without room for so many rows
            for job in call.jobs:
                job.losses = 2
            self._place(call.jobs)

    # --- replicas that come and go ----------------------------------------------------------------

    def _start(self, member: Member) -> None:
        """Create the actor and have it load the model, what is bound and what is pinned."""
        member.ready, member.ping = False, None
        options = self._options.actor_options(member.index)
        member.actor = self._ray.remote(Replica).options(max_concurrency=10_000, **options).remote()
        opts = dict(self._options.backend_opts)
        adapters = {self._key(a): a.path for a in self._adapters.values()}
        pinned = [self._ask(query) for query in self._pinned]
        loads = member.actor.load.remote(self._options.backend, self._model, opts, adapters, pinned)
        self._track(member, loads, [])

    def _key(self, adapter: Adapter) -> str:
        return f"{self._program}:{adapter.version}"

    def _await_start(self) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        while not all(member.ready for member in self._members):
            try:
                self._take(self._events.get(timeout=deadline - time.monotonic()))
            except queue.Empty:
                ready = sum(member.ready for member in self._members)
                raise BackendUnavailableError(
                    f"{ready} of {len(self._members)} replicas were ready after "
                    f"start_timeout={self._options.start_timeout:g} seconds; the cluster has "
                    f"{self._ray.available_resources()} free, and each replica asks for "
                    f"{self._options.actor_options(0)}; ask for less, or wait longer"
                ) from None
        self._starting = False

    def _started(self, member: Member, description: Description) -> None:
        self.description = description
        member.ready, member.failed_starts = True, 0
        self._alive_at = time.monotonic()
        log.info("replica.ready", replica=member.index)

    def _could_not_load(self, member: Member, error: Exception) -> None:
        if self._starting:
            raise error
        log.warning("replica.load_failed", replica=member.index, error=str(error))
        member.failed_starts += 1
        self._replace(member)

    def _lost(self, member: Member, error: BaseException) -> None:
        """Start a replica again, and ask elsewhere what it held."""
        log.warning("replica.lost", replica=member.index, error=str(error))
        if self._starting:
            raise BackendUnavailableError(f"a replica ended while it was loading: {error}")
        at_work = [job for call in member.calls.values() for job in call.jobs]
        again = [job for job in at_work if job.request in self._flying]
        if len(again) == 1:
            again[0].deaths += 1
        for job in again:
            job.losses += 1
        if not at_work and not member.ready:
            member.failed_starts += 1  # it died while it was loading
        elif member.ready:
            self._alive_at = time.monotonic()
        self._replace(member)
        for job in again:
            if job.deaths >= DEATHS:
                self._answer(job, died_of(job, error))
        self._place(job for job in again if job.deaths < DEATHS)

    def _replace(self, member: Member) -> None:
        waiting, member.waiting = member.waiting, deque()
        member.calls.clear()
        self._affinity.forget_member(member)
        member.ready = False
        self._ray.kill(member.actor)
        if member.failed_starts < STARTS:
            self._start(member)
        else:
            member.actor = None
        self._place(waiting)

    # --- state on every replica: called while nothing is in flight --------------------------------

    def add_lora(self, adapter: Adapter) -> None:
        """Load an adapter on every replica, or on none."""
        self._adapters[adapter.version] = adapter
        try:
            self._everywhere(
                lambda actor: actor.add_adapter.remote(self._key(adapter), adapter.path)
            )
        except BaseException:
            self.remove_lora(adapter)
            raise

    def remove_lora(self, adapter: Adapter) -> None:
        """Drop an adapter, and the prompts that are pinned with it."""
        self._adapters.pop(adapter.version, None)
        self._pinned = {q: None for q in self._pinned if q.adapter != adapter}
        self._everywhere(lambda actor: actor.remove_adapter.remote(self._key(adapter)))

    def pin(self, query: Query) -> None:
        """Compute and pin a prompt on every replica: each will meet contexts that begin so."""
        self._pinned[query] = None
        try:
            self._everywhere(lambda actor: actor.pin.remote(self._ask(query)))
        except BaseException:
            del self._pinned[query]
            raise

    def clear(self) -> None:
        """Drop all key/value state."""
        self._pinned.clear()
        self._affinity.forget()
        self._everywhere(lambda actor: actor.clear.remote())

    def _everywhere(self, call: Callable[[Any], Any]) -> None:
        """Make a call on every replica. One that dies gets the new state when it starts again.

        Raises:
            Exception: the first error that a replica raised, once all have ended.
        """
        while not any(member.ready for member in self._members):
            self._wait()
        # A replica that is loading knows the state before this change: it begins again.
        for member in self._members:
            if member.actor is not None and not member.ready:
                self._replace(member)
        calls = [(member, call(member.actor)) for member in self._members if member.ready]
        errors = [error for member, made in calls if (error := self._outcome(member, made))]
        if errors:
            raise errors[0]

    def _outcome(self, member: Member, reference: Any) -> Exception | None:
        try:
            while member.ready and not self._ray.wait([reference], timeout=PULSE)[0]:
                self._ping()
            if member.ready:  # else it has been given up, and starts again with the new state
                self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            return cause_of(error)
        except self._ray.exceptions.RayError as error:
            self._lost(member, error)
        return None

    def actors(self) -> Actors:
        return Actors(self._members)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the replicas; those of a named fleet go on, without this program's adapters."""
        if self._closed:
            return
        self._closed = True
        actors = [member.actor for member in self._members if member.actor is not None]
        if self._options.name is not None:
            removals = [
                actor.remove_adapter.remote(self._key(adapter))
                for actor in actors
                for adapter in self._adapters.values()
            ]
            self._ray.wait(removals, num_returns=len(removals), timeout=GRACE) if removals else None
            return
        ready = [member.actor for member in self._members if member.ready]
        ended = [actor.close.remote() for actor in ready]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=GRACE)
        for actor in actors:
            self._ray.kill(actor)


def goes_with(first: Job, job: Job) -> bool:
    """Whether a row may travel with another: no cold one, and suspects among themselves."""
    if not (isinstance(job.request, Query) and isinstance(first.request, Query)):
        return False
    return not (job.request.cold or first.request.cold) and (job.losses, first.losses) in SHARED


#: How often two requests may have been lost that share a call: never, or both once.
SHARED = {(0, 0), (1, 1)}


def fatal(error: Exception) -> bool:
    """Whether a replica that says so is of no further use."""
    return isinstance(error, (EngineDeadError, ModelClosedError))


def cause_of(error: BaseException) -> Exception:
    """What the replica raised, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else EngineError(str(error))


def died_of(job: Job, error: BaseException) -> EngineError:
    return EngineError(
        f"{job.deaths} replicas died, one after the other, while they worked on this request "
        f"alone, a context of {len(job.query.token_ids)} tokens: {error}; other requests go on"
    )


def result_of(returned: Sequence[int] | Any) -> Any:
    """Drawn ids as they are; scores as a tensor that owns its memory."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(returned)) if isinstance(returned, np.ndarray) else returned
