"""Runs the measurements of `nox -s gpu` on the CPU: their rows agree with those of the raw
model."""

from __future__ import annotations

import itertools
import json
import os
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.hf import runner
from genlm.hf.cudnn import WithoutCudnn, attention_kernels
from tools.gpu import __main__ as command
from tools.gpu.steps import ATOL, step_figures
from tools.gpu.tries import trie_figures
from tools.shapes import model_of

from .models import llama_config, proven
from .shapes import DEVICE

pytestmark = pytest.mark.any_version

# --- which kernels attention may use --------------------------------------------------------------


def test_cudnn_is_restored_after_the_last_forward() -> None:
    """Two models in two threads, which end in the order in which they began."""
    allowed, without = torch.backends.cuda.cudnn_sdp_enabled, WithoutCudnn()
    assert allowed()
    without.__enter__()
    without.__enter__()
    assert not allowed()
    without.__exit__(None, None, None)
    assert not allowed()
    without.__exit__(None, None, None)
    assert allowed()


def test_cudnn_stays_off_if_the_user_turned_it_off() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with attention_kernels(torch.device("cuda")):
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_every_forward_is_labelled_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    @contextmanager
    def recorded(device: torch.device) -> Any:
        devices.append(device.type)
        with attention_kernels(device):
            yield

    monkeypatch.setattr(runner, "attention_kernels", recorded)
    model = proven(llama_config())
    probed = len(devices)
    model.ask((1, 2, 3))
    assert set(devices) == {DEVICE.type}
    assert len(devices) == probed + 1


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["tiny", "tiny-gemma2", "tiny-mamba"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_gives_the_rows_of_the_raw_model(shape: str, shared: bool) -> None:
    model = model_of(shape, "cpu", torch.float32)
    figures = step_figures(model, contexts=3, length=15, repeat=2, shared=shared)
    assert figures["rows_apart"] < ATOL


def test_step_of_constant_shape_is_measured_with_its_error() -> None:
    model = model_of("tiny", "cpu", torch.float32)
    figures = step_figures(model, 3, length=15, repeat=2, shared=False, static=True)
    assert figures["rows_apart"] < ATOL


@pytest.mark.parametrize(("way", "most"), [("rounds", 40), ("bags", 10)])
def test_the_trie_is_measured_with_its_error_and_launches(way: str, most: int) -> None:
    words = [bytes(pair) for pair in itertools.product(range(64), repeat=2)]
    figures = trie_figures(words, "cpu:0", rows=2, repeat=1, way=way)
    assert 0 < figures["relative_error"] < 2e-6
    assert 0 < figures["launches"] <= most


def test_command_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.json"
    words = (
        "--device cpu --stages recorded,steps --shapes tiny --contexts 2 --lengths 20 --repeat 1"
    )
    monkeypatch.setattr("sys.argv", ["gpu", *words.split(), "--out", str(file)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    found = json.loads(file.read_text())
    assert found["device"] == "CPU"
    recorded, steps = found["figures"][:2], found["figures"][2:]
    assert [(step["what"], step["static"]) for step in recorded] == [
        ("recorded step", True),
        ("recorded step", False),
    ]
    assert [(step["what"], step["shared"]) for step in steps] == [("step", False), ("step", True)]
    assert all(step["times_raw"] > 0 for step in found["figures"])


@pytest.mark.parametrize("ends", ["by its limit", "with an error"])
def test_failing_stage_leaves_the_next_one_unaffected(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is a process of its own, whose results so far are kept."""
    script = """
        import json, sys, threading
        print(json.dumps({"what": "first figure"}), flush=True)
        print("what an engine says", flush=True)
        sys.exit(3) if "error" in sys.argv[1] else threading.Event().wait()
    """
    (tmp_path / "stage.py").write_text(textwrap.dedent(script))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ill = command.Stage(None, 5, ("stage", ends))
    monkeypatch.setitem(command.STAGES, "ill", ill)
    file = tmp_path / "found.json"
    words = "--device cpu --stages ill,steps --shapes tiny --contexts 1 --lengths 20 --repeat 1"
    monkeypatch.setattr("sys.argv", ["gpu", *words.split(), "--out", str(file)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code
    first, second, step = json.loads(file.read_text())["figures"]
    assert first == {"what": "first figure"}
    assert second == {"what": "ill", **ENDS[ends]}
    assert step["what"] == "step"


ENDS = {
    "by its limit": {"ended": "by its limit of 5 s"},
    "with an error": {"failed": "with exit code 3"},
}
