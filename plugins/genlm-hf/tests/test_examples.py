"""The example programs that need this backend."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples"


def test_an_adapter_made_on_the_spot_and_the_base_model_in_one_gather(tiny):
    pytest.importorskip("peft", reason="the example makes an adapter with the package peft")
    command = [sys.executable, FOLDER / "lora.py", "--model", tiny, "--prompt", "ab"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    base, adapter, counts = ran.stdout.splitlines()
    assert base.startswith("base model")
    assert adapter.startswith("adapter")
    assert base.split(maxsplit=2)[2] != adapter.split(maxsplit=1)[1]
    assert re.fullmatch(r"2 rows in 1 batches", counts)
