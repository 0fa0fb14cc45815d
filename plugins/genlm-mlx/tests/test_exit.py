"""A process ends cleanly, whether its models were closed or not: MLX's streams are cleared before
their thread ends, however late that is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from genlm.core import load_model_by_name
from tests.left_behind import left_behind

from .late import ended
from .watched import Folders

#: Programs whose threads wait when they end.
HELD = """
run = threading.Thread.run

def held(thread):
    run(thread)
    if thread.name.startswith("genlm"):
        wait()

threading.Thread.run, threading.Thread.join = held, lambda *_: None

from genlm.core import load_model_by_name
"""

#: Two models, one of which is closed.
PROGRAM = (
    HELD
    + """
closed, left = [load_model_by_name(sys.argv[1], "mlx") for _ in range(2)]
threads = [each for each in threading.enumerate() if each.name.startswith("genlm")]
assert len(threads) == 2, threads
for lm in (closed, left):
    lm.next_token_logprobs_sync([1, 2, 3])
closed.close()
"""
)


def test_a_process_ends_cleanly(folders: Folders) -> None:
    done = ended(PROGRAM, str(folders("llama")))
    assert done.returncode == 0, done.stderr[-2000:]


#: A model that cannot be loaded.
FAILED = (
    HELD
    + """
threads = []
start = threading.Thread.start

def noted(thread):
    threads.append(thread)
    start(thread)

threading.Thread.start = noted
try:
    load_model_by_name(sys.argv[1], "mlx")
except Exception as error:
    assert "cannot load" in str(error), error
else:
    raise AssertionError
threads = [each for each in threads if each.name.startswith("genlm")]
assert len(threads) == 1, threads
"""
)


def test_a_process_that_could_not_load_a_model_ends_cleanly(
    folders: Folders, tmp_path: Path
) -> None:
    shutil.copytree(folders("llama"), tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, tmp_path / "cut" / "model.safetensors", {"format": "pt"})
    done = ended(FAILED, str(tmp_path / "cut"))
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_closed_model_leaves_nothing_behind(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def use() -> None:
        with load_model_by_name(str(folders("llama")), "mlx") as lm:
            lm.next_token_logprobs_sync([1, 2, 3])

    use()  # the first use allocates memory that imports keep
    before = left_behind()
    use()
    assert left_behind() == before
