"""RayEngine, the object that implements the hooks of the core.

The fleet has a thread of its own, so that replicas are watched and restarted even without work. The
engine thread gives it orders, and takes its answers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import evolve

from genlm.core import Adapter, Answer, EngineDeadError, Query, hookimpl
from genlm.core.errors import BackendUnavailableError, InvalidOptionError
from genlm.core.logs import get_logger
from genlm.core.plugins import find_backend
from genlm.core.types import ReductionRequest, Request, SampleRequest, ScoreRequest
from genlm.kit.mailbox import Mailbox
from genlm.ray import watch
from genlm.ray.cluster import Cluster
from genlm.ray.fleet import Fleet
from genlm.ray.free_resources import FreeResources
from genlm.ray.line import Line
from genlm.ray.log import Entry
from genlm.ray.member import Call
from genlm.ray.options import RayOptions
from genlm.ray.watch import LEASE_PULSES
from genlm.ray.wire import HOOKS, Description, absolute, adapter_key, ask

log = get_logger()

#: Seconds in which replicas may release their engines before they are ended.
RELEASE_SECONDS = 30.0

#: Just below 32 MB, the size of the largest block from which glibc learns how much freed memory to
#: keep.
LARGE_BLOCK_BYTES = 31 << 20


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed rows for new ones.

    By default, glibc returns large freed blocks to the system. The next row then causes a page
    fault for every 4 KB, which costs more than filling it. Once a larger block has been allocated
    and freed, glibc keeps freed blocks; in a process with an engine, this happens by itself. On
    other C libraries the call has no effect.
    """
    np.empty(LARGE_BLOCK_BYTES, np.uint8)


class RayEngine:
    """An engine that evaluates on replicas.

    Args:
        cluster: The connection to Ray, which is closed with the engine.
        model: The model's name.
        options: The user's options.

    Raises:
        BackendUnavailableError: not all replicas have started in time.
        Exception: what the inner backend raised while it loaded the model.

    Attributes:
        device: The device on which rows arrive.
        model: The current actor handles of the replicas. A replica that is restarted gets a new
            handle. Any thread may read them.
    """

    device = "cpu"

    def __init__(self, cluster: Cluster, model: str, options: RayOptions) -> None:
        keep_freed_memory()
        self._cluster = cluster
        self._options = options
        self._shared = options.name is not None
        self._program = uuid.uuid4().hex
        self._orders = Mailbox[Callable[[], None]]()  # read by the fleet's thread
        self._answers = Mailbox[list[Answer]]()  # read by the engine thread
        self._flying: dict[Request, bool] = {}
        self._failure: BaseException | None = None
        self._ready = self._awaited = concurrent.futures.Future[Any]()
        self._closing = False
        self.model: list[Any] = [None] * options.replicas
        lines = [
            Line(index, options.actor_options(index), self.model, self._came)
            for index in range(options.replicas)
        ]
        # Ray ends a program's own replicas with the program. On shared replicas the session must
        # end by itself.
        lease = LEASE_PULSES * watch.PULSE_SECONDS if self._shared else None
        per_call = options.function_timeout
        loading = (lease, per_call, options.backend, absolute(model), dict(options.backend_opts))
        patience, now = options.start_timeout, time.monotonic()
        self._fleet = Fleet(self._program, lines, loading, patience, now, shared=self._shared)
        self._thread = threading.Thread(target=self._run, name="genlm-ray-fleet", daemon=True)
        self._thread.start()
        try:
            described = self._await_start()
        except BaseException:
            self.genlm_close()
            raise
        self.tokenizer = described.tokenizer
        self.vocab_size = described.vocab_size
        self.max_context = described.max_context
        self.eos_token_ids = described.eos_token_ids
        self.lacking = described.lacking
        for hook in HOOKS:
            if hook not in described.hooks:
                setattr(self, hook, None)  # pluggy then finds no such hook on this engine

    def _await_start(self) -> Description:
        patience = self._options.start_timeout
        until = time.monotonic() + patience
        free = FreeResources.of(self._cluster.ray, self._options)
        if free.only_in_groups:
            log.warning("replica.no_room", why=free.described())
        while (left := until - time.monotonic()) > 0:
            # If the load is interrupted, it ends between two of these waits, and the replicas are
            # given back.
            if concurrent.futures.wait([self._ready], min(left, 0.2)).done:
                described: Description = self._ready.result()
                return described
        ready = sum(member.ready for member in self._fleet.members)
        free = FreeResources.of(self._cluster.ray, self._options)
        raise BackendUnavailableError(
            f"{ready} of {len(self.model)} replicas were ready after start_timeout={patience:g} "
            f"seconds; {free.described()}; ask for less, or wait longer"
        )

    # --- on the fleet's thread --------------------------------------------------------------------

    def _run(self) -> None:
        fleet = self._fleet
        try:
            while not self._closing:
                with contextlib.suppress(queue.Empty):
                    self._do(self._orders.get(timeout=fleet.pulse / 10))
                while self._orders:
                    self._do(self._orders.get())
                self._do(lambda: fleet.tick(time.monotonic()))
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

    def _do(self, order: Callable[[], None]) -> None:
        """Carry out an order. It is a function of its own so that no variable keeps the order,
        which may hold rows."""
        if not self._cluster.connected:  # any call to Ray would start another cluster
            raise EngineDeadError("ray.shutdown() was called here; load the model again")
        order()

    def _came(self, call: Call, future: concurrent.futures.Future[Any]) -> None:
        line: Line = call.member.line
        self._orders.put(lambda: self._fleet.take(call, line.outcome(call, future)))

    # --- on the engine thread ---------------------------------------------------------------------

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        reductions: Sequence[ReductionRequest],
        dropped: Sequence[Request],
    ) -> list[Answer]:
        """Wait until a request is answered, or :meth:`genlm_wake` is called."""
        refused = self._fleet.functions.refused(reductions)
        travelling = [request for request in reductions if request not in refused]
        new_requests: list[Request] = [*queries, *samples, *scores, *travelling]
        for request in dropped:
            self._flying.pop(request, None)
        self._flying.update(dict.fromkeys(new_requests, True))
        self._orders.put(partial(self._fleet.step, new_requests, dropped))
        waits = self._flying and self._failure is None and not refused
        came = [self._answers.get()] if waits else []
        while self._answers:
            came.append(self._answers.get())
        # Leave out requests that were dropped after they had been answered.
        flying = self._flying
        answers = [each for some in came for each in some if flying.pop(each[0], False)]
        if self._failure is not None and not answers:
            raise self._failure
        return [*map(Answer, refused, refused.values()), *answers]

    @hookimpl
    def genlm_wake(self) -> None:
        self._answers.put([])

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        key = adapter_key(adapter.version, self._program)
        path = absolute(adapter.path)
        apply, take_back = ("add_adapter", key, path), ("remove_adapter", key)
        return self._change(partial(self._fleet.add, Entry(apply, take_back, adapter.version)))

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        return self._change(partial(self._fleet.remove_adapter, adapter.version))

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        """Pin a prompt on every replica, since each will get contexts that begin with it."""
        asked = ask(query, self._program)
        version = query.adapter.version if query.adapter else None
        entry = Entry(("pin", asked), ("unpin", asked), version)
        return self._change(partial(self._fleet.add, entry))

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._change(partial(self._fleet.clear, Entry(("clear",))))

    def _change(self, order: Callable[[Callable[[Exception | None], None]], None]) -> bool:
        """Let the fleet's thread change the state of the replicas, and wait until it is done."""
        self._awaited = ended = concurrent.futures.Future[Exception | None]()
        self._orders.put(partial(order, ended.set_result))
        error = self._failure or ended.result()
        if error is not None:
            raise error
        return True

    @hookimpl
    def genlm_close(self) -> None:
        """End the replicas. The replicas of a named fleet continue, unless the fleet was never
        ready."""
        self._closing = True
        self._orders.put(lambda: None)
        try:
            self._thread.join(RELEASE_SECONDS)
            if self._cluster.connected:
                self._leave(end=not (self._shared and self._fleet.started))
        finally:
            self._cluster.leave()

    def _leave(self, end: bool) -> None:
        ray = self._cluster.ray
        there = [member for member in self._fleet.members if member.line.actor is not None]
        left = {
            member: member.line.actor.leave.remote((self._program, member.life), end)
            for member in there
            if member.loaded or (self._shared and end)
        }
        ray.wait([*left.values()], num_returns=len(left), timeout=RELEASE_SECONDS) if left else None
        for member in there:
            if not self._shared or (end and member.line.may_end(left[member])):
                ray.kill(member.line.actor)


def load(model: str, options: Mapping[str, Any], verify: Any = None) -> RayEngine:
    """Start the replicas, or join those of a named fleet, and wait until all are ready.

    Args:
        model: A folder or hub name, as the inner backend takes it.
        options: The options of :class:`RayOptions`.
        verify: Whether each replica verifies its model; ``None`` is the inner backend's choice.
            Reports are not sent to the program: if a function is to get them, a replica raises an
            error instead.

    Raises:
        InvalidOptionError: the inner backend verifies no models.
    """
    checked = RayOptions.checked(options)
    if verify is not None:
        checked = _verifying(checked, bool(verify))
    cluster = Cluster(checked.address)
    try:
        return RayEngine(cluster, model, checked)
    except BaseException:
        cluster.leave()
        raise


def _verifying(options: RayOptions, verify: bool) -> RayOptions:
    """The options of the replicas, with verification switched on or off."""
    if find_backend(options.backend).verifies:
        return evolve(options, backend_opts={"verify": verify, **options.backend_opts})
    if verify:
        raise InvalidOptionError(
            f"backend {options.backend!r} verifies no models; leave out verify"
        )
    return options
