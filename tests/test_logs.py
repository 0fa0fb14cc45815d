from __future__ import annotations

import subprocess
import sys

import structlog

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
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert [word in run.stdout for word in ("one", "two", "three", "four")] == [False, False, True, True]


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
