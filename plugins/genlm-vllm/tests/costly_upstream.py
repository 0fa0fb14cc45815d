"""Where vLLM goes wrong on its own; in a process of its own, which takes half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from packaging.version import Version

from .driven import SMALL

ATOL = 5e-4
IDS = tuple(range(3000, 3050))

MIXED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

model, adapter, options, ids = json.loads(sys.argv[1])
assert current_platform.is_cpu(), "the bug is the CPU build's"
llm = LLM(model, enforce_eager=True, enable_lora=True, **options)
prompts = [{"prompt_token_ids": ids}] * 2
params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
alone = llm.generate(prompts[:1], params, use_tqdm=False)[0].outputs[0].cumulative_logprob
lora_requests = [None, LoRARequest("a", 1, adapter)]
both = llm.generate(prompts, params, lora_request=lora_requests, use_tqdm=False)
mixed = both[0].outputs[0].cumulative_logprob
print(json.dumps([alone, mixed]))
"""


def test_vllm_itself_mixes_base_and_lora_rightly_on_cpu(tiny_path, write_adapter, request):
    """Not ours, and expected to fail before 0.33: where it passes, neither a spare slot nor turns
    are needed.

    In a process of its own, because a vLLM that goes takes the process groups of all others with
    it.
    """
    import vllm

    if Version(vllm.__version__) < Version("0.33"):
        reason = (
            "vLLM on CPU gives a request without adapter the last slot's, "
            "if a request with one shares its batch"
        )
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    argument = json.dumps([tiny_path, write_adapter("a", 1), SMALL, IDS])
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", MIXED, argument], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
    alone, mixed = json.loads(done.stdout.splitlines()[-1])
    assert mixed == pytest.approx(alone, abs=ATOL)
