"""From the user's options to an engine over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core.plugins import find_backend
from genlm.ray.cluster import Cluster
from genlm.ray.engine import RayEngine, engine_for
from genlm.ray.options import RayOptions
from genlm.ray.sending import FleetThread


def load(model: str, options: Mapping[str, Any]) -> RayEngine:
    """Start the replicas, or join those of a named fleet, and wait until all are ready.

    Raises:
        BackendNotFoundError: the inner backend is not installed here; it must be on every node.
        BackendUnavailableError: no cluster, or the replicas did not start in time.
        InvalidOptionError: an option is not accepted.
        Exception: what the inner backend raised while it loaded the model.
    """
    checked = RayOptions.checked(options)
    find_backend(checked.backend)  # a misspelt name is said here, not by a replica a minute later
    cluster = Cluster(checked.address)
    try:
        return engine_for(cluster, FleetThread(cluster.ray, model, checked))
    except BaseException:
        cluster.leave()
        raise
