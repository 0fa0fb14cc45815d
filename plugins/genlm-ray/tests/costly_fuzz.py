"""An hour of kills: ``nox -s "costly(ray)"``; ``GENLM_FUZZ_SECONDS`` says how long."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from genlm.core import AsyncLM

from . import test_fuzz


def test_an_hour_of_kills(
    cluster: Any, fleet: Callable[..., AsyncLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_fuzz, "SECONDS", float(os.environ.get("GENLM_FUZZ_SECONDS", 3600)))
    test_fuzz.test_kills_in_every_state(cluster, fleet)
