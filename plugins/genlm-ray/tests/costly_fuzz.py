"""An hour of kills, or GENLM_FUZZ_SECONDS."""

from __future__ import annotations

import os

os.environ.setdefault("GENLM_FUZZ_SECONDS", "3600")

from .test_fuzz import *  # noqa: F403
