"""How much is computed: the tokens that go through the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from genlm.core import EngineError, Query
from tests.engines import rows_of

from .conftest import build
from .shapes import LFM2, MAMBA, MAMBA_BYTES, SHAPE

Contexts = Callable[..., list[tuple[int, ...]]]
Make = Callable[..., Any]


def test_a_step_costs_one_token_per_context(llama: Any, contexts: Contexts) -> None:
    prompts = contexts(6, 20)
    llama.ask(*prompts)
    llama.forwards.clear()
    for token in range(5):
        prompts = [(*prompt, token) for prompt in prompts]
        llama.check(*prompts)
    assert llama.forwards == [6] * 5


def test_forks_continue_from_their_parent(llama: Any, contexts: Contexts) -> None:
    first, second = contexts(2, 20)
    llama.ask(first, second)
    llama.forwards.clear()
    llama.check((*first, 1), (*first, 2), (*first, 3), (*second, 1))
    assert llama.forwards == [4]


def test_a_model_that_does_not_name_its_output_layer(
    beside: Make, llama_config: Make, contexts: Contexts
) -> None:
    model, reference = build(llama_config()), build(llama_config())
    model.get_output_embeddings = lambda: None
    pair = beside(model, reference)
    first, second = contexts(2, 6)
    pair.check(first, second)
    pair.check((*second, 1), (*first, 1))  # as many rows as tokens, in another order


def test_ragged_growth_is_not_padded(llama: Any, contexts: Contexts) -> None:
    prompts = contexts(5, 20)
    llama.ask(*prompts)
    llama.forwards.clear()
    llama.check(*[prompt + tuple(range(n + 1)) for n, prompt in enumerate(prompts)])
    assert llama.forwards == [1 + 2 + 3 + 4 + 5]


def test_a_newcomer_goes_with_the_others(llama: Any, contexts: Contexts) -> None:
    *prompts, newcomer = contexts(5, 20)
    llama.ask(*prompts)
    llama.forwards.clear()
    llama.check(*[(*prompt, 1) for prompt in prompts], newcomer)
    assert llama.forwards == [4 + 20]


def test_alternating_groups_keep_their_state(llama: Any, contexts: Contexts) -> None:
    groups = [contexts(4, 20, seed) for seed in (1, 2)]
    for group in groups:
        llama.ask(*group)
    llama.forwards.clear()
    for token in range(3):
        groups = [[(*prompt, token) for prompt in group] for group in groups]
        for group in groups:
            llama.check(*group)
    assert llama.forwards == [4] * 6


def test_newcomers_that_share_a_prompt_compute_it_once(llama: Any, contexts: Contexts) -> None:
    prompt = contexts(1, 40)[0]
    llama.check(*[(*prompt, token) for token in range(8)])
    assert llama.forwards == [41, 7]


def test_a_shorter_context_is_found_within_a_longer_one(llama: Any, contexts: Contexts) -> None:
    prompt = contexts(1, 40)[0]
    llama.ask(prompt)
    llama.forwards.clear()
    llama.check(prompt[:25])
    llama.check((*prompt, 1))
    assert llama.forwards == [1, 1]


def test_long_prompts_are_computed_in_chunks(
    pair: Make, llama_config: Make, contexts: Contexts
) -> None:
    model = pair(llama_config(), max_batch_tokens=32)
    model.check(*contexts(3, 50))
    assert model.forwards == [32, 18] * 3


def test_a_failed_forward_leaves_the_state_sound(llama: Any, contexts: Contexts) -> None:
    prompts = contexts(4, 20)
    llama.ask(*prompts)

    def fail(module: torch.nn.Module, args: object) -> None:
        raise RuntimeError("a layer failed")

    hook = llama.engine.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer failed"):
        llama.ask(*[(*prompt, 1) for prompt in prompts], (1, 2, 3))
    hook.remove()
    llama.forwards.clear()
    llama.check(*[(*prompt, 2) for prompt in prompts], (1, 2, 3))
    assert llama.forwards == [4 + 3]


@pytest.fixture(params=[(LlamaConfig(**SHAPE), 32 * 256), (MAMBA, MAMBA_BYTES)])
def limited(request: pytest.FixtureRequest, pair: Make) -> Make:
    """Makes an engine with room for so many short contexts: in rows, and in snapshots."""
    config, size = request.param
    return lambda contexts: pair(config, kv_cache_bytes=contexts * size)


def test_a_pinned_prompt_outlives_pressure(limited: Make, contexts: Contexts) -> None:
    model = limited(3)
    prompt, *others = contexts(9, 30)
    model.engine.genlm_cache_prefix(Query(prompt))
    model.check(prompt)  # computed again, for its row
    for other in others:
        model.check(other)
    model.forwards.clear()
    model.check((*prompt, 1))
    assert model.forwards == [1]
    model.engine.genlm_clear_kv_cache()
    model.check((*prompt, 1))
    assert model.forwards == [1, 31]


def test_a_prompt_that_cannot_be_pinned_is_refused(limited: Make, contexts: Contexts) -> None:
    model = limited(1)
    first, second = contexts(2, 30)
    model.engine.genlm_cache_prefix(Query(first))
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        model.engine.genlm_cache_prefix(Query(second))
    model.check((*first, 1), second)


@pytest.mark.parametrize("room", [0, 1, 2, 4, 5, 10])
def test_rows_are_right_under_any_budget(room: int, limited: Make, contexts: Contexts) -> None:
    model = limited(room)
    prompts = contexts(6, 20)
    for token in range(4):
        model.check(*prompts, contexts(1, 100 + token)[0])
        prompts = [(*prompts[token], token), *[(*prompt, token) for prompt in prompts[:-1]]]


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), MAMBA, LFM2])
def test_a_cold_query_reads_no_state(config: Any, pair: Make, contexts: Contexts) -> None:
    model, (prompt,) = pair(config), contexts(1, 20)
    model.ask(prompt)
    model.forwards.clear()
    row = rows_of(model.engine, [Query((*prompt, 1), cold=True)])
    assert model.forwards == [21]
    torch.testing.assert_close(row, model.expected((*prompt, 1)), atol=1e-4, rtol=0)
