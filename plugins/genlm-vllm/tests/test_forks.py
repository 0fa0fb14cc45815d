"""Forks: how many tokens they compute, that their rows equal cold ones, and when they are off."""

from __future__ import annotations

import random
from itertools import takewhile
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from genlm.core.types import Query, SampleRequest, SamplingParams
from genlm.vllm.forks import forking_scheduler

from .driven import text

BLOCK = 32  # tokens in a block, by the plugin's default on a CPU
UNKNOWN_LAYOUT = "the layout of the KV cache is not known"
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def agreeing(ids, others) -> int:
    pairs = zip(ids, others, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@pytest.mark.parametrize("length", [5, BLOCK, BLOCK + 1, 3 * BLOCK - 1])
def test_forks_compute_a_token_each(engine, length):
    parent = text(0, length)
    engine.ask(Query(parent))
    assert engine.computes(*((*parent, token) for token in range(5, 11))) == [6]


def test_fork_from_an_earlier_position_copies_only_the_shared_part(engine):
    parent = text(0, 60)
    engine.ask(Query(parent))
    assert engine.computes((*parent[:50], 5, 6, 7), (*parent[:20], 5)) == [3 + 1]
    assert engine.computes((*parent, 8)) == [1], "their source is what it was"


def test_repeated_live_context_computes_only_its_last_token(engine):
    engine.ask(Query(text(0, 50)))
    assert engine.computes(text(0, 50)) == [1]


def test_the_same_tokens_behind_another_beginning_are_not_taken(engine):
    tail = text(0, 20)
    engine.ask(Query(text(1, BLOCK) + tail))
    engine.ask(Query((*text(2, BLOCK), 5)))
    assert engine.computes((*text(2, BLOCK), *tail, 6)) == [21]


@pytest.mark.parametrize("live", [0, 20])
def test_request_cannot_be_forked_in_its_first_step(engine, live):
    """The second finds the first's block, which this step computes; the third shares a part of it,
    and would get a copy from before. It gets what was live before the step."""
    prompt = text(0, 40)
    if live:
        engine.ask(Query(prompt[:live]))
    counts = engine.computes(prompt, (*prompt[:33], 5), (*prompt[:25], 6))
    assert sum(counts) == (40 - live) + 2 + (26 - live)


def test_a_prompt_computed_in_part_is_a_source(engine):
    prompt = text(0, 200)
    fork = Query((*prompt[:50], 5))
    with engine.computed_tokens() as counts:
        assert engine.step(Query(prompt)) == {}
        answers = engine.step(fork)
        while len(answers) < 2:
            answers |= engine.step()
    assert sum(counts) == 201
    engine.assert_cold_rows(answers)


def test_source_may_be_dropped_in_the_step_of_its_forks(engine):
    prompt = text(0, 50)
    draw = SampleRequest(Query(prompt), GREEDY)
    assert engine.step(draw) == {}
    forks = [Query((*prompt, token)) for token in (5, 6)]
    answers = engine.step(*forks, dropped=[draw])
    assert set(answers) == set(forks)
    engine.assert_cold_rows(answers)


def test_preempted_forks_are_computed_again(engine):
    """Eight samples grow to 150 tokens each, but the cache holds only six of them. So some are
    preempted and resumed, while rows of the same parent are requested."""
    parent = text(0, 50)
    engine.ask(Query(parent))
    draws = [SampleRequest(Query((*parent, token)), GREEDY) for token in range(5, 13)]
    rows, new_requests = {}, list(draws)
    with engine.computed_tokens() as counts:
        while not rows.keys() >= set(draws):
            rows |= engine.step(*new_requests)
            new_requests = [Query((*parent, 1000 + len(counts)))] * (len(counts) < 100)
    assert sum(counts) > 8 * 100 + 100, "else none gave way"
    drawn = [rows.pop(draw) for draw in draws]
    engine.assert_cold_rows(dict(list(rows.items())[::10]))
    engine.genlm_clear_kv_cache()
    assert drawn == engine.ask(*draws[:4]) + engine.ask(*draws[4:]), "four fit in the cache"


def test_fork_uses_the_source_with_the_longest_common_prefix(engine):
    """No source is a prefix of another, which would continue it."""
    dice = random.Random(0)
    for _ in range(4):
        live = []
        for last in range(1000, 1008):
            first, many = dice.choice([(), text(0, BLOCK)]), dice.randrange(BLOCK)
            ids = (*first, *dice.choices([5, 6], k=many), last)
            shared = max((agreeing(ids, each) for each in live), default=0)
            with engine.computed_tokens() as counts:
                engine.ask(Query(ids))
            assert sum(counts) == len(ids) - shared
            live.append(ids)
        engine.genlm_clear_kv_cache()


# --- where they are off ---------------------------------------------------------------------------


def test_no_more_is_taken_over_than_vllm_allows(load_briefly, monkeypatch):
    """vLLM 0.33 may limit this, if it must compute all tokens of a prompt but the first ones."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    def limited(self, request, max_cache_hit_length=None):
        return usual(self, request)

    def hit(self, request, *given):
        return *self.kv_cache_manager.get_computed_blocks(request, 40), False

    usual = KVCacheManager.get_computed_blocks
    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", limited)
    monkeypatch.setattr(Scheduler, "_get_local_prefix_cache_hit", hit)
    with capture_logs() as logs:
        engine = load_briefly()
    assert not [each for each in logs if each["event"] == "vllm.forks_off"]
    parent = text(0, 50)
    engine.ask(Query(parent))
    assert sum(engine.computes((*parent, 5), (*parent, 6))) == 1 + 51 - BLOCK


@pytest.fixture
def suited():
    """A stand-in for a scheduler, with the attributes that forks check."""
    names = ("_has_partial_local_hit", "_apply_cow", "req_to_blocks")
    blocks = SimpleNamespace(block_size=BLOCK, **dict.fromkeys(names))
    return SimpleNamespace(
        schedule=None,
        requests={},
        running=[],
        max_num_running_reqs=1,
        waiting=SimpleNamespace(remove_requests=None, prepend_requests=None),
        connector=None,
        hash_block_size=BLOCK,
        vllm_config=SimpleNamespace(attention_config=SimpleNamespace(backend=None)),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group()]),
        kv_cache_manager=SimpleNamespace(
            enable_caching=True,
            get_computed_blocks=lambda request: None,
            take_kv_cache_block_copies=None,
            coordinator=SimpleNamespace(single_type_managers=[blocks]),
        ),
    )


def group(kind="FullAttentionSpec", **options):
    from vllm.v1 import kv_cache_interface

    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return SimpleNamespace(kv_cache_spec=getattr(kv_cache_interface, kind)(**size, **options))


def reasons_against(scheduler) -> list[str]:
    """The logged reasons against forks with this scheduler, which is unchanged if there are any."""
    config = SimpleNamespace(get_scheduler_cls=lambda: lambda vllm_config: scheduler)
    with capture_logs() as logs:
        forking_scheduler(SimpleNamespace(scheduler_config=config))
    assert (scheduler.schedule is None) == bool(logs)
    return [each["reason"] for each in logs]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("kv_cache_manager.enable_caching", False, ["prefix caching is off"]),
        ("connector", "one", ["a KV connector fills blocks too"]),
        ("vllm_config.attention_config.backend", SimpleNamespace(name="CUSTOM"), [UNKNOWN_LAYOUT]),
        ("vllm_config.attention_config.backend", SimpleNamespace(name="FLASH_ATTN"), []),
        ("hash_block_size", 16, ["blocks are spread over several workers"]),
        (
            "kv_cache_manager.coordinator.single_type_managers",
            [SimpleNamespace(block_size=BLOCK, req_to_blocks=None, _has_partial_local_hit=None)],
            ["this vLLM has no _apply_cow"],
        ),
        (
            "kv_cache_manager.get_computed_blocks",
            lambda request, wish=0: None,
            ["this vLLM has no get_computed_blocks(request)"],
        ),
    ],
)
def test_unsuitable_scheduler_disables_forks(suited, path, value, reason):
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(suited) if owner else suited, name, value)
    assert reasons_against(suited) == reason


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([{}], []),
        ([{}, {}], ["not all layers have full attention"]),
        ([{"kind": "ChunkedLocalAttentionSpec", "attention_chunk_size": 8}],
         ["not all layers have full attention"]),
        ([{"sliding_window": 8}], ["not all layers have full, causal attention"]),
        ([{"attention_chunk_size": 8}], ["not all layers have full, causal attention"]),
    ],
)  # fmt: skip
def test_unsuitable_layers_disable_forks(suited, groups, reason):
    suited.kv_cache_config.kv_cache_groups = [group(**each) for each in groups]
    assert reasons_against(suited) == reason


def test_unknown_platform_disables_forks(suited, monkeypatch):
    other = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", other)
    assert reasons_against(suited) == [UNKNOWN_LAYOUT]
