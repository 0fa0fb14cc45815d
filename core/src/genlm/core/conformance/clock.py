"""A clock that counts the calls of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from genlm.core.conformance.gate import EngineCall
from genlm.core.conformance.subject import Subject


@asynccontextmanager
async def after_each_call(
    live: Subject, happens: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Inside the block, something happens in this event loop at the end of each call of the engine,
    which waits for it: what is asked then is there for the next call."""
    loop = asyncio.get_running_loop()

    async def tick() -> None:
        await happens()

    def ended(_: EngineCall) -> None:
        live.wait(asyncio.run_coroutine_threadsafe(tick(), loop))

    live.gate.on_call = ended
    try:
        yield
    finally:
        live.gate.on_call = None
        # A call may be under way still, and wait for this loop.
        await live.all_done([asyncio.wrap_future(live.thread(live.lm.clear_kv_cache))])
