"""Every causal family that transformers and SGLang have; collected only when it is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep import Tried, report, swept

from .families import opened, served

FAMILIES = sorted(served())

#: How many families could be tried when this was written, with transformers 5.19 and SGLang 0.5.23.
TRIED = 25


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[list[Tried]]:
    """What was found; printed at the end."""
    found: list[Tried] = []
    yield found
    report(found, pytestconfig)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str, table: list[Tried], tmp_path: Path) -> None:
    found = swept(family, tmp_path, opened)
    table.extend(found)
    wrong = [one for one in found if one.outcome in ("wrong", "failed")]
    assert not wrong, wrong


def test_most_families_were_tried(table: list[Tried]) -> None:
    families = {one.family for one in table}
    if len(families) < len(FAMILIES):
        pytest.skip("not every family was asked for")
    assert len({one.family for one in table if one.outcome == "right"}) >= TRIED
