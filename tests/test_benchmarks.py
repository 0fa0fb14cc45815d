"""The output of the benchmarks for a comparison."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.cases import cases_of, changes, read, record, write
from benchmarks.parts import forwards_of
from benchmarks.report import text_of

pytestmark = pytest.mark.any_version


def runs_of(workload: str, side: str, value: float, unit: str = "ms") -> list[dict[str, Any]]:
    """The output of one side of a workload in one round."""
    kept = {"workload": workload, "machine": "a machine", "side": side, "round": 0, "load": 1.0}
    kept |= {"date": "2026-02-02", "processor": "a processor", "notes": []}
    return [kept | {"cases": [{"case": "sum", "x": 8, "unit": unit, "values": [value]}]}]


def results(
    ours: float, theirs: float | None = None, unit: str = "ms", workload: str = "trie"
) -> list[dict[str, Any]]:
    runs = runs_of(workload, "ours", ours, unit)
    return [record(runs + (runs_of(workload, "theirs", theirs, unit) if theirs else []))]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (results(10), results(10.5), "1 cases compared, 0 moved"),
        (results(10), results(20), "0.50 times, WORSE: trie: sum at 8"),
        (results(10), results(5), "2.00 times, better"),
        (results(10, unit="rows/s"), results(5, unit="rows/s"), "0.50 times, WORSE"),
        # The whole machine is half as fast.
        (results(10, 40), results(20, 80), "1 cases compared, 0 moved"),
        (results(10, 40), results(20, 40), "0.50 times, WORSE: trie: sum at 8 (against theirs)"),
        # One side was not measured this time.
        (results(10, 40), results(20), "0.50 times, WORSE: trie: sum at 8 (the value itself)"),
    ],
)
def test_changes_names_the_moved_figure(before, after, said):
    line, *_ = changes(before, after)
    assert said in line


@pytest.mark.parametrize("noisy", ["ours", "theirs"])
def test_a_move_within_the_spread_of_either_side_is_left_out(noisy):
    def rounds(spread: float) -> list[dict[str, Any]]:
        runs = []
        for turn, factor in enumerate((1 - spread, 1, 1 + spread)):
            for side, value in (("ours", 10), ("theirs", 40)):
                (run,) = runs_of("trie", side, value * (factor if side == noisy else 1))
                runs.append(run | {"round": turn})
        return [record(runs)]

    after = results(13, 40)
    assert changes(rounds(0.02), after)[-1] == "1 cases compared, 1 moved by more than 10%"
    assert changes(rounds(0.5), after) == ["1 cases compared, 0 moved by more than 10%"]


def test_run_of_some_workloads_compares_only_these_and_names_new_ones():
    before = results(10) + results(10, workload="batcher")
    after = results(20, workload="batcher") + results(1, workload="new")
    assert changes(before, after) == [
        "  0.50 times, WORSE: batcher: sum at 8 (the value itself)",
        "1 cases compared, 1 moved by more than 10%",
        "new: 1 cases had nothing to compare with",
    ]


def test_the_committed_results_compare_with_themselves_and_are_the_page():
    kept = read(command.RESULTS)
    first, *unknown = changes(kept, kept)
    assert re.fullmatch(r"[1-9]\d* cases compared, 0 moved by more than 10%", first)
    # Cases that are only in the floor or only in the other tool's results.
    assert all("had nothing to compare with" in line for line in unknown)
    page = command.RESULTS.with_name("RESULTS.md").read_text().splitlines()
    assert [
        line for line in text_of(kept).splitlines() if line[:1] == "|" and line not in page
    ] == []


def test_record_has_medians_of_rounds_or_all_values_of_a_single_one():
    (run,) = runs_of("trie", "ours", 1)
    run["cases"][0]["values"] = [1.0, 2.0, 9.0]
    (several,) = cases_of(record([run, run | {"round": 1}]))
    assert several.values == {"ours": [[2.0], [2.0]]}
    (only,) = cases_of(record([run | {"peak_mib": 5}]))[:1]
    assert only.values == {"ours": [[1.0, 2.0, 9.0]]}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with given results of runs, and returns its exit status."""
    monkeypatch.setattr(command, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "benchmarks" / "results.jsonl")
    monkeypatch.setattr(command, "machine", lambda: "a machine")
    monkeypatch.setattr(command, "workloads", lambda: ["batcher", "trie"])
    monkeypatch.setattr(command, "sides_of", lambda name: ["ours"])
    monkeypatch.setattr(command, "environment_of", lambda name, side: "hf")

    def run(given: list[dict[str, Any]], *arguments: str) -> int:
        left = iter(given)
        monkeypatch.setattr(command, "run", lambda *given_to: next(left))
        said = ["benchmarks", "--model=model", "--python=hf=python", *arguments]
        monkeypatch.setattr(sys, "argv", said)
        try:
            command.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return run


def test_compare_prints_changes_and_writes_nothing(tmp_path, bench, capsys):
    """The results are compared with the stored ones of this machine."""
    here = results(10)
    elsewhere = [here[0] | {"machine": "another", "date": "2026-03-03"}]
    write([*here, *elsewhere], command.RESULTS)
    before = command.RESULTS.read_text()
    assert bench(runs_of("trie", "ours", 20), "trie", "--quick", "--compare") == 0
    assert "0.50 times, WORSE: trie: sum at 8" in capsys.readouterr().out
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [command.RESULTS]
    assert command.RESULTS.read_text() == before


def test_compare_fails_where_a_side_failed(tmp_path, bench, capsys):
    write(results(10), tmp_path / "before.jsonl")
    (run,) = runs_of("trie", "ours", 10)
    failed = run | {"cases": [], "failed": 1}
    assert bench([failed], "trie", "--rounds=1", "--compare", str(tmp_path / "before.jsonl"))
    assert "0 cases compared" in capsys.readouterr().out


def test_results_of_another_day_are_kept(bench):
    names = ("batcher", "trie", "gone")
    write([record(runs_of(name, "ours", 10)) for name in names], command.RESULTS)
    (run,) = runs_of("trie", "ours", 10)
    assert bench([run | {"date": "2026-03-03"}], "trie", "--rounds=1") == 0
    found = {kept["workload"]: kept["date"] for kept in read(command.RESULTS)}
    assert found == {"batcher": "2026-02-02", "trie": "2026-03-03"}
    assert "## batcher" in command.RESULTS.with_name("RESULTS.md").read_text()


def test_quick_figures_replace_no_full_figures(tmp_path, bench):
    write(results(10), command.RESULTS)
    before = command.RESULTS.read_text()
    assert bench(runs_of("trie", "ours", 99), "trie", "--quick") == 0
    assert command.RESULTS.read_text() == before
    (quick,) = read(tmp_path / "build" / "benchmarks" / "results.jsonl")
    assert quick["cases"][0]["values"] == {"ours": [[99.0]]}


@pytest.mark.parametrize(
    ("flags", "vectors"), [("fpu avx2", "avx2"), ("avx2 avx512f avx512_bf16", "avx512_bf16")]
)
def test_processors_with_equal_names_are_distinguished(tmp_path, monkeypatch, flags, vectors):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        f"cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\npower:\n\n"
    )
    monkeypatch.setattr(command, "CPUINFO", cpuinfo)
    assert command.processor() == f"family 25, model 1, {vectors}"
    assert command.machine().startswith("AMD EPYC, ")
    cpuinfo.unlink()
    assert command.processor()


def test_compare_reports_another_processor():
    before, after = results(10), results(10)
    after[0]["processors"] = ["family 25, model 1, avx2"]
    assert "trie: measured on another kind of processor before" in changes(before, after)[-1]
    assert len(changes(after, after)) == 1


def test_the_forward_passes_of_a_program_have_its_batches_and_its_new_tokens():
    batches = [[(1, 2, 3)], [(1, 2, 3, 4), (1, 2, 3, 5)], [(1, 2, 3, 5, 6, 7), (8,)]]
    assert forwards_of(batches) == [(1, 0, 3), (2, 3, 1), (1, 4, 2), (1, 0, 1)]
