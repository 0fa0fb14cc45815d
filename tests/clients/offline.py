"""A pytest plugin for the clients' own tests: what needs a model from the hub is skipped, by
name."""

from __future__ import annotations

from collections.abc import Generator

import pytest

NO_HUB = "couldn't connect to 'https://huggingface.co'"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and NO_HUB in str(call.excinfo.value):
        report.outcome = "skipped"
        path, line, _ = item.location
        report.longrepr = (path, line or 0, "Skipped: it needs a model that is on the hub alone")
    return report
