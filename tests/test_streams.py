"""Samples as they come: `lm.stream`."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from genlm.core import InvalidOptionError, InvalidQueryError, MockAsyncLM
from genlm.core.mock import MockEngine

from .conftest import Gate

HOW = {"seed": 5, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}


async def collected(lm: MockAsyncLM, *arguments, **options) -> list[int]:
    return [token_id async for token_id in lm.stream(*arguments, **options)]


async def test_stream_gives_the_tokens_of_sample(mock, monkeypatch) -> None:
    monkeypatch.delattr(MockEngine, "genlm_sample")
    lm = mock()
    expected = await lm.sample([1, 2], 40, range(30), **HOW)
    assert 0 < len(expected) < 40  # a stop token ended it, and is left out
    assert await collected(lm, [1, 2], 40, eos_token_ids=range(30), **HOW) == expected
    assert await collected(lm, [1, 2], 40, range(30), **HOW) == expected
    assert await collected(lm, lm.context([1, 2]), 0) == []


async def test_a_token_comes_before_the_next_one_is_asked_for(mock, gate: Gate) -> None:
    stream = mock().stream([1], 2, eos_token_ids=[])
    await anext(stream)
    assert gate.batches == [[(1,)]]
    await anext(stream)
    assert len(gate.batches) == 2
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_cancelled_stream_drops_its_requests(mock, gate: Gate) -> None:
    lm = mock(continuous=True, steps=3)
    gate.shut()
    streaming = asyncio.ensure_future(collected(lm, [1], 5))
    await asyncio.to_thread(gate.wait_entered)
    streaming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await streaming
    gate.open()
    await lm.next_token_logprobs([3])
    assert lm.stats.cancelled == 1
    assert gate.batches == [[(1,)], [(3,)], [(3,)], [(3,)]]


@pytest.mark.parametrize("read", [0, 1, 3])
async def test_a_stream_can_be_closed_at_any_place(mock, read: int) -> None:
    stream = mock().stream([1], 2, eos_token_ids=[])
    async with contextlib.aclosing(stream):
        assert [await anext(stream, None) for _ in range(read)].count(None) == max(0, read - 2)
    await stream.aclose()
    assert [token_id async for token_id in stream] == []


def test_stream_arguments_are_checked_before_it_is_read(mock) -> None:
    lm = mock(max_context=4)
    with pytest.raises(InvalidOptionError, match="temperature must be"):
        lm.stream([1], 3, temperature=-1)
    with pytest.raises(InvalidOptionError, match="stream has no argument stop: a stop string"):
        lm.stream([1], 3, stop=["x"])
    with pytest.raises(InvalidQueryError, match="leaves room for 4 of the 9"):
        lm.stream([1], 9)
