"""The fused kernels of a trie on a device, and when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import structlog
import torch

from genlm.core.trie import device
from genlm.core.trie.device import DeviceKernel
from genlm.core.trie.reducer import TorchReducer

from .conftest import plan_of

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(*command, **environment):
    """Run Python in a process where nothing has imported Triton."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"} | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
@pytest.mark.parametrize("interpret", ["1", pytest.param("0", marks=needs_cuda)])
def test_in_the_interpreter_and_on_cuda(interpret):
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "on_triton.py")
    assert " passed" in run(*tests, TRITON_INTERPRET=interpret)


@needs_triton
def test_the_kernels_compile_for_a_gpu(tmp_path):
    said = run(HERE / "compile_triton.py", "80", TRITON_CACHE_DIR=str(tmp_path))
    assert said.strip() == "compiled 4 kernels"


# --- the proof ------------------------------------------------------------------------------------


@pytest.fixture
def plan():
    return plan_of([bytes([first, second]) for first in range(9) for second in range(30)])


@pytest.fixture
def prove(monkeypatch, plan):
    """Whether a class proves itself in place of the fused kernels, and what was logged."""

    def prove(fused):
        module = types.ModuleType("genlm.core.trie.cuda")
        module.TritonReducer = fused
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(device, "find_spec", lambda name: name == "triton" or None)
        with structlog.testing.capture_logs() as events:
            proven = device.proven_reducer(plan, "cpu", TorchReducer(plan, "cpu"))
        return proven is not None, events

    return prove


def test_kernels_that_compute_the_same_are_used(prove):
    assert prove(TorchReducer) == (True, [])


@pytest.mark.parametrize("operation", ["add", "maximum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [1.5, float("nan")])
def test_kernels_that_give_one_wrong_value_are_not_used(prove, operation, dtype, wrong):
    class Faulty(TorchReducer):
        def reduce(self, asked, weights):
            result = super().reduce(asked, weights)
            if (asked.name, weights.dtype) == (operation, dtype):
                result[4, 17] *= wrong
            return result

    used, (event,) = prove(Faulty)
    assert not used
    assert (event["log_level"], event["event"]) == ("warning", "trie.not_fused")
    assert "take longer" in event["consequence"]
    name = str(dtype).removeprefix("torch.")
    assert event["reason"].startswith(f"AssertionError: {operation} in {name}: ")
    assert "1 / 2750" in event["reason"]
    assert "(4, 17)" in event["reason"]


def test_sums_may_be_rounded_differently_and_maxima_not(prove):
    class Rounded(TorchReducer):
        inexact = "add"

        def reduce(self, asked, weights):
            result = super().reduce(asked, weights)
            if asked.name == self.inexact:
                result *= 1 + 2 * torch.finfo(weights.dtype).eps
            return result

    class Wrong(Rounded):
        inexact = "maximum"

    assert prove(Rounded) == (True, [])
    used, (event,) = prove(Wrong)
    assert not used
    assert "maximum in float32" in event["reason"]


def test_kernels_that_raise_are_not_used(prove):
    class Broken(TorchReducer):
        def reduce(self, operation, weights):
            raise RuntimeError("no compiler for this GPU")

    used, (event,) = prove(Broken)
    assert not used
    assert event["log_level"] == "warning"
    assert event["reason"] == "RuntimeError: no compiler for this GPU"


def test_without_triton_pytorch_computes_and_nothing_warns(plan, monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with structlog.testing.capture_logs() as events:
        assert device.proven_reducer(plan, "cpu", TorchReducer(plan, "cpu")) is None
    assert [(event["log_level"], event["reason"]) for event in events] == [
        ("info", "Triton is not installed")
    ]


@pytest.mark.parametrize("proven", ["fused", None])
def test_on_cuda_pytorch_computes_where_nothing_else_is_proven(monkeypatch, plan, proven):
    monkeypatch.setattr(device, "TorchReducer", lambda plan, device: "plain")
    monkeypatch.setattr(device, "proven_reducer", lambda plan, device, plain: proven)
    assert DeviceKernel(plan, "cuda")._reducer == (proven or "plain")
    assert DeviceKernel(plan, "cpu")._reducer == "plain"
