"""How often a step copies between the host and the device, and that it does not wait in the middle.
This is counted without a device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlm.core.types import Query, SampleRequest, SamplingParams, ScoreRequest
from genlm.vllm.capture import ROW_KEY, RowCapture, RowStore
from genlm.vllm.internals import ids_by_position
from genlm.vllm.scoring import scores
from tools.transfers import META, Counts, Transfers, counted

from .driven import text

SIZES = (2, 9)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("draws", [0, 1])
def test_rows_beside_draws_are_picked_by_one_copy(n, draws):
    capture = type("Capture", (RowCapture,), {"store": RowStore()})(None)
    for slot in range(n + draws):
        wishes = {ROW_KEY: str(slot)} if slot < n else {}
        capture.add_request(slot, SimpleNamespace(extra_args=wishes))
    with counted() as counts:
        slots = np.arange(n + draws)
        capture.apply(
            torch.empty(n + draws, 64, device=META), SimpleNamespace(idx_mapping_np=slots)
        )
    assert counts == Counts(up=draws)


@pytest.mark.parametrize("n", SIZES)
def test_scores_of_a_step_are_copied_together(n):
    rows = torch.empty(n, 64, device=META).unbind()
    continuations = [(3, 4, 5, 6)[: 2 + at % 3] for at in range(n)]
    with counted() as counts:
        found = scores([*zip(continuations, rows, [torch.zeros(3)] * n, strict=True)])
    assert counts == Counts(up=2), "the log-probabilities, and the places of the last ones"
    assert [each.shape for each in found] == [(len(each),) for each in continuations]


def test_scores_equal_entries_of_prompt_rows_and_last_row():
    rows = -torch.arange(12.0).view(2, 6)
    known = [torch.tensor([-9.0, -1.0, -2.0]), torch.tensor([-3.0])]
    first, second = scores([((1, 2, 3), rows[0], known[0]), ((4, 5), rows[1], known[1])])
    assert first.tolist() == [-1, -2, -3]
    assert second.tolist() == [-3, -11]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("kinds", "copies"),
    [
        pytest.param("rows", 0),
        pytest.param("draws", 0),
        pytest.param("scores", 2, id="scores: values and places"),
        pytest.param("rows draws", 1, id="beside draws: which are rows"),
        pytest.param("rows draws scores", 3, id="all"),
    ],
)
def test_a_step_waits_for_nothing_and_copies_no_more_for_more_requests(
    engine, kinds, copies, n, monkeypatch
):
    """Contexts grow, and new ones join."""
    import vllm

    runs_v2 = vllm.envs.VLLM_USE_V2_MODEL_RUNNER
    if "scores" in kinds and runs_v2 and not ids_by_position(vllm.SamplingParams):
        pytest.skip("before 0.32, vLLM's runner V2 copies the log-probabilities of each score")
    # The look for NaN waits for the device. A GPU has it only in float16, a CPU always.
    monkeypatch.setattr(engine.engine, "_nan", None)
    assert most_copies(engine, kinds, n) <= copies


def test_a_dropped_draw_is_forgotten_without_a_wait(engine):
    """Whether its logits were NaN interests nobody."""
    draw = SampleRequest(Query(text(0, 12)), SamplingParams(max_tokens=9))
    assert engine.step(draw) == engine.step() == {}
    with Transfers() as transfers:
        assert engine.step(dropped=[draw]) == {}
    assert not transfers.waits


def most_copies(engine, kinds, n):
    """The most that a step copies; vLLM computes long prompts in several steps."""
    engine.ask(*requests(kinds, n))
    waits = requests(kinds, n, grown=1) + requests(kinds, 1, seed=50)
    copies, asked = [], waits
    while waits:
        with Transfers() as transfers:
            answers = engine.step(*asked)
        waits, asked = [each for each in waits if each not in answers], []
        assert not transfers.waits
        copies.append(transfers.copies.total())
    engine.genlm_clear_kv_cache()
    return max(copies)


def requests(kinds, n, seed=0, grown=0):
    params, made = SamplingParams(max_tokens=1), []
    for kind in kinds.split():
        for at in range(n):
            query = Query(text(seed + at, 12) + (7,) * grown)
            if kind == "rows":
                made.append(query)
            elif kind == "draws":
                made.append(SampleRequest(query, params))
            else:
                made.append(ScoreRequest(query, text(99, 20)))
    return made
