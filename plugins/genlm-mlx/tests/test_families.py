"""Every way of keeping state gives the rows that the same context has alone, and that transformers computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, Query
from genlm.mlx.loading import load
from genlm.mlx.pool import Pool

FAMILIES = ["llama", "gpt2", "gemma3", "mamba", "lfm2"]
Folders = Callable[[str], Path]


def rows_of(engine, contexts, cold=False):
    if cold:
        return torch.cat([engine.genlm_next_token_logprobs([Query(tuple(c), cold=True)]) for c in contexts])
    return engine.genlm_next_token_logprobs([Query(tuple(c)) for c in contexts])


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_rows_are_those_of_transformers(folders: Folders, family: str) -> None:
    folder = folders(family)
    engine = load(str(folder), {})
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    context = [random.Random(1).randrange(256) for _ in range(40)]
    with torch.no_grad():
        expected = reference(torch.tensor([context])).logits[0, -1].log_softmax(-1)
    assert torch.allclose(rows_of(engine, [context], cold=True)[0], expected, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_from_the_pool_are_those_of_cold_contexts(folders: Folders, family: str) -> None:
    engine = load(str(folders(family)), {"prefill_step_size": 40})
    assert isinstance(engine.pool, Pool), "these families can all be batched"
    rng = random.Random(2)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(256) for _ in range(n)]

    prompt = tokens(20)
    contexts = [prompt + tokens(rng.randrange(1, 6)) for _ in range(4)] + [tokens(3)]
    for _ in range(14):
        rows = rows_of(engine, contexts)
        assert (rows - rows_of(engine, contexts, cold=True)).abs().max() < 1e-3
        kept = rng.sample(contexts, k=3)
        grown = [c + tokens(rng.choice([1, 1, 1, 2, 9])) for c in kept]
        forked = [kept[0] + tokens(1), kept[1][: rng.randrange(1, len(kept[1]) + 1)] + tokens(1)]
        contexts = [list(c) for c in dict.fromkeys(map(tuple, [*grown, *forked, prompt + tokens(1), tokens(5)]))]


def test_a_pinned_prefix_stays_and_is_dropped_by_clear(folders: Folders) -> None:
    engine = load(str(folders("mamba")), {"kv_cache_bytes": 0})
    engine.genlm_cache_prefix(Query((1, 2, 3)))
    rows_of(engine, [[1, 2, 3, 4], [9, 9]])
    rows_of(engine, [[8, 8, 8]])
    assert len(engine.pool) == 2  # the pinned row, and that of the last call
    engine.genlm_clear_kv_cache()
    assert len(engine.pool) == 0


def test_the_pool_stays_within_its_bytes(folders: Folders) -> None:
    engine = load(str(folders("llama")), {"kv_cache_bytes": 0})
    for i in range(5):
        rows_of(engine, [[i, i + 1]])
    assert len(engine.pool) == 1


def test_adapters_mix_in_one_batch(folders: Folders, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    folder = folders("llama")
    paths = []
    for seed, rank in ((1, 2), (2, 4)):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / str(seed))
        paths.append(tmp_path / str(seed))
    engine = load(str(folder), {})
    adapters = [Adapter(str(i), str(path), i + 1) for i, path in enumerate(paths)]
    for adapter in adapters:
        assert engine.genlm_add_lora(adapter)
    context = (5, 6, 7, 8)
    rows = engine.genlm_next_token_logprobs([Query(context), *(Query(context, a) for a in adapters)])
    assert torch.allclose(rows[0], rows_of(load(str(folder), {}), [context])[0], atol=1e-5)
    for row, path in zip(rows[1:], paths, strict=True):
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), path).eval()
        with torch.no_grad():
            expected = adapted(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        assert torch.allclose(row, expected, atol=1e-3)
        assert np.abs(row.numpy() - rows[0].numpy()).max() > 1e-2
    engine.genlm_remove_lora(adapters[0])
    again = engine.genlm_next_token_logprobs([Query((*context, 9)), Query((*context, 9), adapters[1])])
    assert (again[0] - again[1]).abs().max() > 1e-2
