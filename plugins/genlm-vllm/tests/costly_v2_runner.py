"""The model runner that vLLM prefers on GPUs ("V2"), on a CPU: its kernels run in Triton's interpreter.

Slow, and in a process where no other test has imported vLLM; collected only when it is named. Triton must be told of a
backend for CPUs, which its wheels do not have and the interpreter does not use.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
import torch

from genlm.core.conformance import ConformanceSuite
from genlm.core.types import Query


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    if "vllm" in sys.modules:
        pytest.fail("vLLM was imported before; run this file in a process of its own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        import triton.backends

        patch.setitem(triton.backends.backends, "cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False)))
        yield


@pytest.fixture(scope="module")
def engine(_interpreted, load_engine):
    return load_engine()


def test_it_is_the_v2_runner(engine):

    assert "vllm.v1.worker.gpu.sample.sampler" in sys.modules


def test_rows_of_sessions_forks_and_chunks_are_the_cold_ones(engine, rows_of):
    """Contexts longer than a step's 64 tokens, extended by one token and by several, forked, and repeated."""
    dice = random.Random(3)
    known = [tuple(dice.choices(range(1000, 40000), k=length)) for length in (10, 70, 100)]
    asked = dict.fromkeys(map(Query, known))
    for _ in range(4):
        batch = list(
            dict.fromkeys(
                Query(dice.choice(known) + tuple(dice.choices(range(1000, 1004), k=dice.choice([1, 1, 5]))))
                for _ in range(5)
            )
        )
        asked |= dict(zip(batch, rows_of(engine, batch), strict=True))
        known += [query.token_ids for query in batch]
    asked = {query: row for query, row in asked.items() if row is not None}
    assert len(asked) > 8
    for query, row in asked.items():
        (cold,) = rows_of(engine, [Query(query.token_ids, cold=True)])
        torch.testing.assert_close(row, cold, atol=5e-4, rtol=0)


class TestVllmV2(ConformanceSuite):
    """The whole contract, on a small random model."""

    backend = "vllm"
    options = {  # noqa: RUF012
        "engine_opts": {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
    }
    atol = 1e-3
    effort = 0.02
    patience = 900.0  # drawing takes the interpreter about a second a token

    # Not even tried: a kernel that the interpreter gives up leaves it unable to run the next one.
    @pytest.mark.xfail(reason="Triton's interpreter does not run vLLM's top-k kernel", run=False, strict=True)
    def test_top_k_and_top_p(self, live):
        super().test_top_k_and_top_p(live)

    @pytest.mark.xfail(reason="Triton's interpreter fails in the kernel that draws hundreds", run=False, strict=True)
    def test_frequencies_agree_with_rows(self, live):
        super().test_frequencies_agree_with_rows(live)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, _interpreted, tiny_path):
        cls.model = tiny_path
