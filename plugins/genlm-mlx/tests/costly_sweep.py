"""Every causal family that transformers and mlx-lm have; collected only when it is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
import transformers
from mlx_lm.utils import MODEL_REMAPPING
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from genlm.core import Query
from genlm.mlx import loading
from tests.sweep import LEFT_OPEN, MADE, MAX_NATS, THRESHOLD, EveryFamily, Row, Sweep

from .conftest import save_model

#: A rotary embedding that mlx-lm's MiniCPM 3 requires.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 5 * THRESHOLD,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0] * 16,
}


@contextmanager
def opened(folder: Path) -> Iterator[tuple[int | None, Row]]:
    """The longest context of a model in mlx-lm, and a function for its rows. These are cold rows,
    checked against rows from kept state."""
    engine = loading.load(str(folder), {})

    def row_of(context: tuple[int, ...]) -> Any:
        half = context[: len(context) // 2]
        kept, *_ = engine.logprobs(
            [Query(context), Query((*context[:-1], 59)), Query((*half, 58, 57))]
        )
        (cold,) = engine.logprobs([Query(context, cold=True)])
        return cold if (kept - cold).abs().max() < MAX_NATS else kept

    yield engine.max_context, row_of


class TestMlx(EveryFamily):
    """Every family that mlx-lm serves."""

    backend = "mlx"
    versions = f"mlx-lm {mlx_lm.__version__}, transformers {transformers.__version__}"
    families = sorted(
        {
            kind.model_type
            for kind in MODEL_FOR_CAUSAL_LM_MAPPING
            if find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind.model_type, kind.model_type)}")
        }
    )
    sweep = Sweep(
        load=opened,
        save=save_model,
        left_open={**LEFT_OPEN, "minicpm3": {"rope_parameters": LONGROPE}},
        made={family: made for family, made in MADE.items() if family != "minicpm3"},
    )
    tried = 40

    @pytest.fixture(autouse=True)
    def no_pool(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only cold rows are looked at."""
        monkeypatch.setattr(loading, "store_of", lambda *given: None)
