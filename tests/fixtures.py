"""Fixtures that the tests of the core and of several plugins share. A ``conftest.py`` imports
them."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import any_speed  # noqa: F401

# By default, a load is verified in a separate process, which takes seconds. Only tests of
# verification switch it on.
os.environ.setdefault("GENLM_VERIFY", "0")


def pytest_collection_finish() -> None:
    """Exclude imported objects from the garbage collections of every test."""
    gc.freeze()


@pytest.fixture(scope="session")
def real_model() -> str:
    """The folder of SmolLM2-135M, which nox makes."""
    folder = os.environ.get("GENLM_TEST_MODEL")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GENLM_TEST_MODEL names no folder; `python tools/smollm2.py` makes one")
    return folder


@pytest.fixture
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints past pytest, which shows nothing of a test that passes."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", flush=True)

    return line


@pytest.fixture
def fuzz_seed(say: Callable[[str], None]) -> int:
    """Of random work: another each time, or that of GENLM_FUZZ_SEED, which runs one again."""
    seed = int(os.environ.get("GENLM_FUZZ_SEED", random.SystemRandom().randrange(10**9)))
    say(f"GENLM_FUZZ_SEED={seed}")
    return seed
