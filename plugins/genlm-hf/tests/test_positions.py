"""A context that exceeds a model's positions is rejected, and the longest valid one is accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer

from genlm.core import InvalidQueryError
from genlm.hf import AsyncTransformer
from genlm.hf.engine import HFEngine

from .shapes import SHAPE, TOKENS

WHISPER = {
    "vocab_size": TOKENS,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "max_target_positions": 38,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
MPT = {"vocab_size": TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 38}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 38}
OPT = {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 38}
#: The configuration counts the places of the table that come before the first position.
ROBERTA = {**SHAPE, "max_position_embeddings": 40, "is_decoder": True, "pad_token_id": 1}
#: The tables of these models have 38 places.
TABLES: dict[str, dict[str, Any]] = {
    "Whisper": WHISPER,
    "Mpt": MPT,
    "GPT2": GPT2,
    "OPT": OPT,
    "Roberta": ROBERTA,
    "Data2VecText": ROBERTA,
    "Xmod": {**ROBERTA, "default_language": "en_XX"},
}


@pytest.mark.parametrize("family", TABLES)
def test_the_table_of_positions_is_the_limit(family: str, tiny: str) -> None:
    config = getattr(transformers, f"{family}Config")(**TABLES[family])
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    longest = tuple(range(100, 138))
    with torch.no_grad():
        expected = model(torch.tensor([longest]), use_cache=False).logits[0, -1].log_softmax(-1)
    with AsyncTransformer(model, AutoTokenizer.from_pretrained(tiny)) as lm:
        assert lm.max_context == 38
        row = lm.next_token_logprobs_sync(longest)
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
        assert len(lm.sequence_logprobs_sync(longest[:30], longest[:9])) == 9
        for refused in (
            lambda: lm.next_token_logprobs_sync((*longest, 1)),
            lambda: lm.sequence_logprobs_sync(longest[:30], longest[:10]),
        ):
            with pytest.raises(InvalidQueryError, match="38"):
                refused()


@pytest.mark.parametrize("kind", ["dynamic", "linear", "yarn"])
def test_a_rotary_embedding_that_stretches_takes_more(kind: str) -> None:
    """The longest context is multiplied by the configuration's factor."""
    config = transformers.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 20},
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0},
    )
    assert HFEngine(transformers.LlamaForCausalLM(config), None).max_context == 80


def test_positions_that_are_already_stretched_are_not_stretched_again() -> None:
    config = transformers.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 80},
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 20,
        },
    )
    assert HFEngine(transformers.LlamaForCausalLM(config), None).max_context == 80


def test_rotary_scaling_in_some_layers_does_not_extend_the_context() -> None:
    """In Gemma 3, the number of positions is already the stretched one."""
    config = transformers.Gemma3TextConfig(
        **{**SHAPE, "max_position_embeddings": 20, "head_dim": 8},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert HFEngine(transformers.Gemma3ForCausalLM(config), None).max_context == 20
