"""LoRA adapters on a real vLLM."""

from __future__ import annotations

import pytest

from genlm.core.errors import InvalidOptionError
from genlm.core.types import Adapter, Query, SamplingParams

ATOL = 5e-4
IDS = tuple(range(3000, 3050))


@pytest.fixture(scope="module")
def engine(load_engine):
    return load_engine(enable_lora=True, max_loras=2, max_cpu_loras=3, max_lora_rank=8)


@pytest.fixture
def add(engine):
    """Add an adapter to the engine: ``add(version, path, name="a")``; all are removed at the
    end."""
    added = []

    def add_adapter(version, path, name="a"):
        adapter = Adapter(name, path, version)
        assert engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter)) is True
        added.append(adapter)
        return adapter

    yield add_adapter
    for adapter in added:
        engine.genlm_remove_lora(adapter)
    engine.genlm_clear_kv_cache()


def test_forks_take_nothing_over_from_another_adapter(engine, add, write_adapter):
    """In the first block, where no hash tells adapters apart."""
    adapters = [None, add(5, write_adapter("a", 1)), add(6, write_adapter("b", 2), "b")]
    for first in adapters:
        engine.ask(Query(IDS[:10], first))
        forks = [Query((*IDS[:10], 77 + i), each) for i, each in enumerate(adapters)]
        forks.append(Query((*IDS[:10], 99), first))
        assert engine.computes(*forks) == [11 + 11 + 1 + 1]
        engine.genlm_clear_kv_cache()


def test_a_rank_beyond_the_limit_fails_at_once(engine, write_adapter):
    wide = Adapter("wide", write_adapter("wide", 1, rank=16), 41)
    with pytest.raises(Exception, match="rank"):
        engine.genlm_add_lora(wide, engine.genlm_read_lora(wide))
    assert len(engine.ask(Query(IDS))) == 1


def test_more_adapters_than_vllm_keeps_are_refused(add, write_adapter):
    for version in (51, 52, 53):
        add(version, write_adapter(f"a{version}", version), f"a{version}")
    with pytest.raises(InvalidOptionError, match="max_cpu_loras"):
        add(54, write_adapter("a54", 54), "a54")


def test_more_adapters_in_a_batch_than_slots(engine, add, write_adapter):
    adapters = [add(60 + i, write_adapter(f"s{i}", i), f"s{i}") for i in range(3)]
    engine.computes(*(Query(IDS, adapter) for adapter in adapters))


def test_newcomers_of_the_other_kind_wait_their_turn_and_are_answered(engine, add, write_adapter):
    """Where the two kinds do not share a batch, a stream of one must not starve the other."""
    adapter = add(71, write_adapter("a", 1))
    long = Query(tuple(range(4000, 4200)))
    answered = list(engine.step(long))
    answered += list(engine.step(Query(IDS, adapter)))
    for n in range(6):
        answered += list(engine.step(Query((n + 1, *IDS))))
    while len(answered) < 8:
        answered += list(engine.step())
    assert len(set(answered)) == 8
    assert answered.index(Query(IDS, adapter)) < answered.index(Query((6, *IDS)))


def test_draws_in_a_mixed_batch(engine, add, write_adapter):
    """Of as many adapters as there are slots, since vLLM's mistake shows only where the last slot
    is taken."""
    queries = [
        Query(IDS),
        Query(IDS, add(81, write_adapter("a", 1))),
        Query(IDS, add(82, write_adapter("b", 2), "b")),
    ]
    params = [SamplingParams(max_tokens=4, temperature=0.0)] * 3
    together = engine.draw(queries, params)
    assert together == [engine.draw([query], params[:1])[0] for query in queries]
    assert together[0] not in together[1:]


def test_scores_are_left_to_rows(engine):
    assert engine.score([Query(IDS)], [IDS]) == [None]
