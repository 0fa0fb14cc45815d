"""Every causal family that transformers has, also of models that see or hear, as far as a small
model of it can be built: rows from kept state are those of cold forwards, around every threshold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import transformers

from genlm.hf import static
from tools.families import Outcome, note, recorded

from .families import FAMILIES
from .models import sweep
from .recorded import recorded_steps

#: The least number of families that must have been tried. When this was written, with transformers
#: 5.24, it was 232.
MIN_FAMILIES = 200


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[list[Any]]:
    """The table of results, printed at the end."""
    found: list[Any] = []
    yield found
    lines = [f"{len(found)} families: {dict(Counter(one.outcome for one in found))}"]
    for one in sorted(found, key=lambda one: (one.outcome, one.reuse, one.family)):
        line = f"{one.outcome:16}{one.reuse:10}{one.crossed} {one.family:28}{one.why}"
        lines.append(line.rstrip())
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_family_by_recorded_steps(family: str) -> None:
    with recorded_steps(), patch.object(static, "STEPS_BEFORE_RECORDING", 1):
        found = sweep(family, static=True)
    assert found.outcome != "wrong", found.why


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_the_outcome_of_the_record(family: str, table: list[Any]) -> None:
    found = sweep(family)
    table.append(found)
    limit = "keeps no state" if found.reuse == "none" and found.outcome == "right" else ""
    versions = f"transformers {transformers.__version__}"
    outcome = Outcome("hf", family, found.outcome, limit, " ".join(found.why.split()), versions)
    note(outcome)
    before = recorded("hf", family)
    assert found.outcome != "wrong", found.why
    assert before is None or before.outcome == outcome.outcome, (before, outcome)


def test_most_families_were_tried(table: list[Any]) -> None:
    if len(table) < len(FAMILIES):
        pytest.skip("not every family was asked for")
    counts = Counter(one.outcome for one in table)
    assert counts["right"] + counts["refused"] >= MIN_FAMILIES
