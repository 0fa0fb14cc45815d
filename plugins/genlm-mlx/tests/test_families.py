"""Models whose state is in blocks: their rows are those of the same contexts alone."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mlx_lm.models.cache import ArraysCache
from transformers import AutoModelForCausalLM

from genlm.core import Query
from genlm.mlx.blocks import Blocks
from genlm.mlx.loading import load
from tests.hub_folders import HUB, loaded

from . import costly_sweep
from .watched import Folders, tokens_of


def rows_of(engine: Any, contexts: list[list[int]]) -> torch.Tensor:
    return engine.logprobs([Query(tuple(c)) for c in contexts])


def cold_rows_of(engine: Any, contexts: list[list[int]]) -> torch.Tensor:
    return torch.cat([engine.logprobs([Query(tuple(c), cold=True)]) for c in contexts])


def test_scores_behind_the_shorter_sequence_of_a_batch(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First two rows are read, then the others."""
    monkeypatch.setattr("genlm.mlx.runner.FIRST_READ_ROWS", 2)
    engine = load(str(folders("gemma3")), {})
    engine.store = Blocks(engine._runner, None)
    whole, drawn = tokens_of(30, 0), tokens_of(20, 1)
    for tokens in ((), (5,)):
        rows_of(engine, [[*whole, *tokens], [*whole[:3], *tokens]])
    context = (*whole[:3], 5)
    (scores,) = engine.genlm_sequence_logprobs([Query(context)], [drawn], engine.vocab_size)
    rows = cold_rows_of(engine, [[*context, *drawn[:at]] for at in range(len(drawn))])
    expected = rows.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=0)


def test_the_probe_feeds_unequal_sequences_more_than_once(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent cache is wrong only if some sequences have ended while others continue."""
    prepare = ArraysCache.prepare

    def prepared(cache: ArraysCache, lengths: Any = None, **padding: Any) -> None:
        prepare(cache, [max(length, 1) for length in lengths], **padding)

    monkeypatch.setattr(ArraysCache, "prepare", prepared)
    engine = load(str(folders("falcon_h1")), {"prefill_step_size": 80})
    rng = random.Random(5)
    contexts = [rng.choices(range(256), k=rng.randrange(20, 60)) for _ in range(20)]
    assert (rows_of(engine, contexts) - cold_rows_of(engine, contexts)).abs().max() < 1e-3


def test_probe_detects_accidental_broadcasting(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 as mlx-lm has it: two rows take the place of its two key/value heads. Of coarse
    weights so little is expected that the wrong rows look right."""
    shutil.copytree(folders("gemma2"), tmp_path / "coarse")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "coarse", dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(tmp_path / "coarse")
    monkeypatch.setattr("genlm.mlx.loading.repair", lambda model: None)
    engine = load(str(tmp_path / "coarse"), {})
    rng = random.Random(3)
    contexts = [rng.choices(range(256), k=length) for length in (40, 3)]
    assert (rows_of(engine, contexts) - cold_rows_of(engine, contexts)).abs().max() < 0.05


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_pinned_prefix_is_kept_without_a_budget_and_dropped_by_clear(
    folders: Folders, family: str
) -> None:
    engine = load(str(folders(family)), {"kv_cache_bytes": 0})
    engine.genlm_cache_prefix(Query((1, 2, 3)))
    rows_of(engine, [[1, 2, 3, 4], [9, 9]])
    rows_of(engine, [[8, 8, 8]])
    assert len(engine.store) == 2  # the pinned row, and the row of the last call
    engine.genlm_clear_kv_cache()
    assert len(engine.store) == 0


#: Families that mlx-lm cannot load from their folders, each with the reason.
REFUSED = {
    "a head beside tied embeddings": "model.embed_tokens.weight and lm_head.weight of .* differ",
    "names without their beginning": "parameters not in model: embed_tokens.weight",
    "old buffers, and no last norm": r"Missing 1 parameters: model\.norm\.weight",
    "pickled": "No safetensors found",
}


@pytest.mark.parametrize("name", HUB)
def test_folders_in_the_hubs_layout_load(name: str, tmp_path: Path) -> None:
    found = loaded(name, costly_sweep.TestMlx.sweep, tmp_path)
    assert found.outcome == ("refused" if name in REFUSED else "right"), found
    assert re.search(REFUSED.get(name, ""), found.why)
