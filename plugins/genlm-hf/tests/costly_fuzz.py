"""Random programs for an hour, or for GENLM_FUZZ_SECONDS; collected only when it is named."""

from __future__ import annotations

import os

os.environ.setdefault("GENLM_FUZZ_SECONDS", "3600")

from .test_fuzz import *  # noqa: F403
