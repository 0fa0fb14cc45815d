"""These tests on a GPU; see CONTRIBUTING.md.

    PYTHONPATH=plugins/genlm-vllm/tests pytest -p on_a_gpu plugins/genlm-vllm/tests

Written for a CPU: hooks on the model need eager mode, and steps are counted in blocks of
32 tokens. A small share of the card lets several run at once. What a test gives itself stays. With
GENLM_GRAPHS=1, CUDA graphs are captured; conformance runs so too.
"""

from __future__ import annotations

import os

import torch

import genlm.vllm.loading as loading
from genlm.conformance.declaration import Declaration
from tests.on_a_gpu import close

_defaults, _heed = loading._defaults, loading._heed_float32

#: The tolerances for half precision, which vLLM's kernels for adapters need: that of rows, in nats,
#: and that of the probabilities which the suite compares.
HALF, HALF_PROBABILITY = 0.1, 1e-2


def defaults():
    eager = os.environ.get("GENLM_GRAPHS") != "1"
    return _defaults() | {
        "enforce_eager": eager,
        "block_size": 32,
        "gpu_memory_utilization": 0.05,
    }


def heed(engine_opts):
    if engine_opts.get("enable_lora") and engine_opts.get("dtype") == "float32":
        engine_opts["dtype"] = "float16"
        Declaration.atol = HALF_PROBABILITY
        torch.testing.assert_close = lambda *rows, **how: close(*rows, **how | {"atol": HALF})
    _heed(engine_opts)


if torch.cuda.is_available():
    loading._defaults, loading._heed_float32 = defaults, heed
