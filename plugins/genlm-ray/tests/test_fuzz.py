"""Half a minute of kills; ``GENLM_FUZZ_SEED`` repeats one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from genlm.core import AsyncLM
from genlm.ray import end_fleet

from .fuzz import campaign

SECONDS = 30.0


def test_kills_in_every_state(cluster: Any, fleet: Callable[..., AsyncLM]) -> None:
    seed = int(os.environ.get("GENLM_FUZZ_SEED", random.randrange(10**6)))
    try:
        assert campaign(cluster, fleet, seed, SECONDS)
    finally:
        end_fleet(f"fuzz{seed}")
