"""What the pages of the site show outside tutorials is run."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.core import load_model_by_name
from tools.figures import filled
from tools.site import executed

DOCS = Path(__file__).parents[2] / "docs"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def run_as_one_program(page: Path) -> str:
    pytest.importorskip("genlm.hf", reason="the pages use genlm-hf, which is not installed here")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    program = "\n".join(blocks).replace(HUB_NAME, os.environ["GENLM_TEST_MODEL"])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_tutorial_says_of_its_outputs_is_checked(tmp_path: Path) -> None:
    reason = "nbclient, which executes tutorials, is not installed here: run nox -s docs"
    errors = pytest.importorskip("nbclient.exceptions", reason=reason)

    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\nIt is one.\n\n<!-- check: x\n== 1 -->\n\nEnd.\n")
    text = executed(page, "model")
    assert "It is one." in text
    assert "End." in text
    assert "check" not in text
    assert "assert" not in text
    page.write_text(page.read_text().replace("== 1", "== 2"))
    with pytest.raises(errors.CellExecutionError, match="AssertionError"):
        executed(page, "model")


def test_the_page_of_results_has_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="run nox -s docs, which installs it")
    text = filled("Steps.\n\n<!-- plots: hf_step -->\n\nEnd.\n", tmp_path / "plots")
    images = re.findall(r"!\[.+\]\((plots/.+\.svg)\)", text)
    assert len(images) > 5
    assert all((tmp_path / image).read_text().endswith("</svg>\n") for image in images)


def test_the_first_page() -> None:
    assert " Paris" in run_as_one_program(DOCS / "index.md")


def test_the_page_start() -> None:
    printed = run_as_one_program(DOCS / "start.md")
    (output,) = re.findall(r"```text\n(.*?)```", (DOCS / "start.md").read_text(), re.DOTALL)
    assert output in printed
    assert "batches" in printed


def test_the_programs_on_top_of_a_model() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "how-to/on-top.md").read_text(), re.DOTALL)
    written: dict[str, Any] = {}
    exec("\n".join(blocks), written)

    async def run() -> None:
        with load_model_by_name("mock", backend="mock") as lm:
            ids = lm.encode("Once")
            whole = [token_id async for token_id in lm.stream(ids, 8, seed=1)]
            text = b"".join(lm.byte_vocab[token_id].byte_string for token_id in whole)
            assert await written["until"](lm, ids, text[3:5], 8, seed=1) == text[:3]
            beam = await written["beam_search"](lm, ids, 4, 3)
            greedy = await written["beam_search"](lm, ids, 1, 3)
            likelihood = [sum(await lm.sequence_logprobs(ids, one)) for one in (beam, greedy)]
            assert likelihood[0] >= likelihood[1]
            plain = await lm.next_token_logprobs(ids)
            assert await written["best"](lm, "Two and two are", ["four", "a dog"]) == "four"
            logprobs = await lm.sequence_logprobs([256], ids)
            assert await written["perplexity"](lm, "Once") == pytest.approx(
                math.exp(-logprobs.mean())
            )
        penalty = written["RepetitionPenalty"](2.0)
        with load_model_by_name("mock", backend="mock", wrappers=[penalty]) as punished:
            row = await punished.next_token_logprobs(ids)
        gain = row - plain
        assert torch.allclose(gain[ids] + 2.0, gain[0].expand(len(ids)), atol=1e-5)

    with ThreadPoolExecutor(1) as pool:  # in this thread the browser's loop may be running
        pool.submit(asyncio.run, run()).result()


def test_every_error_has_a_row_in_the_page_on_troubleshooting() -> None:
    from genlm.core import errors

    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    names = [name for name in vars(errors) if name.endswith("Error") and name != "GenlmError"]
    assert len(names) > 10
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    ("model", "printed"),
    [(f'"{HUB_NAME}", "hf"', "1 answers in "), ('"mock", "mock"', "1 rows in ")],
)
def test_the_wrapper_of_the_page_on_tracing(tmp_path: Path, model: str, printed: str) -> None:
    page = (DOCS / "how-to" / "tracing.md").read_text()
    (program,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "class Timer" in block
    )
    program = program.replace(f'"{HUB_NAME}", "hf"', model)
    (tmp_path / "page.md").write_text(f"```python\n{program}\n```")
    assert printed in run_as_one_program(tmp_path / "page.md")
