"""The options of the fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, fields, frozen

from genlm.core import checks
from genlm.core.errors import InvalidOptionError
from genlm.core.options import refuse_unknown
from genlm.core.plugins import find_backend

#: Ray's namespace for the names of replicas.
NAMESPACE = "genlm"

#: The resources that a replica may request, and the option that says how replicas are placed.
RESOURCES = ("num_cpus", "num_gpus", "placement")

#: The hint for an unknown option that the inner backend may have.
OF_THE_INNER = "one of the inner backend, such as hf_opts or engine_opts, goes in backend_opts"

#: Ray's scheduling strategy for each named placement.
STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}


def require(name: str, given: object, what: str, accepts: Callable[[Any], object]) -> None:
    if not accepts(given):
        raise InvalidOptionError(f"{name} must be {what}; got {checks.safe_repr(given)}")


def is_group(placement: object) -> bool:
    from ray.util.placement_group import PlacementGroup

    return isinstance(placement, PlacementGroup)


def capturing_group() -> Any:
    """The placement group that captures actors started here. In an actor, Ray knows it on all
    threads; in a task, only on the task's own thread."""
    import ray
    from ray.util.placement_group import get_current_placement_group

    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return None
    worker = ray._private.worker.global_worker
    captures = worker.should_capture_child_tasks_in_placement_group
    return get_current_placement_group() if captures else None


@frozen(kw_only=True)
class RayOptions:
    """The options of the ``ray`` backend.

    Attributes:
        backend: The inner backend, which must be installed on every node.
        replicas: The number of replicas.
        backend_opts: The inner backend's options, and options of the core (``batch_size``, ...).
        resources: The resources of each replica: ``num_cpus`` (1), ``num_gpus`` (0), and
            ``placement``: ``"spread"`` over the nodes (the default), ``"pack"`` onto few, or a
            placement group of Ray, whose bundles they take. In an actor whose placement group
            captures its children, they take bundles of that group.
        address: A running cluster, as ``ray.init`` takes it: ``"10.0.0.1:6379"`` on a machine of
            the cluster, or ``"ray://10.0.0.1:10001"`` (Ray's client) from elsewhere. ``None``
            means ``RAY_ADDRESS``; without that, a cluster is started on this machine, and stopped
            with the last model.
        name: The name of a fleet that several programs share, and that stays when a program ends.
            The first program that names it starts it; the others join it. With ``None``, the
            program has a fleet of its own.
        start_timeout: Seconds within which the replicas must have loaded the model; later, seconds
            for which all of them may be lost.
        function_timeout: Seconds that one call of a function of rows (``then``) may take on a
            replica. After that its callers get an error, and the replica is replaced.
    """

    backend: str = "hf"
    replicas: int = 2
    backend_opts: Mapping[str, Any] = field(factory=dict)
    resources: Mapping[str, Any] = field(factory=dict)
    address: str | None = None
    name: str | None = None
    start_timeout: float = 600.0
    function_timeout: float = 60.0

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> RayOptions:
        """The options as the user gave them; ``None`` is the default.

        Raises:
            BackendNotFoundError: the inner backend is not installed here.
            InvalidOptionError: an option is unknown or out of range.
        """
        known = [attribute.name for attribute in fields(cls)]
        refuse_unknown("ray", options, known, others=OF_THE_INNER)
        own = cls(**{name: given for name, given in options.items() if given is not None})
        checks.integer("replicas", own.replicas, least=1)
        for name in ("start_timeout", "function_timeout"):
            checks.number(name, getattr(own, name), "of seconds above 0", lambda n: n > 0)
        for name in ("backend_opts", "resources"):
            require(name, getattr(own, name), "a dict", lambda given: isinstance(given, Mapping))
        for name in ("backend", "address", "name"):
            if (given := getattr(own, name)) is not None:
                require(name, given, "a string, not empty", lambda x: isinstance(x, str) and x)
        own._check_resources()
        if own.address == "auto":
            raise InvalidOptionError(
                "address='auto' joins whatever cluster it finds, perhaps a stranger's; give "
                "host:port, or leave it out for a cluster of this program's own"
            )
        if own.backend == "ray":
            raise InvalidOptionError("backend='ray' cannot be inside 'ray'; name the engine's own")
        find_backend(own.backend)  # reject a misspelt name now, and not later in a replica
        import ray

        try:
            ray.cloudpickle.dumps(own.backend_opts)
        except Exception as error:
            raise InvalidOptionError(
                "backend_opts travels to the replicas, and cannot be pickled "
                f"({checks.describe_error(error)}); leave out what cannot"
            ) from error
        return own

    def _check_resources(self) -> None:
        unknown = [str(name) for name in self.resources if name not in RESOURCES]
        if unknown:
            raise InvalidOptionError(
                f"resources has no {', '.join(unknown)}; it has {', '.join(RESOURCES)}"
            )
        for name in ("num_cpus", "num_gpus"):
            amount = self.resources.get(name, 0)
            checks.number(f"resources[{name!r}]", amount, "of at least 0", lambda n: n >= 0)
        require(
            "resources['placement']",
            self.resources.get("placement", "spread"),
            f"one of {', '.join(STRATEGIES)}, or a placement group",
            lambda given: given in list(STRATEGIES) or is_group(given),
        )

    def _strategy(self) -> Any:
        """The placement of replicas by Ray."""
        placement = self.resources.get("placement", "spread")
        group = placement if is_group(placement) else None
        if group is None and self.name is None:  # a fleet with a name outlives the placement group
            group = capturing_group()
        if group is None:
            return STRATEGIES[placement]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    def actor_options(self, index: int) -> dict[str, Any]:
        """The options with which Ray starts the actor of one replica."""
        asked: dict[str, Any] = {
            "num_cpus": self.resources.get("num_cpus", 1),
            "num_gpus": self.resources.get("num_gpus", 0),
            "scheduling_strategy": self._strategy(),
        }
        if self.name is not None:
            # This works from any namespace to which the program is connected.
            named = {"name": f"genlm-{self.name}-{index}", "namespace": NAMESPACE}
            asked |= {**named, "lifetime": "detached", "get_if_exists": True}
        return asked
