"""A long run of tests in short pieces: ``python -m pytest -p tools.resumed --record FILE --seconds
290 ...``, again and again. The exit code is 2 while tests are left, and 0 when all have passed.

Each outcome is recorded as soon as a test ends. A test whose record says that it passed or was
skipped is deselected; one that failed runs again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("resumed")
    group.addoption("--record", type=Path, help="the record, a line of JSON for each outcome")
    group.addoption("--seconds", type=float, help="begin no test after this many seconds")


def pytest_configure(config: pytest.Config) -> None:
    record = config.getoption("record")
    if record is None:
        raise pytest.UsageError("-p tools.resumed needs --record FILE")
    record.parent.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Resumed(record, config.getoption("seconds")))


class Resumed:
    """Leaves out what the record has, writes each outcome, and ends in time.

    Args:
        record: The file of outcomes.
        seconds: After how many seconds no further test begins; ``None`` is never.
    """

    def __init__(self, record: Path, seconds: float | None) -> None:
        self._record, self._seconds = record, seconds
        self._began = time.monotonic()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        outcomes = self._outcomes()
        done = [item for item in items if outcomes.get(item.nodeid) in ("passed", "skipped")]
        config.hook.pytest_deselected(items=done)
        left = set(items) - set(done)
        items[:] = [item for item in items if item in left]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
            with self._record.open("a", encoding="utf-8") as record:
                record.write(json.dumps({"test": report.nodeid} | outcome) + "\n")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self._seconds is not None and time.monotonic() - self._began > self._seconds:
            item.session.shouldstop = "the time is up; the same command goes on"

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._outcomes():
            session.exitstatus = pytest.ExitCode.OK

    def _outcomes(self) -> dict[str, str]:
        """The last outcome of each test."""
        if not self._record.exists():
            return {}
        lines = self._record.read_text(encoding="utf-8").splitlines()
        return {each["test"]: each["outcome"] for each in map(json.loads, lines)}
