"""Models that change their attention beyond a length: rows are right on both sides of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.hf.engine import HFEngine
from tests.engines import rows_of

from .shapes import LATENT, SHAPE
from .test_sequence import scores_of_rows

Contexts = Callable[..., list[tuple[int, ...]]]
Make = Callable[..., Any]

SPARSE = {**LATENT, "index_topk": 20, "index_n_heads": 2, "index_head_dim": 16}
TUNED = {
    **SHAPE,
    "head_dim": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 256,
    "no_rope_layers": [1, 0],
    "attn_temperature_tuning": True,
    "floor_scale": 20,
    "attn_scale": 2.0,
}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 3.0, 2.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
#: The configuration, and the length beyond which attention changes.
THRESHOLDS = {
    "phi 3, long factors": (
        "Phi3",
        {**SHAPE, "original_max_position_embeddings": 20, "rope_parameters": LONGROPE},
        20,
    ),
    "llama, long factors": (
        "Llama",
        {**SHAPE, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 20}},
        20,
    ),
    "phi 3.5 moe, long factors and scales": (
        "Phimoe",
        {
            **SHAPE,
            "num_local_experts": 2,
            "rope_parameters": {
                **LONGROPE,
                "original_max_position_embeddings": 20,
                "short_mscale": 1.2,
                "long_mscale": 1.6,
            },
        },
        20,
    ),
    "llama, frequencies of its own for every length": (
        "Llama",
        {
            **SHAPE,
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
        },
        20,
    ),
    "doge, best positions": (
        "Doge",
        {**SHAPE, "keep_window_size": 20},
        20,
    ),
    "llama4, temperature": ("Llama4Text", TUNED, 20),
    "deepseek 3.2, best positions": ("DeepseekV32", SPARSE, 20),
    "glm-moe-dsa, best positions": ("GlmMoeDsa", SPARSE, 20),
    "mistral, window": ("Mistral", {**SHAPE, "sliding_window": 20}, 20),
    "qwen2, a window that is switched off": (
        "Qwen2",
        {**SHAPE, "sliding_window": 20, "use_sliding_window": False},
        20,
    ),
    "ministral 3, temperature": (
        "Ministral3",
        {
            **SHAPE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 20,
                "llama_4_scaling_beta": 0.5,
            },
        },
        20,
    ),
}


@pytest.mark.parametrize("family", THRESHOLDS)
def test_rows_on_both_sides_of_a_threshold(family: str, unproven: Make, contexts: Contexts) -> None:
    name, arguments, length = THRESHOLDS[family]
    model = unproven(getattr(transformers, f"{name}Config")(**arguments))
    (whole,) = contexts(1, 6 * length)
    other = contexts(1, 6 * length, seed=1)[0]
    for around in (length, 2 * length, 4 * length):
        for stop in range(around - 3, around + 4):
            model.check(whole[:stop], (*whole[: stop - 1], 3), other[: stop // 2])
        model.check((*whole[: around // 2], 5), (*whole[: around + 2], 5, 6), other[: around + 7])
    model.check(whole)


@pytest.mark.parametrize("family", THRESHOLDS)
def test_scores_on_both_sides_of_a_threshold(
    family: str, unproven: Make, contexts: Contexts
) -> None:
    name, arguments, length = THRESHOLDS[family]
    model = unproven(getattr(transformers, f"{name}Config")(**arguments))
    whole, other = contexts(2, 3 * length)
    asked = [
        (whole[:start], whole[start:stop])
        for start, stop in (
            (1, length),
            (3, 3 * length),
            (length - 1, length + 2),
            (length, length + 4),
            (length + 1, length + 7),
            (2 * length - 9, 2 * length + 9),
        )
    ] + [(other[:7], other[7 : length + 9]), (whole[: length - 3], other[:6])]
    queries = [Query(context) for context, _ in asked]
    expected = [scores_of_rows(model, *pair) for pair in asked]
    for known in ((), (whole[: length - 5],), (whole[: length + 5], whole[: 2 * length], other)):
        model.engine.genlm_clear_kv_cache()
        if known:
            model.ask(*known)
        given = model.engine.genlm_sequence_logprobs(queries, [tail for _, tail in asked])
        torch.testing.assert_close([*given], expected, atol=1e-4, rtol=0)


@pytest.fixture
def wrong_beyond_100(unproven: Make) -> Any:
    """A model whose rows are others, wherever it goes on from state beyond 100 tokens."""
    model = unproven(transformers.LlamaConfig(**SHAPE))

    def disturb(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs.get("position_ids")
        if positions is not None and int(positions.max()) >= 100:
            output.logits = output.logits.roll(1, -1)

    model.engine.model.register_forward_hook(disturb, with_kwargs=True)
    return model


def test_a_threshold_that_nothing_tells(wrong_beyond_100: Any, contexts: Contexts) -> None:
    model, (whole,) = wrong_beyond_100, contexts(1, 200)
    model.check(whole[:40])
    model.forwards.clear()
    model.check((*whole[:40], 1))
    assert model.forwards == [1]
    with capture_logs() as events:
        model.check(whole[:140], whole[:50])  # found out, and computed again
        for stop in range(150, 200, 7):
            model.check(whole[:stop], whole[: stop - 60])
    (event,) = [event for event in events if event["event"] == "kv.reuse_wrong"]
    assert (event["length"], event["limit"]) == (140, 32)
    model.check(whole[:20])
    model.forwards.clear()
    model.check((*whole[:20], 1))  # short contexts keep their state
    assert model.forwards == [1]


def test_rounding_that_grows_with_the_length_is_no_threshold(
    unproven: Make, contexts: Contexts
) -> None:
    """A cold row of a long context is as far from itself in a batch of two as from a warm one."""
    model, (whole,) = unproven(transformers.LlamaConfig(**SHAPE)), contexts(1, 80)

    def disturb(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        if width > 30:
            output.logits = output.logits * (1 + 0.01 * rows)

    model.engine.model.register_forward_hook(disturb, with_kwargs=True)
    cold = [Query(whole[:length], cold=True) for length in (20, 40)]
    (short,), (long,) = (model.engine.genlm_step([query], []) for query in cold)
    with capture_logs() as events:
        model.ask(whole[:40])
        rows = model.ask(whole[:20], whole[:40])
    assert torch.allclose(rows[0], short.result, atol=1e-4)
    assert not torch.allclose(rows[1], long.result, atol=2e-3)
    assert "kv.reuse_wrong" not in {event["event"] for event in events}


def test_scores_beyond_such_a_threshold(wrong_beyond_100: Any, contexts: Contexts) -> None:
    model, (whole,) = wrong_beyond_100, contexts(1, 120)
    (scores,) = model.engine.genlm_sequence_logprobs([Query(whole[:110])], [whole[110:]])
    wanted = scores_of_rows(model, whole[:110], whole[110:])
    torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=0)


def small(name: str, **arguments: Any) -> Any:
    kind = getattr(transformers, name)
    shape = {"vocab_size": 257, "num_labels": 3, **arguments}
    model = kind(kind.config_class(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        (
            "T5ForConditionalGeneration",
            {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
            "encoder-decoder",
        ),
        ("LlamaForSequenceClassification", {k: SHAPE[k] for k in list(SHAPE)[1:6]}, "output layer"),
        (
            "BertForMaskedLM",
            {
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 16,
            },
            "causal language model",
        ),
    ],
)
def test_other_models_are_refused_and_left_as_they_were(
    name: str, arguments: dict[str, Any], why: str
) -> None:
    model = small(name, **arguments).train()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    attention = model.config._attn_implementation
    with pytest.raises(EngineError, match=why):
        HFEngine(model, None)
    assert model.training
    assert model.config._attn_implementation == attention
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("training", [True, False])
def test_a_closed_model_is_in_the_mode_that_it_was_in(training: bool) -> None:
    model = small("LlamaForCausalLM", **SHAPE).train(training)
    model.lm_head.train(not training)  # a part of its own mode, as a frozen one has
    engine = HFEngine(model, None)
    assert not any(module.training for module in model.modules())
    engine.genlm_close()
    assert model.training is training
    assert model.lm_head.training is not training


def test_two_engines_over_one_model(unproven: Make) -> None:
    pair = unproven(transformers.LlamaConfig(**SHAPE))
    with pytest.raises(EngineError, match="close it first"):
        HFEngine(pair.engine.model, None)
    pair.check((1, 2, 3))
    pair.engine.genlm_close()
    again = HFEngine(pair.engine.model, None)
    rows = rows_of(again, [Query((1, 2, 3))])
    torch.testing.assert_close(rows, pair.expected((1, 2, 3)), atol=1e-4, rtol=0)
