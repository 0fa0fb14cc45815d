"""The example programs that need this backend."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from structlog.testing import capture_logs

pytestmark = pytest.mark.any_version

FOLDER = Path(__file__).parents[3] / "examples"


def test_example_mixes_base_model_and_adapter_in_one_batch(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="the example makes an adapter with the package peft")
    monkeypatch.setattr("sys.argv", ["lora.py", "--model", tiny, "--prompt", "ab"])
    with capture_logs():
        runpy.run_path(str(FOLDER / "lora.py"), run_name="__main__")
    base, adapter, counts = capsys.readouterr().out.splitlines()
    assert base.startswith("base model")
    assert adapter.startswith("adapter")
    assert base.split(maxsplit=2)[2] != adapter.split(maxsplit=1)[1]
    assert counts == "2 rows in 1 batches"
