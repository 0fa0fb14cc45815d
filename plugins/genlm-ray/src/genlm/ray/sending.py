"""Calls of replicas, and the thread that makes them.

The fleet has a thread of its own, so that replicas are watched, and start again, whether there is
work or not. The engine thread gives it orders, and takes answers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from genlm.core import Adapter, Answer, EngineDeadError, EngineError, Query
from genlm.core.engines.mailbox import Mailbox
from genlm.core.errors import BackendUnavailableError, ModelClosedError
from genlm.core.types import Request
from genlm.ray import watch
from genlm.ray.fleet import CANCELLED, Fleet
from genlm.ray.log import Entry
from genlm.ray.options import NAMESPACE, RayOptions
from genlm.ray.watch import LEASE, Call, Gone
from genlm.ray.wire import Description, FleetEnded, SessionLost, adapter_key, ask

#: Seconds for the replicas to release their engines before they are ended.
GRACE = 30.0

#: How many calls a replica takes at a time. The programs ask for far fewer.
CONCURRENCY = 10_000


class Line:
    """The way to one replica: its actor, which Ray starts, names and places.

    Ray could start it again itself (``max_restarts``). It would say one or two seconds later that
    it has died, and the program must give it its state in any case.

    Args:
        ray: The module, connected to a cluster.
        options: The user's.
        index: Which replica.
        actors: The handles of all replicas as they are now; for any thread to read.
        came: Called with each call and its future, on any thread.
    """

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        index: int,
        actors: list[Any],
        came: Callable[[Call, concurrent.futures.Future[Any]], None],
    ) -> None:
        self._ray = ray
        self._came = came
        self.index = index
        self._options = options.actor_options(index)
        self._name = self._options.get("name")  # of a shared fleet
        self._actors = actors
        self._failure: Exception | None = None
        self.made = False  # by this program, and not joined

    @property
    def actor(self) -> Any:
        return self._actors[self.index]

    def start(self) -> None:
        """Start an actor in place of the one before; of a shared fleet, join the one that is
        there. A program ends its own replicas only."""
        from genlm.ray.replica import WATCH, Replica

        self._failure = None
        try:
            if self.actor is not None and not self._name:
                self._ray.kill(self.actor)
            self.made = not self._is_there()
            kind = self._ray.remote(concurrency_groups={WATCH: CONCURRENCY})(Replica)
            actor = kind.options(max_concurrency=CONCURRENCY, **self._options)
            self._actors[self.index] = actor.remote()
        except Exception as error:
            self._failure = error

    def _is_there(self) -> bool:
        with contextlib.suppress(ValueError):
            return bool(self._name and self._ray.get_actor(self._name, namespace=NAMESPACE))
        return False

    def send(self, call: Call, method: str, *arguments: Any) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            call.reference = getattr(self.actor, method).remote(*arguments)
            future = call.reference.future()
        except Exception as error:  # such as an option that does not travel
            future = concurrent.futures.Future()
            future.set_exception(error)
        future.add_done_callback(partial(self._came, call))

    def cancel(self, call: Call) -> None:
        self._ray.cancel(call.reference)

    def outcome(self, future: concurrent.futures.Future[Any]) -> Any:
        """What came back, as the fleet takes it."""
        exceptions = self._ray.exceptions
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, exceptions.TaskCancelledError):
            return CANCELLED
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, (SessionLost, FleetEnded)):
            return Gone(str(cause), computing=False, ended=isinstance(cause, FleetEnded))
        if isinstance(cause, (EngineDeadError, ModelClosedError)):
            return Gone(str(cause))
        if isinstance(error, exceptions.RayTaskError):
            return cause if isinstance(cause, Exception) else EngineError(str(error))
        return Gone(str(error)) if isinstance(error, exceptions.RayError) else error

    def leave(self, token: tuple[str, int], end: bool) -> Any:
        return self.actor.leave.remote(token, end)

    def may_end(self, left: Any) -> bool:
        """Whether nobody uses the replica, as it said. One that does not answer has never started
        if this program made it; others may use it if not."""
        try:
            return bool(self._ray.get(left, timeout=0))
        except self._ray.exceptions.GetTimeoutError:
            return self.made
        except self._ray.exceptions.RayError:
            return False


def results_of(returned: Any, n: int) -> list[Any]:
    """For each request of a call its row, drawn ids, scores or error."""
    import numpy as np
    import torch

    array, others = returned
    # Copied, because the array lies in memory that other processes read: once, for all rows.
    rows = iter(() if array is None else torch.from_numpy(np.array(array)))
    found = [others[place] if place in others else next(rows) for place in range(n)]
    return [torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x for x in found]


class FleetThread:
    """Starts the replicas and waits until all are ready. For the engine thread.

    Args:
        ray: The module, connected to a cluster.
        model: The model's name.
        options: The user's.

    Raises:
        BackendUnavailableError: not all replicas have started in time.
        Exception: what the inner backend raised while it loaded the model.

    Attributes:
        actors: The replicas' actor handles as they are now: a replica that starts again has a new
            one. May be read by any thread.
        description: What the replicas say of their engine.
    """

    def __init__(self, ray: Any, model: str, options: RayOptions) -> None:
        self._ray = ray
        self._options = options
        self._program = uuid.uuid4().hex
        self._orders = Mailbox[Callable[[], None]]()  # for the fleet's thread
        self._answers = Mailbox[list[tuple[Request, Any]]]()  # for the engine thread
        self._flying: set[Request] = set()
        self._failure: BaseException | None = None
        self._ready = self._awaited = concurrent.futures.Future[Any]()
        self._closing = False
        self.actors: list[Any] = [None] * options.replicas
        each = range(options.replicas)
        lines = [Line(ray, options, index, self.actors, self._came) for index in each]
        # Ray ends a program's own replicas with it; on shared ones only its session ends.
        shared = options.name is not None
        lease = LEASE * watch.PULSE if shared else None
        loading = (lease, options.backend, model, dict(options.backend_opts))
        patience, now = options.start_timeout, time.monotonic()
        self._fleet = Fleet(self._program, lines, loading, patience, now, shared=shared)
        self._thread = threading.Thread(target=self._run, name="genlm-ray", daemon=True)
        self._thread.start()
        try:
            self.description = self._await_start()
        except BaseException:
            self.close()
            raise

    def _await_start(self) -> Description:
        patience = self._options.start_timeout
        if concurrent.futures.wait([self._ready], patience).done:
            described: Description = self._ready.result()
            return described
        ready = sum(member.ready for member in self._fleet.members)
        raise BackendUnavailableError(
            f"{ready} of {len(self.actors)} replicas were ready after "
            f"start_timeout={patience:g} seconds; the cluster has "
            f"{self._ray.available_resources()} free, and each replica asks for "
            f"{self._options.actor_options(0)}; ask for less, or wait longer"
        )

    # --- on the fleet's thread --------------------------------------------------------------------

    def _run(self) -> None:
        fleet = self._fleet
        try:
            while not self._closing:
                with contextlib.suppress(queue.Empty):
                    self._orders.get(timeout=fleet.pulse / 10)()
                while self._orders:
                    self._orders.get()()
                fleet.tick(time.monotonic())
                if fleet.answers:
                    answers, fleet.answers = fleet.answers, []
                    self._answers.put(answers)
                if fleet.started and not self._ready.done():
                    self._ready.set_result(fleet.description)
        except BaseException as error:
            self._failure = error
            self._answers.put([])
            if not self._awaited.done():
                self._awaited.set_exception(error)

    def _came(self, call: Call, future: concurrent.futures.Future[Any]) -> None:
        self._orders.put(partial(self._take, call, future))

    def _take(self, call: Call, future: concurrent.futures.Future[Any]) -> None:
        outcome = call.member.line.outcome(future)
        if call.portion and isinstance(outcome, tuple):
            outcome = results_of(outcome, len(call.portion.jobs))
        self._fleet.take(call, outcome)

    # --- on the engine thread ---------------------------------------------------------------------

    def step(self, newcomers: Sequence[Request], dropped: Iterable[Request]) -> list[Answer]:
        """Take newcomers, and wait until something is answered or :meth:`wake` is called.

        Raises:
            EngineDeadError: no replica will answer any more.
        """
        self._flying.difference_update(dropped)
        self._flying.update(newcomers)
        self._orders.put(partial(self._fleet.step, newcomers, dropped))
        answers: list[Answer] = []
        while self._failure is None and (self._answers or (self._flying and not answers)):
            for request, result in self._answers.get():
                if request in self._flying:  # else it has been dropped since
                    self._flying.remove(request)
                    answers.append(Answer(request, result))
            if not self._answers:
                break
        if self._failure is not None and not answers:
            raise self._failure
        return answers

    def wake(self) -> None:
        """Let the step under way return, or the next one. From any thread."""
        self._answers.put([])

    def add_lora(self, adapter: Adapter) -> None:
        """Load an adapter on every replica, or on none."""
        key = adapter_key(adapter.version, self._program)
        apply = ("add_adapter", key, adapter.path)
        self._add(Entry(apply, ("remove_adapter", key), adapter.version))

    def pin(self, query: Query) -> None:
        """Compute and pin a prompt on every replica: each will meet contexts that begin so."""
        asked = ask(query, self._program)
        version = query.adapter.version if query.adapter else None
        self._add(Entry(("pin", asked), ("unpin", asked), version))

    def _add(self, entry: Entry) -> None:
        self._change(partial(self._fleet.add, entry))

    def remove_lora(self, adapter: Adapter) -> None:
        self._change(partial(self._fleet.remove_adapter, adapter.version))

    def clear(self) -> None:
        self._change(partial(self._fleet.clear, Entry(("clear",))))

    def _change(self, order: Callable[[Callable[[Exception | None], None]], None]) -> None:
        """Have the fleet's thread change the state of the replicas, and wait until it has."""
        self._awaited = ended = concurrent.futures.Future[Exception | None]()
        self._orders.put(partial(order, ended.set_result))
        if self._failure is not None:
            raise self._failure
        error = ended.result()
        if error is not None:
            raise error

    def close(self) -> None:
        """End the replicas; those of a named fleet go on, unless it never was ready."""
        if self._closing:
            return
        self._closing = True
        self._orders.put(lambda: None)
        self._thread.join(GRACE)
        shared, end = self._options.name is not None, not self._fleet.started
        there = [member for member in self._fleet.members if member.line.actor is not None]
        left = {
            m: m.line.leave((self._program, m.life), end or not shared)
            for m in there
            if m.loaded or (shared and end)
        }
        if left:
            self._ray.wait([*left.values()], num_returns=len(left), timeout=GRACE)
        for member in there:
            if not shared or (end and member.line.may_end(left[member])):
                self._ray.kill(member.line.actor)
