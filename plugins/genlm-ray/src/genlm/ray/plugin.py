"""The module that the entry point ``ray`` names. Importing it imports neither an engine nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core import BackendInfo, hookimpl
from genlm.core.types import Engine


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo(
        summary="replicas of another backend on a Ray cluster",
        engine="ray",
        needs=("ray",),
        # Never chosen automatically, because starting a cluster is the user's decision.
        preference=-1,
    )


@hookimpl
def genlm_load(model: str, options: Mapping[str, object], verify: Any) -> Engine:
    """Load replicas; the options are those of :class:`genlm.ray.options.RayOptions`. Each replica
    verifies its model."""
    from genlm.ray.engine import load

    return load(model, options, verify)
