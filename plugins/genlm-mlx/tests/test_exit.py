"""A process ends cleanly, whether its model was closed or not: MLX's streams are gone before their
thread is, however late that ends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from genlm.core import load_model_by_name
from tests.left_behind import left_behind

from .late import ended

PROGRAM = """
run = threading.Thread.run

def held(thread):
    run(thread)
    if thread.name.startswith("genlm"):
        waiting.acquire()

threading.Thread.run, threading.Thread.join = held, lambda *_: None

from genlm.core import load_model_by_name
lm = load_model_by_name(sys.argv[1], "mlx")
(thread,) = [each for each in threading.enumerate() if each.name.startswith("genlm")]
lm.next_token_logprobs_sync([1, 2, 3])
if sys.argv[2] == "close":
    lm.close()
"""


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_process_ends_cleanly(folders: Callable[[str], Path], end: str) -> None:
    done = ended(PROGRAM, str(folders("llama")), end)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_closed_model_leaves_nothing_behind(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def use() -> None:
        with load_model_by_name(str(folders("llama")), "mlx") as lm:
            lm.next_token_logprobs_sync([1, 2, 3])

    use()  # what imports leave
    before = left_behind()
    use()
    assert left_behind() == before
