"""Blocking requests of hooks: a hook on an engine thread may wait for other models, but not for its
own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from genlm.core.errors import ReentrancyError, UnsupportedError

T = TypeVar("T")


class Asker:
    """An engine thread, as the asker if a hook on it makes a request of a model.

    Args:
        name: The engine's, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._waits_for: list[Asker] = []

    def check(self, other: Asker) -> None:
        """Raises: ReentrancyError: ``other`` is this thread, or already waits for it."""
        if other is self:
            raise ReentrancyError(
                "a hook or wrapper asked its own model, which answers only once the hook has "
                "returned; ask before loading, or use the engine object directly"
            )
        met, waiting = {id(other)}, [other]
        while waiting:
            for each in list(waiting.pop()._waits_for):
                if each is self:
                    raise ReentrancyError(
                        f"a hook of {self.name} asked {other.name}, which waits for {self.name} in "
                        "a hook of its own; of two models, only one may ask the other in its hooks"
                    )
                if id(each) not in met:
                    met.add(id(each))
                    waiting.append(each)

    def waiting_for(self, other: Asker) -> Callable[[Any], None]:
        """Note that this asker waits for ``other``; returns a callback for the end of the wait."""
        self._waits_for.append(other)
        return lambda _: self._waits_for.remove(other)


class Asking(threading.local):
    """The asker in whose hook a thread is: on its engine thread, or in the thread of a blocking
    method that the hook has called. Other threads and tasks that a hook starts are not known: the
    hook need not wait for them."""

    asker: Asker | None = None


#: The asker of each thread.
ASKING = Asking()


def blocking(
    coroutine: Coroutine[Any, Any, T], result_of: Callable[[concurrent.futures.Future[T]], T]
) -> T:
    """Run a coroutine in its own event loop and thread, and wait for it by ``result_of``: the
    calling thread may have a running loop."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    loop, asker = asyncio.new_event_loop(), ASKING.asker

    def main() -> None:
        ASKING.asker = asker
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                answer.set_result(runner.run(coroutine))
        except BaseException as error:
            answer.set_exception(error)

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    try:
        threading.Thread(target=main, name="genlm-blocking", daemon=True).start()
        return result_of(answer)
    except BaseException:
        if not answer.done():  # the calling thread was interrupted
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(cancel)
        raise


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that awaits.

    Raises:
        UnsupportedError: there is none of asyncio's (a ``RuntimeError``).
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UnsupportedError(
            "a model is awaited in an event loop of asyncio, and none runs here; in another "
            "library's, such as trio, call a blocking method in a thread: `await "
            "trio.to_thread.run_sync(lm.next_token_logprobs_sync, ids)`"
        ) from None


async def all_of(asked: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all coroutines. If one fails, the others are cancelled, because their results
    are useless."""
    loop = running_loop()
    tasks = [asyncio.ensure_future(each, loop=loop) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
