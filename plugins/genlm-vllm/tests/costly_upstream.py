"""Errors of vLLM itself."""

from __future__ import annotations

import pytest
from packaging.version import Version

from .driven import SMALL

ATOL = 5e-4
PROMPT = {"prompt_token_ids": list(range(3000, 3050))}


def test_vllm_alone_mixes_base_and_lora_rightly_on_cpu(
    tiny_path, write_adapter, request, monkeypatch
):
    """A test of vLLM itself that is expected to fail before 0.33. If it passes, no spare slot is
    needed."""
    import vllm
    from vllm.lora.request import LoRARequest

    if Version(vllm.__version__) < Version("0.33"):
        reason = (
            "vLLM on CPU gives a request without adapter the last slot's, "
            "if a request with one shares its batch"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = vllm.LLM(tiny_path, enforce_eager=True, enable_lora=True, **SMALL)
    params = vllm.SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)

    def logprob(*adapters):
        """Of the token that the first request draws; each has an adapter, or none."""
        prompts = [PROMPT] * len(adapters)
        outputs = llm.generate(prompts, params, lora_request=[*adapters], use_tqdm=False)
        return outputs[0].outputs[0].cumulative_logprob

    adapter = LoRARequest("a", 1, write_adapter("a", 1))
    assert logprob(None, adapter) == pytest.approx(logprob(None), abs=ATOL)
