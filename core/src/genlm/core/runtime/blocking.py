"""Waiting for coroutines without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from genlm.core.runtime.askers import ASKING

T = TypeVar("T")


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in its own event loop and thread, and wait for it: the calling thread may
    have a running loop."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    abandoned = threading.Event()

    async def run() -> T:
        task = asyncio.ensure_future(coroutine)
        tasks.append((asyncio.get_running_loop(), task))
        if abandoned.is_set():  # before a task existed to be cancelled
            task.cancel()
        return await task

    asker = ASKING.asker

    def main() -> None:
        ASKING.asker = asker
        try:
            answer.set_result(asyncio.run(run()))
        except BaseException as error:
            answer.set_exception(error)

    try:
        threading.Thread(target=main, name="genlm-blocking", daemon=True).start()
        return answer.result()
    except BaseException:
        if not answer.done():  # an interrupt of the calling thread
            abandoned.set()
            for loop, task in tasks:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
        raise
