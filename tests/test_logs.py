from __future__ import annotations

import subprocess
import sys

import pytest
import structlog

from genlm.core import EngineDeadError
from genlm.core.logs import get_logger


def test_silent_until_the_application_configures_structlog():
    program = """
from genlm.core.logs import get_logger
log = get_logger()
log.debug("one"); log.info("two"); log.warning("three")
import structlog
structlog.configure()
log.info("four")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert [word in run.stdout for word in ("one", "two", "three", "four")] == [
        False,
        False,
        True,
        True,
    ]


def test_events_carry_their_fields():
    log = get_logger()
    with structlog.testing.capture_logs() as events:
        log.info("backend.chosen", backend="hf")
        try:
            raise OSError("gone")
        except OSError:
            log.exception("engine.close_failed")
    assert [event["event"] for event in events] == ["backend.chosen", "engine.close_failed"]
    assert events[0]["backend"] == "hf"
    assert events[1]["exc_info"]


@pytest.fixture
def failing_logger():
    def fail(logger, method, event):
        raise OSError("the log is full")

    structlog.configure(processors=[fail])
    yield
    structlog.reset_defaults()


def test_a_logger_that_fails_harms_no_request(mock, failing_logger, capsys):
    lm = mock(die_on=lambda query: query.token_ids == (13,))
    with pytest.raises(EngineDeadError, match="told to die"):
        lm.next_token_logprobs_sync([13])
    said = capsys.readouterr().err
    assert "'engine.died' could not be logged" in said
    assert "OSError: the log is full" in said
