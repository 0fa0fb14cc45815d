"""The engine that the core sees: its hooks are those that the replicas' engine has."""

from __future__ import annotations

from collections.abc import Sequence

from genlm.core import Adapter, Answer, Query, hookimpl
from genlm.core.types import Request, SampleRequest, ScoreRequest
from genlm.ray.cluster import Cluster
from genlm.ray.sending import FleetThread


class RayEngine:
    """Evaluates on replicas.

    Args:
        cluster: The connection to Ray; closed with the engine.
        fleet: The replicas, ready.

    Attributes:
        device: Where rows arrive.
        model: The replicas' actor handles, always the present ones.
    """

    device = "cpu"

    def __init__(self, cluster: Cluster, fleet: FleetThread) -> None:
        self._cluster = cluster
        self._fleet = fleet
        self.tokenizer = fleet.description.tokenizer
        self.vocab_size = fleet.description.vocab_size
        self.max_context = fleet.description.max_context
        self.model = fleet.actors

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
    ) -> list[Answer]:
        return self._fleet.step((*queries, *samples, *scores), dropped)

    @hookimpl
    def genlm_wake(self) -> None:
        self._fleet.wake()

    @hookimpl
    def genlm_close(self) -> None:
        try:
            self._fleet.close()
        finally:
            self._cluster.leave()


class WithPrefixes(RayEngine):
    """For replicas that pin prompts."""

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        self._fleet.pin(query)
        return True


class WithState(RayEngine):
    """For replicas that keep key/value state."""

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._fleet.clear()


class WithLora(RayEngine):
    """For replicas that load adapters."""

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        self._fleet.add_lora(adapter)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self._fleet.remove_lora(adapter)
        return True


OPTIONAL: dict[str, type[RayEngine]] = {
    "genlm_cache_prefix": WithPrefixes,
    "genlm_clear_kv_cache": WithState,
    "genlm_add_lora": WithLora,
}


def engine_for(cluster: Cluster, fleet: FleetThread) -> RayEngine:
    """The engine over a fleet that is ready."""
    bases = tuple(base for hook, base in OPTIONAL.items() if hook in fleet.description.hooks)
    kind: type[RayEngine] = type("RayEngine", bases or (RayEngine,), {})
    return kind(cluster, fleet)
