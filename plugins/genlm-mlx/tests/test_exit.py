"""A process ends cleanly, whether its model was closed or not: MLX's streams are gone before their
thread is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAM = """
import sys
from genlm.core import load_model_by_name
lm = load_model_by_name(sys.argv[1], "mlx")
lm.next_token_logprobs_sync([1, 2, 3])
if sys.argv[2] == "close":
    lm.close()
"""


def exit_code(folder: Path, end: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), end],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr[-2000:]


def test_processes_end_cleanly(folders: Callable[[str], Path]) -> None:
    folder = folders("llama")
    with ThreadPoolExecutor(os.cpu_count()) as several:
        codes = list(several.map(lambda end: exit_code(folder, end), ["close", "leave"] * 8))
    assert [code for code in codes if code[0]] == []
