"""examples/ray_smc.py and islands.py: the result that one process has, also if a worker dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
ON_MOCK = ["--backend", "mock", "--particles", "24", "--max-tokens", "12"]


def printed(*command: str) -> list[str]:
    """The output of a program before the figures of the machine, without Ray's own lines."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    ended = subprocess.run(
        [sys.executable, *command, *ON_MOCK], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    own = [line for line in ended.stdout.splitlines() if "(raylet)" not in line]
    (last,) = [i for i, line in enumerate(own) if "effective sample size" in line]
    return own[: last + 1]


@pytest.fixture(scope="module")
def single() -> list[str]:
    """The output of one process."""
    return printed(str(EXAMPLES / "smc.py"))


def test_two_replicas_draw_the_same_as_one_process(single: list[str], address: str) -> None:
    assert printed(str(EXAMPLES / "ray_smc.py"), "--address", address) == single


#: Kills one of three workers after the first call has been answered and during the second.
KILLED = """
import os, signal
import islands, ray

class Mortal(islands.Island):
    def pid(self):
        return os.getpid()

islands.Island = Mortal
advance = islands.advance
killed = []

def advance_and_kill(workers, *rest):
    advance(workers, *rest)
    pids = ray.get([worker.pid.remote() for worker in workers])
    if not killed:
        killed.append(pids[1])
        os.kill(pids[1], signal.SIGKILL)
    else:
        assert pids[1] not in killed

islands.advance = advance_and_kill
islands.main()
assert killed
"""


def test_islands_with_a_killed_worker_estimate_the_same_as_one_process(
    single: list[str], address: str
) -> None:
    own = ["--islands", "3", "--cpus", "0.1", "--address", address]
    assert printed("-c", KILLED, *own) == single


def test_missing_room_for_islands_is_reported_in_time(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import islands  # type: ignore[import-not-found]

    workers = islands.settle(2, "mock", "mock", {}, "Once", "e", num_gpus=64)
    said = "take fewer --islands, give each fewer --cpus or --gpus, or more --patience"
    with pytest.raises(SystemExit, match=said):
        islands.await_start(workers, 0.5)
    assert "0 of 2 islands are ready; the cluster has {" in capsys.readouterr().err
