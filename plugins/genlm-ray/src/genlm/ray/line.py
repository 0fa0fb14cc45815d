"""The line to one replica: its actor, which Ray starts, names and places."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import define

import ray
from genlm.core import EngineDeadError, EngineError
from genlm.core.errors import InvalidOptionError, ModelClosedError
from genlm.ray.fleet import CANCELLED
from genlm.ray.member import Call
from genlm.ray.options import NAMESPACE
from genlm.ray.replica import WATCH, Replica
from genlm.ray.wire import Gone, received
from ray.exceptions import UnserializableException

#: How many calls a replica takes at a time, far more than programs make.
MAX_CONCURRENT_CALLS = 10_000

#: The actor class that Ray starts. It is made once, because Ray keeps every class that it is given.
ACTOR: Any = ray.remote(concurrency_groups={WATCH: MAX_CONCURRENT_CALLS})(Replica)

#: Ray's errors for an answer that cannot be unpickled, although the replica is well.
UNREADABLE = (ray.exceptions.RaySystemError, UnserializableException)


@define(eq=False)
class Line:
    """Starts a replica and calls it.

    Ray's own restarts (``max_restarts``) are not used. With them, a death is reported one or two
    seconds later, and the program must restore the replica's state in any case.
    """

    index: int
    options: dict[str, Any]  # the options of the actor
    actors: list[Any]  # the current handles of all replicas
    # Called on any thread, with each result.
    came: Callable[[Call, concurrent.futures.Future[Any]], None]
    made: bool = False  # whether this program started the actor, and did not join it
    failure: Exception | None = None  # why there is no actor

    @property
    def actor(self) -> Any:
        return self.actors[self.index]

    def start(self) -> None:
        """Start an actor in place of the previous one. In a shared fleet, join the actor if it
        exists. A program ends only its own replicas."""
        self.failure = None
        try:
            name = self.options.get("name", "")  # the names of actors of a shared fleet
            if self.actor is not None and not name:
                ray.kill(self.actor)
            self.made = True
            with contextlib.suppress(ValueError):
                self.made = not ray.get_actor(name, namespace=NAMESPACE)
            actor = ACTOR.options(max_concurrency=MAX_CONCURRENT_CALLS, **self.options)
            self.actors[self.index] = actor.remote()
        except ValueError as error:  # for example, num_gpus=1.5
            self.failure = InvalidOptionError(
                f"Ray rejects the resources or the name of a replica, {self.options}: {error}"
            )
        except Exception as error:
            self.failure = error

    def send(self, call: Call, method: str, *arguments: Any) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            call.reference = getattr(self.actor, method).remote(*arguments)
            future = call.reference.future()
        except Exception as error:
            future = concurrent.futures.Future()
            future.set_exception(error)
        future.add_done_callback(partial(self.came, call))

    def cancel(self, call: Call) -> None:
        ray.cancel(call.reference)

    def outcome(self, call: Call, future: concurrent.futures.Future[Any]) -> Any:
        """The outcome of a call, in the form that the fleet takes."""
        error = future.exception()
        cause = getattr(error, "cause", None) or error
        if error is None:
            result = future.result()
            return received(result) if call.jobs else result
        if isinstance(error, ray.exceptions.TaskCancelledError):
            return CANCELLED
        if isinstance(cause, Gone):
            return cause
        if isinstance(cause, (EngineDeadError, ModelClosedError)):
            return Gone(str(cause))
        if isinstance(error, ray.exceptions.RayTaskError):
            return cause if isinstance(cause, Exception) else EngineError(str(error))
        if isinstance(error, UNREADABLE):
            return EngineError(
                f"an answer of replica {self.index} cannot be read here ("
                f"{str(error).strip().splitlines()[-1]}); install in this program's environment "
                "what the replicas have"
            )
        return Gone(str(error)) if isinstance(error, ray.exceptions.RayError) else error

    def may_end(self, left: Any) -> bool:
        """Whether no program uses the replica. If it does not answer, it has never started if this
        program made it; otherwise other programs may be using it."""
        try:
            return bool(ray.get(left, timeout=0))
        except ray.exceptions.GetTimeoutError:
            return self.made
        except ray.exceptions.RayError:
            return False
