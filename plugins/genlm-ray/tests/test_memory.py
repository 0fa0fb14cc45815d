"""The memory of rows in the program's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: A program that creates and frees rows as large as those of a real model, wave after wave, and
#: prints how many page faults each row of the last wave caused.
WAVES = """
import resource
import numpy as np
from genlm.ray.engine import keep_freed_memory

keep_freed_memory()
row = np.ones(50_000, np.float32)
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wave = [row.copy() for _ in range(64)]
    del wave
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 64)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep memory in their own way")
def test_rows_reuse_the_memory_of_freed_rows() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WAVES]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert float(ended.stdout) < 10  # a row has 48 pages
