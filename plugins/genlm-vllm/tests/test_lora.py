"""LoRA adapters on a real vLLM."""

from __future__ import annotations

import pytest

from genlm.core.errors import InvalidOptionError
from genlm.core.types import Adapter, Query, SamplingParams

IDS = tuple(range(1000, 1050))


def test_forks_take_nothing_over_from_another_adapter(lora_engine, add):
    """In the first block, where no hash tells adapters apart."""
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


def test_more_adapters_than_vllm_keeps_are_refused(add):
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
