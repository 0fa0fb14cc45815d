"""How much is computed: the tokens that go through the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from genlm.core import Adapter, Context, EngineError, Query
from genlm.hf import strategies
from genlm.hf.costs import COSTS, Costs
from genlm.kit import prefixes
from genlm.kit.kv import sequence
from genlm.kit.kv.sharing import SharingCosts
from genlm.kit.segments import Trunk
from tests.engines import add_lora, rows_of

from .models import beside, build, draw, llama_config, proven, unproven
from .shapes import LFM2, MAMBA, MAMBA_BYTES, SHAPE

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("costs", [COSTS["cpu"], Costs()], ids=["on a CPU", "elsewhere"])
def test_a_step_costs_one_token_per_context(
    costs: Costs, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks are copied in two ways."""
    monkeypatch.setitem(COSTS, "cpu", costs)
    prompts = draw(6, 20)
    llama.ask(*prompts)
    llama.forwards.clear()
    for token in range(3):
        prompts = [(*prompt, token) for prompt in prompts]
        llama.check(*prompts)
    forks = [(*prompt, token) for prompt in prompts[:2] for token in range(3)]
    llama.check(*forks)
    llama.check(*[(*fork, 5) for fork in forks])
    assert llama.forwards == [6] * 5


def test_model_without_a_named_output_layer_gives_right_rows() -> None:
    model, reference = build(llama_config()), build(llama_config())
    model.get_output_embeddings = lambda: None
    pair = beside(model, reference)
    first, second = draw(2, 6)
    pair.check(first, second)
    pair.check((*second, 1), (*first, 1))  # as many slots as tokens, in another order


def test_ragged_growth_and_a_new_request_share_an_unpadded_forward(llama: Any) -> None:
    *prompts, new_request = draw(6, 20)
    llama.ask(*prompts)
    llama.forwards.clear()
    llama.check(*[prompt + tuple(range(n + 1)) for n, prompt in enumerate(prompts)], new_request)
    assert llama.forwards == [1 + 2 + 3 + 4 + 5 + 20]


def test_new_requests_that_share_a_prompt_compute_it_once(llama: Any) -> None:
    prompt = draw(1, 40)[0]
    llama.check(*[(*prompt, token) for token in range(8)])
    assert llama.forwards == [41, 7]


def test_a_shorter_context_is_found_within_a_longer_one(llama: Any) -> None:
    prompt = draw(1, 40)[0]
    llama.ask(prompt)
    llama.forwards.clear()
    llama.check(prompt[:25])
    llama.check((*prompt, 1))
    assert llama.forwards == [1, 1]


@pytest.mark.parametrize("more", [(5,), (5, 6)])
def test_growing_contexts_need_no_keys_beside_a_long_request(
    more: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte key of a context is as long as that: all keys took half of such a step."""
    engine = proven(llama_config(), max_batch_tokens=64).engine
    contexts = [Context(one) for one in draw(10, 20)]
    new_request = Context(draw(1, 60, seed=1)[0])
    keyed = []

    def key_of(version: int, tokens: Sequence[int]) -> bytes:
        keyed.append(tuple(tokens))
        return prefixes.key_of(version, tokens)

    rows_of(engine, [Query(one) for one in contexts])
    monkeypatch.setattr(sequence, "key_of", key_of)
    grown = [one.followed_by((*more[:-1], last)) for one in contexts for last in (5, 7)]
    rows_of(engine, [*map(Query, grown), Query(new_request)])
    assert set(keyed) <= {(*new_request,)[:stop] for stop in range(61)}


def test_context_that_grows_by_two_shares_the_first_token(llama: Any) -> None:
    parent = Context(draw(1, 40)[0])
    llama.engine.genlm_cache_prefix(Query(parent))
    rows_of(llama.engine, [Query(parent.followed_by((1, 2)))])
    llama.forwards.clear()
    longer = parent.followed_by((1, 3))
    rows = rows_of(llama.engine, [Query(longer)])
    torch.testing.assert_close(rows, llama.expected(longer), atol=1e-4, rtol=0)
    assert llama.forwards == [1]


def test_scores_whose_rows_come_from_a_trunk_and_from_a_slot(llama: Any) -> None:
    """Another context shares a trunk that ends within the scored text."""
    whole, first = draw(2, 640)
    llama.check(first)  # the length that is compared with a cold row
    llama.check_scores((whole[:560], whole[560:]), (whole[:620], (1, 2, 3)))
    assert any(isinstance(one, Trunk) for one in llama.engine._strategy.planner.tree.kept)


@pytest.fixture(params=[(LlamaConfig(**SHAPE), 32 * 256), (MAMBA, MAMBA_BYTES)])
def limited(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes an engine with room for so many short contexts: in slots, and in snapshots."""
    config, size = request.param
    return lambda contexts: proven(config, kv_cache_bytes=contexts * size)


def test_a_pinned_prompt_outlives_pressure(limited: Callable[..., Any]) -> None:
    model = limited(3)
    prompt, *others = draw(9, 30)
    model.ask(prompt, others[0])  # one state may hold both contexts
    model.engine.genlm_cache_prefix(Query(prompt))
    model.forwards.clear()
    model.engine.genlm_cache_prefix(Query(prompt))  # as the core does after a failure
    assert model.forwards == []
    model.check(prompt)  # the prompt is computed again, for its row
    for other in others:
        model.check(other)
    model.forwards.clear()
    model.check((*prompt, 1))
    assert model.forwards == [1]
    model.engine.genlm_clear_kv_cache()
    model.check((*prompt, 1))
    assert model.forwards == [1, 31]


def test_a_prompt_that_cannot_be_pinned_is_rejected(limited: Callable[..., Any]) -> None:
    model = limited(1)
    first, second = draw(2, 30)
    model.engine.genlm_cache_prefix(Query(first))
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        model.engine.genlm_cache_prefix(Query(second))
    model.check((*first, 1), second)


def test_prompt_beyond_the_reuse_limit_is_not_pinned() -> None:
    """As that of a model without state: however much room there is, no error helps."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = unproven(llama_config(max_position_embeddings=24, rope_parameters=rope))
    (prompt,) = draw(1, 25)
    assert model.engine.genlm_cache_prefix(Query(prompt))
    assert model.forwards == []
    model.check((*prompt, 1))


@pytest.mark.parametrize("room", [0, 2, 5])
def test_rows_are_right_under_any_budget(room: int, limited: Callable[..., Any]) -> None:
    model = limited(room)
    prompts = draw(6, 20)
    for token in range(4):
        model.check(*prompts, draw(1, 100 + token)[0])
        prompts = [(*prompts[token], token), *[(*prompt, token) for prompt in prompts[:-1]]]


@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), MAMBA, LFM2])
def test_a_cold_query_reads_no_state(config: Any) -> None:
    model, (prompt,) = proven(config), draw(1, 20)
    model.ask(prompt)
    model.forwards.clear()
    row = rows_of(model.engine, [Query((*prompt, 1), cold=True)])
    assert model.forwards == [21]
    torch.testing.assert_close(row, model.expected((*prompt, 1)), atol=1e-4, rtol=0)


# --- prompts that many contexts share -------------------------------------------------------------


def test_a_prompt_is_kept_once() -> None:
    """32 contexts behind a prompt that fits twice, but not 32 times."""
    config = llama_config(max_position_embeddings=1100)
    model = proven(config, kv_cache_bytes=(2000 + 40 * 64) * 256)
    (prompt,) = draw(1, 1000)
    live = [(*prompt, token) for token in range(32)]
    model.check(*live)
    model.forwards.clear()
    for token in range(3):
        live = [(*context, token) for context in live]
        model.check(*live)
    assert model.forwards == [32] * 3


def test_a_prompt_waits_for_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another context fills the first forward; nothing of the shared prompt is in it."""
    monkeypatch.setattr(strategies, "SHARING_COSTS", SharingCosts(waiting=2, sharing=1, trunk=2))
    model = proven(llama_config(), max_batch_tokens=50)
    other, prompt = draw(2, 100)
    model.check_scores((other, (1,)), *(((*prompt, token), (5,)) for token in range(4)))


def test_pinned_prompt_is_read_by_all_contexts(llama: Any) -> None:
    prompt, *others = draw(5, 100)
    llama.engine.genlm_cache_prefix(Query(prompt))
    llama.forwards.clear()
    llama.check(*[(*prompt, token) for token in range(5)], *others)
    assert llama.forwards == [5 + 400]


@pytest.mark.parametrize(
    "costs", [SharingCosts(), SharingCosts(sharing=16, trunk=32)], ids=["slots", "trunks"]
)
def test_state_belongs_to_an_adapter(
    costs: SharingCosts, tiny: str, lora_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds for prompts computed in chunks, and for contexts that are prefixes of
    others."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    monkeypatch.setattr(strategies, "SHARING_COSTS", costs)
    base = [AutoModelForCausalLM.from_pretrained(tiny) for _ in range(2)]
    adapted = peft.PeftModel.from_pretrained(base[1], lora_folders["a"]).eval()
    model = beside(base[0], adapted, max_batch_tokens=32)
    adapter = Adapter("a", lora_folders["a"], 1)
    add_lora(model.engine, adapter)
    (prompt,) = draw(1, 100)
    for _ in range(2):
        live = [prompt[:50], *((*prompt, token) for token in range(3)), prompt[:51]]
        given = rows_of(
            model.engine, [Query(context, which) for context in live for which in (adapter, None)]
        )
        torch.testing.assert_close(given[::2], model.expected(*live), atol=1e-4, rtol=0)
        with adapted.disable_adapter():
            torch.testing.assert_close(given[1::2], model.expected(*live), atol=1e-4, rtol=0)
        prompt = (*prompt, 7)


# --- scores ---------------------------------------------------------------------------------------


def test_score_computes_only_unknown_tokens(llama: Any) -> None:
    (context,) = draw(1, 20)
    llama.ask(context)
    llama.forwards.clear()
    llama.check_scores((context, (1, 2, 3, 4)))
    # The last token of the context, and all but the last token of the continuation.
    assert llama.forwards == [4]


@pytest.mark.parametrize("length", [40, 70])
def test_scores_behind_a_context_of_several_chunks(length: int) -> None:
    """The first forwards want no row."""
    model = proven(llama_config(), max_batch_tokens=32)
    for context in draw(2, length):
        model.check_scores((context, (1, 2, 3)))
