"""The model runner that vLLM prefers on GPUs ("V2"), on a CPU: its kernels run in Triton's
interpreter.

Slow, and in a process where no other test has imported vLLM or Triton; collected only when it is
named. Triton must be given a backend for CPUs: its wheels have none. The interpreter does not use
it.

One kernel is not run: in the interpreter a kernel's loop variables are plain integers, and vLLM's
for top-k and top-p calls a method of one (Triton 3.9, vLLM 0.32). vLLM's own version of it in
PyTorch takes its place.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest

from genlm.conformance import ConformanceSuite

from .driven import random_program


# Of the session, or fixtures of the session that import transformers, and with it Triton, would
# come before.
@pytest.fixture(scope="session", autouse=True)
def _interpreted():
    if imported := sorted({"vllm", "triton"} & sys.modules.keys()):
        pytest.fail(f"{imported[0]} was imported before; run this file in a process of its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        import triton.backends

        patch.setitem(
            triton.backends.backends,
            "cpu",
            SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False)),
        )
        import vllm.v1.sample.ops.topk_topp_sampler as topk_topp

        patch.setattr(topk_topp, "HAS_TRITON", False)
        yield


def test_it_is_the_v2_runner(engine):
    assert "vllm.v1.worker.gpu.sample.sampler" in sys.modules


def test_a_random_program(engine):
    """Contexts longer than a step's 64 tokens, extended by one token and by several, and forked."""
    random_program(engine, random.Random(3)).run(5)


class TestVllmV2(ConformanceSuite):
    """The whole contract, on a small random model with padded embeddings."""

    backend = "vllm"
    options = {  # noqa: RUF012
        "engine_opts": {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
        }
    }
    effort = 0.02
    patience = 900.0  # drawing takes the interpreter about a second a token

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, padded_path):
        cls.model = padded_path
