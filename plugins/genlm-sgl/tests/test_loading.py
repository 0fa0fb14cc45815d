from __future__ import annotations

import importlib.metadata
import random

import numpy as np
import pytest
import torch

from genlm.core import BackendUnavailableError, InvalidOptionError, ModelClosedError, load_model_by_name
from genlm.sgl import AsyncSGLTransformer
from genlm.sgl.plugin import genlm_backend_info

SMALL = {"max_total_tokens": 1024}


@pytest.mark.parametrize(
    ("name", "value"), [("tp_size", 2), ("speculative_algorithm", "EAGLE"), ("skip_tokenizer_init", True)]
)
def test_what_cannot_run_in_process_is_refused(tiny, name, value):
    with pytest.raises(InvalidOptionError, match=f"{name}={value!r}"):
        AsyncSGLTransformer.from_name(tiny, {name: value})


def test_a_misspelt_server_argument(tiny):
    with pytest.raises(InvalidOptionError, match="'mem_fraction_statik'; did you mean 'mem_fraction_static'"):
        AsyncSGLTransformer.from_name(tiny, {"mem_fraction_statik": 0.5})


def test_an_unknown_option(tiny):
    with pytest.raises(InvalidOptionError, match="no option engine_options; it has engine_opts"):
        load_model_by_name(tiny, backend="sgl", llm_opts={"engine_options": SMALL})


@pytest.mark.parametrize("version", ["0.5.8", "0.5.24"])
def test_another_sglang_is_refused_with_the_reason(tiny, version, monkeypatch):
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "sglang" else installed(name))
    assert not genlm_backend_info().available
    for load in (AsyncSGLTransformer.from_name, lambda model: load_model_by_name(model, backend="sgl")):
        with pytest.raises(BackendUnavailableError, match=rf"sglang {version} is installed, .*0\.5\.17"):
            load(tiny)


def test_the_installed_sglang_is_supported():
    assert genlm_backend_info().available


def test_one_model_at_a_time(tiny):
    with AsyncSGLTransformer.from_name(tiny, SMALL) as lm:
        with pytest.raises(BackendUnavailableError, match="close the other model first"):
            AsyncSGLTransformer.from_name(tiny, SMALL)
        row = lm.next_token_logprobs_sync([1, 2, 3])
    with pytest.raises(ModelClosedError):
        lm.next_token_logprobs_sync([1, 2, 3])
    with AsyncSGLTransformer.from_name(tiny, SMALL) as again:
        torch.testing.assert_close(again.next_token_logprobs_sync([1, 2, 3]), row)


def test_a_load_that_fails_leaves_room_for_the_next(tiny):
    with pytest.raises(Exception, match="no_such_backend"):
        AsyncSGLTransformer.from_name(tiny, {**SMALL, "attention_backend": "no_such_backend"})
    with AsyncSGLTransformer.from_name(tiny, SMALL) as lm:
        assert lm.next_token_logprobs_sync([1]).shape == (len(lm.byte_vocab),)


def test_loading_leaves_the_random_generators_alone(tiny):
    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with AsyncSGLTransformer.from_name(tiny, SMALL):
        assert draw() == expected


def test_prompts_run_in_chunks(tiny, contexts, reference):
    asked = contexts(12, 1, 90)
    with AsyncSGLTransformer.from_name(tiny, {**SMALL, "chunked_prefill_size": 16}) as lm:
        rows = lm.batch_next_token_logprobs_sync(asked)
    expected = reference(asked)[:, : rows.shape[1]].log_softmax(dim=-1)  # the vocabulary is narrower than the model
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_real_model(real_model):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    with AsyncSGLTransformer.from_name(real_model, {"max_total_tokens": 4096}) as lm:
        asked = [lm.tokenizer.encode(text) for text in ("The capital of France is", "def f(x):\n", "Once upon a time")]
        rows = lm.batch_next_token_logprobs_sync(asked)
        assert type(lm.underlying_model).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        logits = torch.stack([reference(torch.tensor([context])).logits[0, -1] for context in asked])
    torch.testing.assert_close(rows, logits.log_softmax(dim=-1), atol=1e-3, rtol=0)
