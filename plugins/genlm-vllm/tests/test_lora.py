"""LoRA adapters on a real vLLM."""

from __future__ import annotations

import pytest

from genlm.core.errors import InvalidAdapterError, InvalidOptionError
from genlm.core.types import Adapter, Query, SamplingParams
from tests.adapter_kinds import Kind, make_adapter

IDS = tuple(range(1000, 1050))


def test_forks_take_nothing_over_from_another_adapter(lora_engine, add):
    """This concerns the first block, in which no hash distinguishes adapters."""
    adapters = [None, add("a"), add("b")]
    for first in adapters:
        lora_engine.ask(Query(IDS[:10], first))
        forks = [Query((*IDS[:10], 77 + i), each) for i, each in enumerate(adapters)]
        forks.append(Query((*IDS[:10], 99), first))
        assert lora_engine.computes(*forks) == [11 + 11 + 1 + 1]
        lora_engine.genlm_clear_kv_cache()


def test_a_rank_beyond_the_limit_fails_at_once(lora_engine, write_adapter):
    wide = Adapter("wide", write_adapter("wide", 1, rank=16), 41)
    with pytest.raises(Exception, match="rank"):
        lora_engine.genlm_add_lora(wide, lora_engine.genlm_read_lora(wide))
    assert len(lora_engine.ask(Query(IDS))) == 1


def test_an_adapter_of_a_fused_layer_is_rejected_with_a_way(make_tiny, load_briefly, tmp_path):
    """GLM-4 has the gate and the rest of an MLP in one layer, for which vLLM accepts no adapter."""
    folder = make_tiny("Glm4", head_dim=32)
    kind = Kind("fused", {"r": 4, "target_modules": ["gate_up_proj"]})
    adapter = Adapter("fused", make_adapter(kind, folder, tmp_path), 1)
    engine = load_briefly(folder, enable_lora=True, max_lora_rank=8)
    said = r"vLLM cannot apply .*merge it into the model's weights, or load .*backend='hf'"
    with pytest.raises(InvalidAdapterError, match=said):
        engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    assert len(engine.ask(Query((1, 2, 3)))) == 1


def test_more_adapters_than_vllm_keeps_are_rejected(add):
    add("a")
    add("b")
    with pytest.raises(InvalidOptionError, match=r"2 LoRA adapters are .* larger max_cpu_loras"):
        add("c")


def test_draws_in_a_mixed_batch(lora_engine, add):
    """Of as many adapters as there are slots, since vLLM's mistake shows only where the last slot
    is taken."""
    queries = [Query(IDS), Query(IDS, add("a")), Query(IDS, add("b"))]
    params = [SamplingParams(max_tokens=4, temperature=0.0)] * 3
    together = lora_engine.draw(queries, params)
    assert together == [lora_engine.draw([query], params[:1])[0] for query in queries]
    assert together[0] not in together[1:]


def test_scores_are_left_to_rows(lora_engine):
    assert lora_engine.score([Query(IDS)], [IDS]) == [None]
