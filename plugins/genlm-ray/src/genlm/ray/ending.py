"""Ends a fleet that several programs share."""

from __future__ import annotations

import contextlib
import re

from genlm.ray.cluster import Cluster
from genlm.ray.options import NAMESPACE

#: Seconds for a replica to tell the programs that it ends.
GOODBYE_SECONDS = 10.0


def end_fleet(name: str, address: str | None = None) -> int:
    """End all replicas of a named fleet, whichever program started them.

    Programs that still use it get :class:`~genlm.core.EngineDeadError`.

    Args:
        name: The name of the fleet.
        address: The address of the cluster, as in the option ``address``. Not needed if the program
            is connected to the cluster, or ``RAY_ADDRESS`` is set.

    Returns:
        How many replicas there were.

    Raises:
        BackendUnavailableError: there is no cluster at the address.
        InvalidOptionError: no cluster is named, or this process is connected to another one.
    """
    cluster = Cluster(address, may_start=False)
    ray = cluster.ray
    try:
        actors = []
        for each in ray.util.list_named_actors(all_namespaces=True):
            ours = re.fullmatch(rf"genlm-{re.escape(name)}-\d+", each["name"])
            if ours and each["namespace"] == NAMESPACE:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    actors.append(ray.get_actor(**each))
        ending = [actor.end.remote() for actor in actors]
        ray.wait(ending, num_returns=len(ending), timeout=GOODBYE_SECONDS) if ending else None
        for actor in actors:
            ray.kill(actor)
        return len(actors)
    finally:
        cluster.leave()
