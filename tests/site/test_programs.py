"""Runs the programs that pages of the site show outside tutorials."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch

from genlm.core import load_model_by_name
from tests.pages import FENCED, run_page
from tools.figures import with_plots
from tools.site import executed, kernel

pytestmark = pytest.mark.any_version

DOCS = Path(__file__).parents[2] / "docs"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def printed_by(capsys: pytest.CaptureFixture[str], real_model: str) -> Callable[[str], str]:
    """The output of a text's blocks on the real model."""
    pytest.importorskip("genlm.hf", reason="the pages use genlm-hf, which is not installed here")
    # Other tests have configured structlog; a program on its own has not.
    structlog.reset_defaults()

    def run(text: str) -> str:
        run_page(DOCS, text.replace(HUB_NAME, real_model))
        return capsys.readouterr().out

    return run


def test_outputs_in_a_tutorial_are_checked(tmp_path: Path) -> None:
    reason = "nbclient, which executes tutorials, is not installed here: run nox -s docs"
    errors = pytest.importorskip("nbclient.exceptions", reason=reason)

    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\nIt is one.\n\n<!-- check: x\n== 1 -->\n\nEnd.\n")
    with kernel() as manager:
        text = executed(page, "model", manager)
        assert "It is one." in text
        assert "End." in text
        assert "check" not in text
        assert "assert" not in text
        page.write_text(page.read_text().replace("== 1", "== 2"))
        with pytest.raises(errors.CellExecutionError, match="AssertionError"):
            executed(page, "model", manager)
        page.write_text("```python\nprint(x)\n```\n")  # x is a name of the previous page
        with pytest.raises(errors.CellExecutionError, match="NameError"):
            executed(page, "model", manager)


def test_the_page_of_results_has_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="run nox -s docs, which installs it")
    text = with_plots("Steps.\n\n<!-- plots: hf_step -->\n\nEnd.\n", tmp_path / "plots")
    images = re.findall(r"!\[.+\]\((plots/.+\.svg)\)", text)
    assert len(images) > 5
    assert all((tmp_path / image).read_text().endswith("</svg>\n") for image in images)


def test_program_of_the_first_page_prints_its_output(printed_by: Callable[[str], str]) -> None:
    assert " Paris" in printed_by((DOCS / "index.md").read_text())


def test_blocks_of_the_page_start_print_their_outputs(printed_by: Callable[[str], str]) -> None:
    page = (DOCS / "start.md").read_text()
    printed = printed_by(page)
    (output,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert output in printed
    assert "batches" in printed


def test_programs_on_top_of_a_model_give_their_results() -> None:
    page = DOCS / "how-to/on-top.md"
    written = run_page(page, page.read_text())

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

    asyncio.run(run())


def test_every_error_has_a_row_in_the_page_on_troubleshooting() -> None:
    from genlm.core import errors

    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    names = [name for name in vars(errors) if name.endswith("Error") and name != "GenlmError"]
    assert len(names) > 10
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    ("model", "printed"),
    [(f'"{HUB_NAME}", "hf"', "genlm_step: "), ('"mock", "mock"', "genlm_next_token_logprobs: ")],
)
def test_wrapper_of_the_page_on_tracing_prints_times(
    printed_by: Callable[[str], str], model: str, printed: str
) -> None:
    blocks = FENCED.finditer((DOCS / "how-to/tracing.md").read_text())
    (program,) = (block[0] for block in blocks if "class Timer" in block[0])
    assert printed in printed_by(program.replace(f'"{HUB_NAME}", "hf"', model))
