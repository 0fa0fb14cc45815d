"""examples/islands.py: the same result as one process has, also when a worker dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
ON_MOCK = ["--backend", "mock", "--particles", "24", "--max-tokens", "12", "--seed", "3"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )


def printed(*command: str) -> str:
    """What a program prints."""
    ended = run(*command)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def single() -> str:
    """The particles, their weights and the constant, from one process."""
    return result(printed(str(EXAMPLES / "smc.py"), *ON_MOCK))


def result(text: str) -> str:
    """What is printed before the figures of the machine."""
    return text[: text.index("\n", text.index("effective sample size"))]


def test_islands_estimate_what_one_process_does_on_the_same_seed(single: str, address: str) -> None:
    own = ["--islands", "3", "--cpus", "0.1", "--address", address]
    text = printed(str(EXAMPLES / "islands.py"), *ON_MOCK, *own)
    assert result(text) == single
    assert "requests on 3 islands" in text


def test_islands_that_have_no_room_are_said_and_not_waited_for_for_ever(address: str) -> None:
    asked = ["--address", address, "--islands", "2", "--gpus", "64", "--patience", "0.5"]
    ended = run(str(EXAMPLES / "islands.py"), *ON_MOCK, *asked)
    assert ended.returncode == 1
    assert "0 of 2 islands are ready; the cluster has {" in ended.stderr
    assert ended.stderr.strip().endswith(
        "take fewer --islands, give each fewer --cpus or --gpus, or more --patience"
    )


#: Kills one worker after the first call has been answered and while the second is made.
KILLED = """
import os, random, signal, sys
import islands, ray
from smc import Particle

class Mortal(islands.Island):
    def pid(self):
        return os.getpid()

islands.Island = Mortal
islands.connect(sys.argv[1])

def run(kill):
    workers = islands.settle(2, "mock", "mock", {"delay": 0.02}, "Once", "e", num_cpus=0.1)
    pids = ray.get([worker.pid.remote() for worker in workers])
    rng = random.Random(3)
    particles = [Particle() for _ in range(24)]
    islands.advance(workers, particles, 3, rng)
    if kill:
        os.kill(pids[1], signal.SIGKILL)
    islands.advance(workers, particles, 9, rng)
    pids = {*pids} ^ {*ray.get([worker.pid.remote() for worker in workers])}
    return particles, len(pids)

whole, none = run(kill=False)
again, two = run(kill=True)
assert (none, two) == (0, 2), (none, two)  # the old process of one worker, and its new one
assert again == whole
print("the same")
"""


def test_a_worker_that_is_killed_changes_nothing(address: str) -> None:
    assert printed("-c", KILLED, address).strip().endswith("the same")
