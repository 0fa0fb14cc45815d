"""A pytest plugin for the clients' own tests: what needs a model from the hub is skipped, by
name."""

from __future__ import annotations

from collections.abc import Generator

import pytest

#: What transformers says, and what this library says, of a model that only the hub has.
NO_HUB = ("couldn't connect to", "the hub's cache has no such model")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    said = "" if call.excinfo is None else str(call.excinfo.value)
    if report.failed and any(words in said for words in NO_HUB):
        report.outcome = "skipped"
        path, line, _ = item.location
        report.longrepr = (path, line or 0, "Skipped: it needs a model that is on the hub alone")
    return report
