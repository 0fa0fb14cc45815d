"""Models that change their attention beyond a length: rows are right on both sides of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as configs
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.hf.engine import HFEngine
from tests.engines import rows_of

from .models import build, draw, unproven
from .shapes import LATENT, LLAMA4, SHAPE, TOKENS

#: The length from which attention changes.
LENGTH = 20
SPARSE = {**LATENT, "index_topk": LENGTH, "index_n_heads": 2, "index_head_dim": 16}
TUNED = {
    **LLAMA4,
    "attention_chunk_size": 256,
    "attn_temperature_tuning": True,
    "floor_scale": LENGTH,
    "attn_scale": 2.0,
}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 3.0, 2.0, 5.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
YARN = {**ROPE, "rope_type": "yarn", "llama_4_scaling_beta": 0.5}
THRESHOLDS = {
    "phi 3, long factors": configs.Phi3Config(
        **SHAPE, original_max_position_embeddings=LENGTH, rope_parameters=LONG
    ),
    "llama, long factors": configs.LlamaConfig(
        **SHAPE, rope_parameters={**LONG, "original_max_position_embeddings": LENGTH}
    ),
    "llama, frequencies of its own for every length": configs.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": LENGTH}, rope_parameters=DYNAMIC
    ),
    "doge, best positions": configs.DogeConfig(**SHAPE, keep_window_size=LENGTH),
    "llama4, temperature": configs.Llama4TextConfig(**TUNED),
    "deepseek 3.2, best positions": configs.DeepseekV32Config(**SPARSE),
    "qwen2, a window that is switched off": configs.Qwen2Config(
        **SHAPE, sliding_window=LENGTH, use_sliding_window=False
    ),
    "ministral 3, temperature": configs.Ministral3Config(**SHAPE, rope_parameters=YARN),
}


@pytest.mark.parametrize("family", THRESHOLDS)
def test_rows_and_scores_on_both_sides_of_a_threshold(family: str) -> None:
    model = unproven(THRESHOLDS[family])
    whole, other = draw(2, 6 * LENGTH)
    for around in (LENGTH, 2 * LENGTH, 4 * LENGTH):
        for stop in range(around - 2, around + 3):
            model.check(whole[:stop], (*whole[: stop - 1], 3), other[: stop // 2])
        model.check((*whole[: around // 2], 5), (*whole[: around + 2], 5, 6), other[: around + 7])
    model.check(whole)
    (text,) = draw(1, 3 * LENGTH, seed=1)
    stops = (1, 7, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 3 * LENGTH)
    model.check(*[text[:stop] for stop in stops])  # in one batch
    spans = (
        (1, LENGTH),
        (3, 3 * LENGTH),
        (LENGTH - 1, LENGTH + 2),
        (LENGTH, LENGTH + 4),
        (LENGTH + 1, LENGTH + 7),
    )
    asked = [(whole[:start], whole[start:stop]) for start, stop in spans]
    asked += [(other[:7], other[7 : LENGTH + 9]), (whole[: LENGTH - 3], other[:6])]
    expected = model.expected_scores(asked)
    for known in (None, whole[: LENGTH - 5], whole):
        model.engine.genlm_clear_kv_cache()
        if known is not None:
            model.ask(known)
        torch.testing.assert_close([*model.scores(asked)], expected, atol=1e-4, rtol=0)


@pytest.fixture
def wrong_beyond_100() -> Any:
    """A model whose rows change if they are computed from state beyond 100 tokens."""
    model = unproven(configs.LlamaConfig(**SHAPE))

    def disturb(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs.get("position_ids")
        if positions is not None and int(positions.max()) >= 100:
            output.logits = output.logits.roll(1, -1)

    model.engine.model.register_forward_hook(disturb, with_kwargs=True)
    return model


def test_unannounced_threshold_is_found_and_limits_reuse(wrong_beyond_100: Any) -> None:
    model, (whole,) = wrong_beyond_100, draw(1, 200)
    model.check(whole[:40])
    model.forwards.clear()
    model.check((*whole[:40], 1))
    assert model.forwards == [1]
    with capture_logs() as events:
        model.check(whole[:140], whole[:50])  # the error is found, and the rows are computed again
        for stop in range(150, 200, 7):
            model.check(whole[:stop], whole[: stop - 60])
    (event,) = [event for event in events if event["event"] == "kv.reuse_wrong"]
    assert (event["length"], event["limit"]) == (140, 32)
    model.check(whole[:20])
    model.forwards.clear()
    model.check((*whole[:20], 1))  # short contexts keep their state
    assert model.forwards == [1]


def test_rounding_that_grows_with_length_does_not_limit_reuse() -> None:
    """A cold row of a long context is as far from itself in a batch of two as from a warm one."""
    model, (whole,) = unproven(configs.LlamaConfig(**SHAPE)), draw(1, 80)

    def disturb(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        if width > 30:
            output.logits = output.logits * (1 + 0.01 * rows)

    model.engine.model.register_forward_hook(disturb, with_kwargs=True)
    cold = [Query(whole[:length], cold=True) for length in (20, 40)]
    (short,), (long,) = (model.engine.genlm_step([query], [], TOKENS) for query in cold)
    with capture_logs() as events:
        model.ask(whole[:40])
        rows = model.ask(whole[:20], whole[:40])
    assert torch.allclose(rows[0], short.result, atol=1e-4)
    assert not torch.allclose(rows[1], long.result, atol=2e-3)
    assert "kv.reuse_wrong" not in {event["event"] for event in events}


def test_scores_beyond_an_unannounced_threshold_are_right(wrong_beyond_100: Any) -> None:
    (whole,) = draw(1, 120)
    wrong_beyond_100.check_scores((whole[:110], whole[110:]))


BERT = configs.BertConfig(
    vocab_size=TOKENS,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=16,
)
T5 = configs.T5Config(vocab_size=TOKENS, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        (configs.T5ForConditionalGeneration, T5, "encoder-decoder"),
        (configs.LlamaForSequenceClassification, configs.LlamaConfig(**SHAPE), "output layer"),
        (configs.BertForMaskedLM, BERT, "causal language model"),
    ],
)
def test_unsuitable_models_are_rejected_and_unchanged(kind: Any, config: Any, why: str) -> None:
    model = kind(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    attention = model.config._attn_implementation
    with pytest.raises(EngineError, match=why):
        HFEngine(model, None)
    assert model.training
    assert model.config._attn_implementation == attention
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("training", [True, False])
def test_closing_restores_the_training_mode(training: bool) -> None:
    model = build(configs.LlamaConfig(**SHAPE)).train(training)
    model.lm_head.train(not training)  # a part may have a mode of its own, as a frozen one does
    engine = HFEngine(model, None)
    assert not any(module.training for module in model.modules())
    engine.genlm_close()
    assert model.training is training
    assert model.lm_head.training is not training


def test_second_engine_over_one_model_is_rejected() -> None:
    pair = unproven(configs.LlamaConfig(**SHAPE))
    with pytest.raises(EngineError, match="close it first"):
        HFEngine(pair.engine.model, None)
    pair.check((1, 2, 3))
    pair.engine.genlm_close()
    again = HFEngine(pair.engine.model, None)
    rows = rows_of(again, [Query((1, 2, 3))])
    torch.testing.assert_close(rows, pair.expected((1, 2, 3)), atol=1e-4, rtol=0)
