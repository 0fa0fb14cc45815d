"""The soak program finds what it looks for."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.core import hookimpl
from tools import soak


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    given = {
        "backend": "mock",
        "model": "mock",
        "minutes": 0.05,
        "seed": 1,
        "threads": 2,
        "workers": 2,
        "longest": 60,
        "atol": 0.01,
        "tiny": False,
        "no_adapters": False,
        "alone": False,
        "option": [],
        "replay": None,
        "operations": str(tmp_path / "operations.jsonl"),
    }
    return argparse.Namespace(**{**given, **changes})


ADAPTERS = {"first": "first", "second": "second", "rebound": "first"}


class MixedUp:
    """An engine that swaps two rows of a batch."""

    @hookimpl
    def genlm_process_logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flip(0)


class Losing:
    """An engine that fails now and then."""

    calls = 0

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(
        self, queries: Any
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        rows = yield
        self.calls += 1
        if self.calls > 20:
            raise RuntimeError("lost")
        return rows


@pytest.mark.parametrize("continuous", [False, True])
def test_nothing_is_found_on_the_mock(tmp_path: Path, continuous: bool) -> None:
    given = arguments(tmp_path, option=[("continuous", continuous)])
    assert soak.soak(given, ADAPTERS)
    assert not Path(given.operations).exists()


def test_swapped_rows_are_found_and_the_operations_are_replayable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [("wrappers", [MixedUp()]), ("cache_size", 0)]
    given = arguments(tmp_path, option=options, minutes=1.0)
    assert not soak.soak(given, ADAPTERS)
    assert "off its cold row" in capsys.readouterr().out
    operations = Path(given.operations)
    assert all(len(json.loads(line)) == 6 for line in operations.read_text().splitlines())
    again = arguments(tmp_path, option=options, replay=str(operations))
    assert not soak.replay(again, ADAPTERS)
    assert "off its cold row" in capsys.readouterr().out


def test_an_engine_that_fails_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path, option=[("wrappers", [Losing()])], minutes=1.0)
    assert not soak.soak(given, ADAPTERS)
    assert "PluginError" in capsys.readouterr().out


def test_two_workers_of_one_loop_may_load_another_model_at_once(tmp_path: Path) -> None:
    one = soak.Soak(arguments(tmp_path), ADAPTERS)
    operation = soak.Operation(0, "second", [[1, 2, 3]], None, 0, False)

    async def both() -> None:
        await asyncio.gather(one.do_second(one.lm, operation), one.do_second(one.lm, operation))

    # A thread that may hang without holding up the tests.
    thread = threading.Thread(target=asyncio.run, args=(both(),), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "the event loop waits for itself"
    assert one.counts["rows"] == 2
    one.lm.close()


def test_loops_that_hang_themselves_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed = threading.Event()
    monkeypatch.setattr(soak.Soak, "thread", lambda *given: noticed.wait(60))
    monkeypatch.setattr(soak, "PATIENCE", 0.0)
    monkeypatch.setattr(soak, "end_stuck", lambda one: noticed.set())
    one = soak.Soak(arguments(tmp_path), ADAPTERS)
    soak.one_round(one, 0, time.monotonic())
    assert noticed.is_set()
    one.lm.close()
