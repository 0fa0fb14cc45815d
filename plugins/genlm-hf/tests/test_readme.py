"""What READMEs show is run: the plugin's, and the project's on the real model, with its output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import run_page, run_readme

README = Path(__file__).parents[3] / "README.md"


def test_the_quick_start_prints_what_the_readme_says(
    real_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = README.read_text()
    program = re.search(r"<!-- run: quickstart -->\n(```python\n.*?```)", text, re.DOTALL)
    output = re.search(r"<!-- output: quickstart -->\n```\n(.*?)```", text, re.DOTALL)
    assert program
    assert output
    local, replaced = re.subn("HuggingFaceTB/SmolLM2-135M-Instruct", real_model, program[1])
    assert replaced == 1
    run_page(README, local)
    assert capsys.readouterr().out == output[1]


def test_the_blocks_of_the_plugins_readme_run(tiny: str) -> None:
    run_readme(Path(__file__).parents[1], tiny)
