"""What the benchmarks print of a comparison."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.cases import Case, changes
from benchmarks.parts import Rows, forwards_of
from genlm.core import MockAsyncLM

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def results(ours: float, theirs: float | None = None, unit: str = "ms") -> dict[str, Any]:
    sides = {"ours": ours, "theirs": theirs}
    return {
        "runs": [
            {
                "workload": "trie",
                "side": side,
                "cases": [{"case": "sum", "x": 8, "unit": unit, "values": [value]}],
            }
            for side, value in sides.items()
            if value is not None
        ]
    }


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (results(10), results(10.5), "1 cases compared, 0 moved"),
        (results(10), results(20), "0.50 times, WORSE: trie: sum at 8"),
        (results(10), results(5), "2.00 times, better"),
        (results(10, unit="rows/s"), results(5, unit="rows/s"), "0.50 times, WORSE"),
        # The whole machine is twice as slow.
        (results(10, 40), results(20, 80), "1 cases compared, 0 moved"),
        (results(10, 40), results(20, 40), "0.50 times, WORSE: trie: sum at 8 (against theirs)"),
        # One side was not measured this time.
        (results(10, 40), results(20), "0.50 times, WORSE: trie: sum at 8 (the value itself)"),
    ],
)
def test_what_has_moved(before: dict[str, Any], after: dict[str, Any], said: str) -> None:
    line, *_ = changes(before, after)
    assert said in line


@pytest.mark.parametrize("noisy", ["ours", "theirs"])
def test_a_move_within_the_spread_of_either_side_is_left_out(noisy: str) -> None:
    def rounds(spread: float) -> dict[str, Any]:
        runs = []
        for factor in (1 - spread, 1, 1 + spread):
            ours, theirs = (
                10 * (factor if noisy == "ours" else 1),
                40 * (factor if noisy == "theirs" else 1),
            )
            runs += results(ours, theirs)["runs"]
        return {"runs": runs}

    after = results(13, 40)
    assert changes(rounds(0.02), after)[-1] == "1 cases compared, 1 moved by more than 10%"
    assert changes(rounds(0.5), after) == ["1 cases compared, 0 moved by more than 10%"]


def test_the_spread_of_a_single_value_is_not_known() -> None:
    def spread(*values: float) -> float | None:
        case = Case("trie", "sum", None, "ms", {"ours": [[value] for value in values]})
        return case.spread("ours")

    assert spread(10) is None
    assert spread(10, 14) == 2


def test_a_run_of_some_workloads_compares_these_and_says_which_are_new() -> None:
    def named(workload: str, ours: float) -> list[dict[str, Any]]:
        return [run | {"workload": workload} for run in results(ours)["runs"]]

    before = {"runs": [*named("trie", 10), *named("batcher", 10)]}
    after = {"runs": [*named("batcher", 20), *named("new", 1)]}
    assert changes(before, after) == [
        "  0.50 times, WORSE: batcher: sum at 8 (the value itself)",
        "1 cases compared, 1 moved by more than 10%",
        "new: 1 cases had nothing to compare with",
    ]


def test_the_committed_results_compare_with_themselves() -> None:
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        first, *unknown = changes(result, result)
        assert re.fullmatch(r"[1-9]\d* cases compared, 0 moved by more than 10%", first)
        # Cases that ours does not have: the floor alone, or theirs.
        assert all("had nothing to compare with" in line for line in unknown)


def test_compare_prints_what_has_moved_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, with runs that are given: the newest file of this machine that is not quick is
    compared with."""
    known = {"2026-01-01-a": 1, "2026-02-02-a": 10, "2026-03-03-a-quick": 100, "2026-03-03-b": 100}
    for name, value in known.items():
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(results(value)))
    given = iter(results(20)["runs"])
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "workloads", lambda: ["trie"])
    monkeypatch.setattr(command, "sides_of", lambda name: ["ours"])
    monkeypatch.setattr(command, "environment_of", lambda name, side: "hf")
    monkeypatch.setattr(command, "machine", lambda: "a")
    monkeypatch.setattr(command, "run", lambda *given_to: next(given))
    arguments = ["trie", "--quick", "--compare", "--model", "model", "--python", "hf=python"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    assert "0.50 times, WORSE: trie: sum at 8" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_compare_fails_where_a_side_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before.json").write_text(json.dumps(results(10)))
    failed = results(10)["runs"][0] | {"cases": [], "failed": 1}
    monkeypatch.setattr(command, "workloads", lambda: ["trie"])
    monkeypatch.setattr(command, "sides_of", lambda name: ["ours"])
    monkeypatch.setattr(command, "environment_of", lambda name, side: "hf")
    monkeypatch.setattr(command, "run", lambda *given_to: failed)
    arguments = ["trie", "--compare", str(tmp_path / "before.json"), "--model=m", "--python=hf=p"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code
    assert "0 cases compared" in capsys.readouterr().out


def test_what_was_measured_on_another_day_stays_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_of(workload: str) -> dict[str, Any]:
        (run,) = results(10)["runs"]
        return run | {"workload": workload, "title": workload, "round": 0, "load": 1.0, "notes": []}

    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "machine", lambda: "a machine")
    monkeypatch.setattr(command, "workloads", lambda: ["steps", "trie"])
    monkeypatch.setattr(command, "sides_of", lambda name: ["ours"])
    monkeypatch.setattr(command, "environment_of", lambda name, side: "hf")
    monkeypatch.setattr(command, "run", lambda name, *given: run_of(name) | {"date": "new"})
    reported: list[object] = []  # the report needs matplotlib for its plots
    monkeypatch.setattr(command, "write_report", lambda result, folder: reported.append(result))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "trie", "--model=model", "--python=hf=python"])
    (tmp_path / "results").mkdir()
    past = [run_of("steps"), run_of("trie"), run_of("gone")]
    before = {"date": "2026-01-01", "runs": past}
    (tmp_path / "results" / "2026-01-01-a-machine.json").write_text(json.dumps(before))
    command.main()
    (file,) = set((tmp_path / "results").glob("*.json")) - {
        tmp_path / "results" / "2026-01-01-a-machine.json"
    }
    found = {run["workload"]: run["date"] for run in json.loads(file.read_text())["runs"]}
    assert found == {"steps": "2026-01-01", "trie": "new"}
    assert reported == [json.loads(file.read_text())]


@pytest.mark.parametrize(
    ("flags", "vectors"), [("fpu avx2", "avx2"), ("avx2 avx512f avx512_bf16", "avx512_bf16")]
)
def test_processors_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, vectors: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        f"cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\npower:\n\n"
    )
    monkeypatch.setattr(command, "CPUINFO", cpuinfo)
    assert command.processor() == f"family 25, model 1, {vectors}"
    assert command.machine().startswith("AMD EPYC, ")
    cpuinfo.unlink()
    assert command.processor()


def test_compare_says_when_the_processor_is_another() -> None:
    before, after = results(10), results(10)
    after["runs"][0]["processor"] = "family 25, model 1, avx2"
    assert "trie: measured on another kind of processor before" in changes(before, after)[-1]
    assert len(changes(after, after)) == 1


def test_the_forward_passes_of_a_program_have_its_batches_and_its_new_tokens() -> None:
    batches = [[(1, 2, 3)], [(1, 2, 3, 4), (1, 2, 3, 5)], [(1, 2, 3, 5, 6, 7), (8,)]]
    assert forwards_of(batches) == [(1, 0, 3), (2, 3, 1), (1, 4, 2), (1, 0, 1)]


def test_rows_that_are_played_back_are_those_that_were_recorded() -> None:
    with MockAsyncLM() as lm:
        rows = Rows(lm)

        async def program() -> list[torch.Tensor]:
            first = await asyncio.gather(*(lm.next_token_logprobs([i]) for i in range(3)))
            several = await lm.batch_next_token_logprobs([[4], [5]])
            return [*first, *several, lm.next_token_logprobs_sync([6])]

        with rows.recorded():
            recorded = asyncio.run(program())
        asked = lm.stats.requests
        with rows.played_back():
            assert all(map(torch.equal, recorded, asyncio.run(program())))
            with pytest.raises(KeyError):
                lm.next_token_logprobs_sync([7])
        assert lm.stats.requests == asked
        assert torch.equal(lm.next_token_logprobs_sync([6]), recorded[-1])
