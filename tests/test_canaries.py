"""The canaries in model folders do report execution if they are run, so that their tests mean
something."""

from __future__ import annotations

import json
import pickle
import runpy

import pytest

from genlm.conformance.trust.canaries import ESCAPE, TRAPS, canaries


def test_every_canary_reports_execution(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").touch()
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


def test_chat_template_canary_reports_execution_outside_the_sandbox(tmp_path):
    jinja2 = pytest.importorskip("jinja2")
    mark = tmp_path / "mark"
    jinja2.Template(ESCAPE.format(mark=str(mark))).render()
    assert mark.exists()
