from __future__ import annotations

import ast
from pathlib import Path

import pytest
import structlog

from genlm.core import EngineDeadError
from genlm.core.logs import get_logger


@pytest.fixture(autouse=True)
def not_configured():
    """structlog as in a new process, without configuration."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_silent_until_the_application_configures_structlog(capsys):
    log = get_logger()
    log.debug("one")
    log.info("two")
    log.warning("three")
    structlog.configure()
    log.info("four")
    said = capsys.readouterr().out
    assert [word for word in ("one", "two", "three", "four") if word in said] == ["three", "four"]


def test_a_logger_that_fails_harms_no_request(mock, capsys):
    def fail(logger, method, event):
        raise OSError("the log is full")

    lm = mock(die_on=lambda query: query.token_ids == (13,))
    structlog.configure(processors=[fail])
    with pytest.raises(EngineDeadError, match="told to die"):
        lm.next_token_logprobs_sync([13])
    lm.close()
    said = capsys.readouterr().err
    assert "'engine.died' could not be logged" in said
    assert "OSError: the log is full" in said


ROOT = Path(__file__).parents[1]
METHODS = {"debug", "info", "warning", "error", "exception"}


def logged():
    """The events in the code of all distributions."""
    for file in ROOT.glob("**/src/genlm/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(ast.Attribute(attr=method), [ast.Constant(str(event)), *_]) if (
                    method in METHODS and "." in event and " " not in event
                ):
                    yield event


def test_the_page_on_log_events_has_every_event_and_no_other():
    page = (ROOT / "docs/reference/logs.md").read_text()
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert listed == sorted(set(logged()))
