"""Checkpoints of models that also see are served as language models."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from genlm.core import EngineError, Query
from genlm.core.types import Adapter
from genlm.vllm.settings import corrections
from tools.tiny import write_tokenizer

from .driven import text

SEES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TEXT = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
COHERE = {**TEXT, "model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 20}
QWEN = {**TEXT, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 60}
NESTED = {"text_config": {"rope_parameters": YARN}}


@pytest.fixture(scope="module")
def seeing_path(tmp_path_factory):
    """A small Idefics 3, without the files that images need."""
    folder = tmp_path_factory.mktemp("seeing")
    config = transformers.Idefics3Config(
        vision_config={**SEES, "image_size": 28, "patch_size": 14},
        text_config={**TEXT, "model_type": "llama", "initializer_range": 0.2},
        image_token_id=300,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def test_rows_sessions_and_adapters_equal_transformers(seeing_path, tmp_path, load_briefly):
    whole = transformers.AutoModelForImageTextToText.from_pretrained(seeing_path)
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(whole, lora).save_pretrained(tmp_path)
    peft = PeftModel.from_pretrained(
        transformers.AutoModelForImageTextToText.from_pretrained(seeing_path), tmp_path
    ).eval()
    engine = load_briefly(seeing_path, enable_lora=True, max_loras=1, max_lora_rank=8)
    adapter = Adapter("a", str(tmp_path), 1)
    engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    ids = (300, *text(1, 70))
    with torch.no_grad():
        adapted = peft(torch.tensor([ids])).logits[0].log_softmax(-1)
        with peft.disable_adapter():
            plain = peft(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert not torch.allclose(adapted, plain, atol=0.1)
    for by, wanted in ((None, plain), (adapter, adapted)):
        for length in (1, 40, 41, 71):
            (row,) = engine.ask(Query(ids[:length], by))
            torch.testing.assert_close(row, wanted[length - 1], atol=1e-3, rtol=0)
    engine.computes(ids[:50])
    assert engine.computes((*ids[:50], 7)) == [1]


def _settings(folder, kind, **config):
    getattr(transformers, f"{kind}Config")(**config).save_pretrained(folder)
    return str(folder)


def test_corrections_reach_the_language_model(tmp_path):
    """This concerns models that vLLM runs with its own code."""
    corrected = corrections(_settings(tmp_path, "Cohere2Vision", text_config=COHERE), {})
    assert corrected["hf_overrides"] == {"text_config": {"sliding_window": 19}}
    given = {"text_config": {"sliding_window": 30}, "image_token_id": 3}
    corrected = corrections(str(tmp_path), {"hf_overrides": given})
    assert corrected["hf_overrides"] == {**given, "text_config": {"sliding_window": 29}}
    assert not corrections(_settings(tmp_path, "AyaVision", text_config=COHERE), {})


@pytest.mark.parametrize(
    ("kind", "config", "overrides", "said"),
    [
        ("Qwen2_5_VL", QWEN, NESTED, "rope_type='yarn' of qwen2_5_vl_text"),
        ("AyaVision", {**COHERE, "logit_scale": 0.5}, {}, "logit_scale=0.5 of cohere2"),
    ],
)
def test_settings_that_vllm_misreads_are_rejected(kind, config, overrides, said, tmp_path):
    folder = _settings(tmp_path, kind, text_config=config)
    with pytest.raises(EngineError, match=said):
        corrections(folder, {"hf_overrides": overrides})


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_without_torchvision_the_remedy_is_named(tmp_path, load_briefly):
    folder = _settings(tmp_path, "Qwen2_5_VL", text_config=TEXT)
    write_tokenizer(folder)
    with pytest.raises(EngineError, match=r'need torchvision, .* install .*, or load it .*"hf"'):
        load_briefly(folder, load_format="dummy")
