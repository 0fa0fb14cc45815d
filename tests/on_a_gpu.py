"""Tests on a GPU, whose rows may be compared with some on the CPU; see CONTRIBUTING.md.

GENLM_TEST_DEVICE=cuda pytest -p tests.on_a_gpu plugins/genlm-hf/tests
"""

from __future__ import annotations

from typing import Any

import torch

#: How much float32 rows may differ from those of a CPU, in nats.
ATOL = 1e-3

_close = torch.testing.assert_close


def close(*rows: Any, **how: Any) -> None:
    how["atol"], how["rtol"] = max(how.get("atol", 0.0), ATOL), how.get("rtol", 0.0)
    _close(*map(on_the_cpu, rows), **how)


def on_the_cpu(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.cpu()
    return type(given)(map(on_the_cpu, given)) if isinstance(given, list | tuple) else given


if torch.cuda.is_available():
    torch.testing.assert_close = close
