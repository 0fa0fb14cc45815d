"""The traps in model folders go off where somebody does run them: else their tests show nothing."""

from __future__ import annotations

import json
import pickle
import runpy
from pathlib import Path

import pytest

from genlm.conformance.canaries import ESCAPE, TRAPS, canaries


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").touch()
    return folder


def test_every_trap_goes_off_where_it_is_run(model, tmp_path):
    made = canaries(model, tmp_path / "canaries")
    assert [canary.name for canary in made] == list(TRAPS)
    for canary in made:
        assert not canary.sprung
        weights = canary.folder / "pytorch_model.bin"
        if weights.exists():
            pickle.loads(weights.read_bytes()).close()
        else:
            runpy.run_path(str(canary.folder / "canary.py"))
        assert canary.sprung


def test_the_chat_template_goes_off_where_templates_are_not_confined(tmp_path):
    jinja2 = pytest.importorskip("jinja2")
    mark = tmp_path / "mark"
    jinja2.Template(ESCAPE.format(mark=str(mark))).render()
    assert mark.exists()
