from __future__ import annotations

import asyncio
import json
import warnings
from collections import Counter

import pytest

from genlm.core import EngineError, InvalidInputError

from .conftest import busy, gathered


def recorded(path):
    return json.loads(path.read_text())["traceEvents"]


def named(events, name, phase):
    return [event for event in events if event["name"] == name and event["ph"] == phase]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def finish(lm):
    lm.clear_kv_cache()  # returns once the previous batch has been delivered


def test_requests_batches_stages_and_hits(mock, path):
    lm = mock()
    with lm.trace(path):
        gathered(*(lm.next_token_logprobs([i]) for i in range(5)))
        lm.next_token_logprobs_sync([0])
        finish(lm)
    events = recorded(path)

    requests = {event["id"]: event for event in named(events, "request", "b")}
    ends = {event["id"]: event for event in named(events, "request", "e")}
    assert requests.keys() == ends.keys()
    assert len(requests) == 5
    assert all(ends[number]["ts"] >= requests[number]["ts"] for number in requests)
    assert {end["args"]["end"] for end in ends.values()} == {"answered"}
    assert requests[min(requests)]["args"] == {"asked": "Query", "tokens": 1, "adapter": None}
    assert len(named(events, "cache hit", "i")) == 1

    (batch,) = named(events, "batch", "X")
    assert batch["tid"] != requests[min(requests)]["tid"]
    assert batch["args"] == {"requests": 5}
    assert [span["args"] for span in named(events, "engine", "X")] == [{"requests": 5}]
    stages = [
        span for name in ("engine", "alignment", "caching") for span in named(events, name, "X")
    ]
    assert len(stages) == 4
    for span in stages:
        assert span["tid"] == batch["tid"]
        assert batch["ts"] <= span["ts"]
        # Times in a trace are rounded to nanoseconds.
        assert span["ts"] + span["dur"] <= batch["ts"] + batch["dur"] + 0.01
    (thread,) = [event for event in events if event["ph"] == "M" and event["tid"] == batch["tid"]]
    assert thread["args"] == {"name": "genlm-mock"}
    for overlapping in ("queue", "delivery"):
        phases = Counter(event["ph"] for event in events if event["name"] == overlapping)
        assert phases == {"b": 1, "e": 1}


async def test_trace_says_how_each_request_ended(mock, gate, path):
    lm = mock(fail_on=lambda query: query.token_ids == (7,))
    with lm.trace(path):
        with pytest.raises(EngineError):
            lm.next_token_logprobs_sync([7])
        gate.wait_entered()  # the previous batch
        asked = await busy(lm, gate, [1])
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gate.open()
    ends = [event["args"]["end"] for event in named(recorded(path), "request", "e")]
    assert ends == ["EngineError", "cancelled"]


def test_a_trace_needs_a_path(mock):
    with pytest.raises(InvalidInputError, match="needs the path of its file; got None"):
        mock().trace(None)


def test_an_error_in_the_block_leaves_a_trace(mock, path):
    lm = mock()
    with pytest.raises(InvalidInputError), lm.trace(path):
        [lm.next_token_logprobs_sync([token_id]) for token_id in (1, 258)]
    assert len(named(recorded(path), "request", "b")) == 1


def test_second_trace_of_a_model_is_rejected(mock, path, tmp_path):
    lm = mock()
    with lm.trace(path):
        with (
            pytest.raises(InvalidInputError, match="trace\\.json"),
            lm.trace(tmp_path / "other.json"),
        ):
            pass
        assert not (tmp_path / "other.json").exists()
        lm.next_token_logprobs_sync([1])
    assert len(named(recorded(path), "request", "b")) == 1


def test_trace_holds_the_events_of_its_block(mock, path):
    lm = mock()
    trace = lm.trace(path)
    for context in ([1], [1, 2]):
        lm.next_token_logprobs_sync([*context, 3])
        finish(lm)
        with trace:
            lm.next_token_logprobs_sync(context)
            finish(lm)
        lm.next_token_logprobs_sync([*context, 4])
    assert [request["args"]["tokens"] for request in named(recorded(path), "request", "b")] == [2]


def test_a_bad_path_is_known_at_once(mock, tmp_path):
    lm = mock()
    with pytest.raises(OSError, match="missing"), lm.trace(tmp_path / "missing" / "trace.json"):
        raise AssertionError("the block was entered")
    with lm.trace(tmp_path / "trace.json"):
        pass


def test_trace_that_is_never_entered_warns(mock, path):
    lm = mock()
    with pytest.warns(RuntimeWarning, match=r"trace\.json'\) has recorded nothing: write `with lm"):
        lm.trace(path)
    with warnings.catch_warnings(), lm.trace(path):
        warnings.simplefilter("error")
    assert recorded(path) == []


def test_trace_of_a_continuous_engine_has_every_step(mock, path):
    lm = mock(continuous=True, steps=3)
    with lm.trace(path):
        lm.next_token_logprobs_sync([1])
        finish(lm)
    steps = [span["args"]["requests"] for span in named(recorded(path), "engine", "X")]
    assert steps == [1, 0, 0]
