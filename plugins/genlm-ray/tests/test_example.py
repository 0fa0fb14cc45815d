"""examples/ray_smc.py, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_draws_what_one_replica_draws() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = []
    for program, more in (("ray_smc.py", ["--replicas", "2"]), ("smc.py", [])):
        ended = subprocess.run(
            [sys.executable, str(EXAMPLES / program), "--backend", "mock", *more],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        said.append(ended.stdout.partition("log normalising constant")[0])
    assert said[0] == said[1]
