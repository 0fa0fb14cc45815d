"""Every causal family that transformers and mlx-lm have; collected only when it is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import MODEL_REMAPPING
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from genlm.core import Query
from genlm.mlx import loading
from genlm.mlx.probe import CacheSupport
from tests.sweep import FAR, LEFT_OPEN, Row, Tried, report, swept

from .conftest import save_model

FAMILIES = sorted(
    kind.model_type
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING
    if find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind.model_type, kind.model_type)}")
)

#: How many families could be tried when this was written, with transformers 5.23 and mlx-lm 0.32.2.
TRIED = 40

#: A rotary embedding that mlx-lm's MiniCPM 3 requires.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 5 * FAR,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0] * 16,
}


@contextmanager
def opened(folder: Path) -> Iterator[tuple[int | None, Row]]:
    """The longest context of a model in mlx-lm, and its rows."""
    engine = loading.load(str(folder), {})

    def row_of(context: tuple[int, ...]) -> Any:
        return engine.logprobs([Query(context, cold=True)])[0]

    yield engine.max_context, row_of


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[list[Tried]]:
    """What was found; printed at the end."""
    found: list[Tried] = []
    yield found
    report(found, pytestconfig)


@pytest.fixture(autouse=True)
def no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only cold rows are looked at."""
    monkeypatch.setattr(loading, "probe", lambda runner: CacheSupport.NONE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str, table: list[Tried], tmp_path: Path) -> None:
    left_open = {**LEFT_OPEN, "minicpm3": {"rope_parameters": LONGROPE}}
    found = swept(family, tmp_path, opened, save_model, left_open)
    table.extend(found)
    wrong = [one for one in found if one.outcome in ("wrong", "failed")]
    assert not wrong, wrong


def test_most_families_were_tried(table: list[Tried]) -> None:
    families = {one.family for one in table}
    if len(families) < len(FAMILIES):
        pytest.skip("not every family was asked for")
    assert len({one.family for one in table if one.outcome == "right"}) >= TRIED
