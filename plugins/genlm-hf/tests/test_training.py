"""Models that the user trains while they are served."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as configs

from genlm.core import EngineError
from genlm.hf.engine import HFEngine
from genlm.hf.reuse import ReuseMode

from .models import Pair, build, draw, unproven
from .shapes import DEVICE, LFM2, SHAPE, TOKENS

GEMMA2 = configs.Gemma2Config(**SHAPE, head_dim=8, attention_dropout=0.5)


def loss(model: Any) -> torch.Tensor:
    """The loss of a batch with padding. Dropout is the same each time."""
    torch.manual_seed(0)
    ids = torch.tensor(draw(2, 20), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    return found


def clear(pair: Pair) -> None:
    pair.engine.genlm_clear_kv_cache()
    pair.reference.load_state_dict(pair.engine.model.state_dict())


@pytest.mark.parametrize("config", [configs.LlamaConfig(**SHAPE), GEMMA2, LFM2])
def test_rows_follow_training_and_losses_are_unchanged(config: Any) -> None:
    pair = unproven(config)
    model = pair.engine.model.train()
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    contexts = draw(3, 30)
    pair.check(*contexts)
    for _ in range(2):
        expected = loss(pair.reference.train())
        found = loss(model)
        torch.testing.assert_close(found, expected)
        found.backward()
        steps.step()
        pair.reference.eval()
        clear(pair)
        pair.check(*contexts, (*contexts[0], 7))


@pytest.mark.parametrize("part", ["", "transformer"])
def test_dropout_is_off_in_rows_even_if_a_part_is_in_training_mode(part: str) -> None:
    pair = unproven(configs.GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=4))
    pair.engine.model.get_submodule(part).train()
    pair.check(*draw(2, 20))
    assert pair.engine.model.transformer.drop.training


def test_served_model_with_layers_of_peft_gives_their_rows() -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    pair = unproven(configs.LlamaConfig(**SHAPE))
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        target_modules=["q_proj", "lm_head"], lora_dropout=0.5, init_lora_weights=False
    )
    trained = peft.get_peft_model(pair.engine.model, lora)
    pair.engine.genlm_clear_kv_cache()
    pair.reference = copy.deepcopy(trained).eval()
    pair.check(*draw(3, 20))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.resize_token_embeddings(TOKENS + 7),
    ],
)
def test_model_whose_type_changes_is_rejected(change: Any) -> None:
    pair = unproven(configs.LlamaConfig(**SHAPE))
    change(pair.engine.model)
    with pytest.raises(EngineError, match="make a new one"):
        pair.engine.genlm_clear_kv_cache()


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_second_engine_over_the_compiled_model_is_rejected(wrapped_first: bool) -> None:
    model = build(configs.LlamaConfig(**SHAPE))
    both = [torch.compile(model, backend="eager"), model]
    first, second = both if wrapped_first else reversed(both)
    engine = HFEngine(first, None)
    with pytest.raises(EngineError, match="close it first"):
        HFEngine(second, None)
    engine.genlm_close()
    HFEngine(second, None).genlm_close()


@pytest.mark.filterwarnings("error:`past_key_values` is deprecated:FutureWarning")
def test_cache_argument_is_found_inside_a_peft_wrapper() -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    engine = HFEngine(peft.get_peft_model(build(configs.LlamaConfig(**SHAPE)), lora), None)
    assert engine.reuse is ReuseMode.SHARED
    engine.genlm_close()
