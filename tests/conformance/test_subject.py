"""What the clauses ask a model through."""

from __future__ import annotations

import asyncio
import threading

import pytest

from genlm.core import AsyncLM
from genlm.core.conformance.subject import Subject


def test_a_call_ends_quietly_after_its_waiter_gave_up() -> None:
    subject = Subject(_no_model, {}, atol=1e-3, effort=1, patience=5)
    may_end = threading.Event()
    call = subject.thread(may_end.wait)

    async def give_up() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(call))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    may_end.set()
    assert call.result(timeout=5) is True


def _no_model(wrappers: object) -> AsyncLM:
    raise AssertionError("no model is needed")
