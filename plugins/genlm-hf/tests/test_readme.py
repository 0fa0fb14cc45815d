"""Runs the READMEs of the plugin and of the project, the latter on the real model, with its
output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import run_readme

pytestmark = pytest.mark.any_version

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.skipif(
    "GENLM_TEST_MODEL" not in os.environ, reason="GENLM_TEST_MODEL names no folder of SmolLM2-135M"
)
def test_the_quick_start_prints_what_the_readme_says():
    text = README.read_text()
    program = re.search(r"<!-- run: quickstart -->\n```python\n(.*?)```", text, re.DOTALL)
    output = re.search(r"<!-- output: quickstart -->\n```\n(.*?)```", text, re.DOTALL)
    assert program
    assert output
    local, replaced = re.subn(
        "HuggingFaceTB/SmolLM2-135M-Instruct", os.environ["GENLM_TEST_MODEL"], program[1]
    )
    assert replaced == 1
    run = subprocess.run(
        [sys.executable, "-c", local], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout == output[1], run.stderr


def test_the_blocks_of_the_plugins_readme_run(tiny: str) -> None:
    run_readme(Path(__file__).parents[1], tiny)
