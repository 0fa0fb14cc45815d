"""A process ends cleanly, whether its model was closed or not: MLX's streams are gone before their thread is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROGRAM = """
import sys
from genlm.core import load_model_by_name
lm = load_model_by_name(sys.argv[1], "mlx")
lm.next_token_logprobs_sync([1, 2, 3])
if sys.argv[2] == "close":
    lm.close()
"""


def exit_code(folder: Path, end: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder), end], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr[-2000:]


@pytest.mark.parametrize("end", ["close", "leave"])
def test_processes_end_cleanly(folders: Callable[[str], Path], end: str) -> None:
    folder = folders("llama")
    with ThreadPoolExecutor(2) as two:
        codes = list(two.map(lambda _: exit_code(folder, end), range(4)))
    assert [code for code in codes if code[0]] == []
