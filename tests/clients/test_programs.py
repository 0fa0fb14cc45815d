"""Programs of genlm-control, genlm-bytes and llamppl answer over genlm-core as over genlm-backend.

Run by ``nox -s clients``, which installs the clients, and makes a second environment with
genlm-backend 0.3.1.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import clients
from genlm.core import MockAsyncLM

pytest.importorskip("genlm.control", reason="genlm-control is not installed: run nox -s clients")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """The results of every program over this library, by name."""
    with clients.load(os.environ["GENLM_TEST_MODEL"]) as lm:
        return {name: clients.run(name, lm, seed=0, quick=True) for name in clients.SMALL}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """The results of every program over genlm-backend, by name."""
    if (python := os.environ.get("GENLM_PEER_PYTHON")) is None:
        pytest.skip("GENLM_PEER_PYTHON does not name a Python with genlm-backend 0.3.1")
    done = subprocess.run(
        [python, "-m", "benchmarks.clients", os.environ["GENLM_TEST_MODEL"], "--quick"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["program"]: one for one in found}


@pytest.mark.parametrize("program", clients.SMALL)
def test_answers_equal_those_over_genlm_backend(
    program: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """The same seeds draw the same texts, and weigh them alike."""
    ours, theirs = ours[program], theirs[program]
    assert ours["texts"] == theirs["texts"]
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-3)
    assert ours["log_z"] == pytest.approx(theirs["log_z"], abs=1e-3)


def test_the_former_name_serves_hfppl() -> None:
    """hfppl 0.1.2 imports the package ``genlm_backend``."""
    hfppl = pytest.importorskip("hfppl", reason="hfppl is not installed: run nox -s clients")
    from genlm.backend.llm import MockAsyncLM

    model = hfppl.CachedCausalLM(MockAsyncLM())
    assert model.backend == "mock"
    assert len(hfppl.LMContext(model, "Hello").next_token_logprobs) == len(model.str_vocab)


class Narrower(MockAsyncLM):
    """As genlm-control's tests have it, over tokenizers of the hub: with fewer values in a row than
    the tokenizer has tokens."""

    def _get_logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        width = len(self.byte_vocab) - 1
        return torch.full((width,), -math.log(width))


def test_genlm_control_takes_a_mock_whose_rows_lack_the_last_tokens() -> None:
    from genlm.control import PromptedLLM

    with Narrower(AutoTokenizer.from_pretrained(os.environ["GENLM_TEST_MODEL"])) as lm:
        llm = PromptedLLM(lm)
        llm.set_prompt_from_str("Hello")
        weights = np.asarray(asyncio.run(llm.logw_next([])).weights)
    assert np.isfinite(weights).any()
    assert np.exp(weights).sum() == pytest.approx(1, abs=1e-3)
