"""A pytest plugin for the clients' own tests: what needs a model or data from the network is
skipped, by name."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest

#: The messages of transformers, this library and nltk about files that only the network has, with a
#: description.
NEEDED = {
    "couldn't connect to": "a model that is on the hub alone",
    "the hub's cache has no such model": "a model that is on the hub alone",
    "Resource '": "data that nltk downloads",
}

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return skipped(report, item, "" if call.excinfo is None else str(call.excinfo.value))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return skipped(report, collector, str(report.longrepr or ""))


def skipped(report: Report, node: pytest.Item | pytest.Collector, said: str) -> Report:
    """The report of a test or a module, which is skipped if it failed for want of the network."""
    needed = [what for words, what in NEEDED.items() if words in said]
    if report.failed and needed:
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"Skipped: it needs {needed[0]}")
    return report
