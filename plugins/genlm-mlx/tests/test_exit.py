"""A process ends cleanly, whether its models were closed or not: MLX's streams are gone before
their thread is, however late that ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from genlm.core import load_model_by_name
from tests.left_behind import left_behind

from .late import ended
from .watched import Folders

#: Two models, of which one is closed.
PROGRAM = """
run = threading.Thread.run

def held(thread):
    run(thread)
    if thread.name.startswith("genlm"):
        wait()

threading.Thread.run, threading.Thread.join = held, lambda *_: None

from genlm.core import load_model_by_name
closed, left = [load_model_by_name(sys.argv[1], "mlx") for _ in range(2)]
threads = [each for each in threading.enumerate() if each.name.startswith("genlm")]
assert len(threads) == 2, threads
for lm in (closed, left):
    lm.next_token_logprobs_sync([1, 2, 3])
closed.close()
"""


def test_a_process_ends_cleanly(folders: Folders) -> None:
    done = ended(PROGRAM, str(folders("llama")))
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_closed_model_leaves_nothing_behind(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def use() -> None:
        with load_model_by_name(str(folders("llama")), "mlx") as lm:
            lm.next_token_logprobs_sync([1, 2, 3])

    use()  # what imports leave
    before = left_behind()
    use()
    assert left_behind() == before
