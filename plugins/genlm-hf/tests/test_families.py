"""Every family of models gives the rows of cold single forwards, whatever was asked before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from structlog.testing import capture_logs
from transformers import PretrainedConfig

from genlm.core import Query
from genlm.hf import strategies
from genlm.hf.reuse import Reuse
from genlm.kit.kv.sharing import Worth

from .shapes import LATENT, QWEN3_NEXT, SHAPE, TOKENS

Contexts = Callable[..., list[tuple[int, ...]]]
Make = Callable[..., Any]

MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
GPT2 = {
    "vocab_size": TOKENS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "eos_token_id": 256,
}
OLD = {"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 256}
JAMBA = {
    **SHAPE,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
BAMBA = {
    **SHAPE,
    "num_hidden_layers": 3,
    "attn_layer_indices": [2],
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
LLAMA4 = {
    **SHAPE,
    "head_dim": 8,
    "attention_chunk_size": 6,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],
}


def config(name: str, **arguments: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return getattr(transformers, f"{name}Config")(**arguments)

    return make


FAMILIES = {
    "llama, grouped heads": (config("Llama", **SHAPE), Reuse.SHARED),
    "gpt2, learned positions": (config("GPT2", **GPT2), Reuse.SHARED),
    "mistral, a window in every layer": (
        config("Mistral", **SHAPE, sliding_window=7),
        Reuse.SHARED,
    ),
    "gemma2, window in some layers, capped": (config("Gemma2", **SHAPE, **MIXED), Reuse.SHARED),
    "gemma3, window in some layers": (config("Gemma3Text", **SHAPE, **MIXED), Reuse.SHARED),
    "gpt-oss, sinks": (config("GptOss", **SHAPE, **MIXED, num_local_experts=4), Reuse.SHARED),
    "llama4, chunks": (config("Llama4Text", **LLAMA4), Reuse.SHARED),
    "deepseek3, latent attention": (config("DeepseekV3", **LATENT), Reuse.PACKED),
    "mixtral, experts": (config("Mixtral", **SHAPE, num_local_experts=4), Reuse.SHARED),
    "bloom, alibi": (config("Bloom", **OLD), Reuse.UNIFORM),
    "gpt-neo, a window of its own": (
        config(
            "GPTNeo",
            vocab_size=TOKENS,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
            max_position_embeddings=256,
            eos_token_id=256,
        ),
        Reuse.UNIFORM,
    ),
    "mamba, recurrent": (
        config("Mamba", vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, state_size=4),
        Reuse.SNAPSHOTS,
    ),
    "qwen3-next, linear attention between attention": (
        config("Qwen3Next", **QWEN3_NEXT),
        Reuse.SNAPSHOTS,
    ),
    "lfm2, convolutions between attention": (
        config("Lfm2", **SHAPE, layer_types=["conv", "full_attention"]),
        Reuse.SNAPSHOTS,
    ),
    "jamba, recurrent between attention": (config("Jamba", **JAMBA), Reuse.SNAPSHOTS),
    "bamba, which counts from 0 after a state": (config("Bamba", **BAMBA), Reuse.SNAPSHOTS),
    "rwkv, its state under a name of its own": (
        config(
            "Rwkv", vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
        ),
        Reuse.NONE,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_interleaving(
    family: str, unproven: Callable[..., Any], interleave: Callable[..., None]
) -> None:
    make, reuse = FAMILIES[family]
    with capture_logs() as events:
        model = unproven(make(), max_batch_tokens=48)
    assert model.engine.reuse is reuse
    (chosen,) = [event for event in events if event["event"] == "kv.reuse_chosen"]
    assert chosen["reuse"] == reuse.value
    better = list(Reuse)[: list(Reuse).index(reuse)]
    assert [*chosen["rejected"]] == [way.value for way in better]  # and each with its reason
    assert all(chosen["rejected"].values())
    with capture_logs() as events:
        interleave(model, seed=family)
    # and not because state is no longer used
    assert "kv.reuse_wrong" not in {event["event"] for event in events}


@pytest.mark.parametrize(
    "family", [family for family, (_, reuse) in FAMILIES.items() if reuse is Reuse.NONE]
)
def test_state_that_is_not_returned_is_not_kept(family: str, pair: Callable[..., Any]) -> None:
    model = pair(FAMILIES[family][0]())
    context = tuple(range(20))
    assert model.engine.genlm_cache_prefix(Query(context))  # no harm, no use
    model.forwards.clear()
    for grown in range(3):
        model.check((*context, *range(grown)))
    assert model.forwards == [20, 21, 22]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_that_was_asked_for_is_replaced_and_restored(
    attention: str, pair: Callable[..., Any]
) -> None:
    model = pair(transformers.LlamaConfig(**SHAPE, attn_implementation=attention))
    model.check((1, 2, 3), (1, 2, 3, 4, 5))
    model.check((1, 2, 3, 9), (4,))
    model.engine.genlm_close()
    assert model.engine.model.config._attn_implementation == attention


def test_rotary_embeddings_that_change_with_the_length_are_not_mixed(
    pair: Callable[..., Any],
) -> None:
    scaling = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
    }
    shape = {**SHAPE, "max_position_embeddings": 16}
    model = pair(transformers.LlamaConfig(**shape, rope_parameters=scaling))
    short, long = tuple(range(10)), tuple(range(30))
    for batch in ((short,), (long,), (short, (*long, 3)), ((*short, 4), (*long, 3, 5))):
        rows = model.ask(*batch)
        for row, context in zip(rows, batch, strict=True):
            fresh = pair(transformers.LlamaConfig(**shape, rope_parameters=scaling))
            assert (row - fresh.expected(context)[0]).abs().max() < 1e-4


SHARED = [family for family, (_, reuse) in FAMILIES.items() if reuse is Reuse.SHARED]


@pytest.fixture(params=[1, 64])
def worth_sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The length from which on prefixes are shared: trunks within a window, and beyond it."""
    monkeypatch.setattr(strategies, "WORTH", Worth(sharing=request.param))
    return int(request.param)


def resampled(source: random.Random, contexts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Parents chosen with repetition, each continued by a token of its own."""
    parents = source.choices(contexts, k=len(contexts))
    return [
        (*parent, token)
        for parent, token in zip(parents, source.sample(range(TOKENS), len(parents)), strict=True)
    ]


@pytest.mark.parametrize("family", SHARED)
def test_rows_behind_trunks(
    family: str, worth_sharing: int, pair: Make, contexts: Contexts
) -> None:
    source = random.Random(f"{family} {worth_sharing}")
    model = pair(FAMILIES[family][0](), max_batch_tokens=48)
    (prompt,) = contexts(1, worth_sharing + 2)
    live = [(*prompt, token) for token in range(4)]  # the prompt is not computed yet
    model.check(*live)
    for step in range(4):
        live = resampled(source, live)
        model.check(*live, live[0][: source.randint(1, len(live[0]))])
        if step == 1:  # ragged growth, a newcomer, and one that leaves the prompt within it
            live = [(*context, *range(at)) for at, context in enumerate(live)]
            model.check(
                *live,
                contexts(1, worth_sharing + 5, seed=1)[0],
                (*prompt[: worth_sharing // 2], 3, 4),
            )


@pytest.mark.parametrize("family", SHARED)
def test_rows_behind_a_long_trunk(family: str, pair: Make, contexts: Contexts) -> None:
    config = FAMILIES[family][0]()
    config.max_position_embeddings = 1100
    model = pair(config)
    (prompt,) = contexts(1, 1000)
    live = [(*prompt, token) for token in range(3)]
    model.check(*live)
    model.forwards.clear()
    live = resampled(random.Random(family), live)
    model.check(*live)
    assert model.forwards == [3]
    model.check(*live, (*prompt[:700], 5), prompt)
    assert model.forwards[1:] == [3 + 1 + 1]
