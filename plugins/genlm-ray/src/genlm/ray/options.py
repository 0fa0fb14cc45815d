"""The options of the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from genlm.core import checks
from genlm.core.errors import InvalidOptionError
from genlm.core.options import refuse_unknown

#: Where named replicas have their names.
NAMESPACE = "genlm"

#: What a replica may ask of its node, and how replicas are placed.
RESOURCES = ("num_cpus", "num_gpus", "placement")

#: Ray's names for our placements.
STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}


def or_empty(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if given is None else given


@frozen(kw_only=True)
class RayOptions:
    """The options of the ``ray`` backend.

    Attributes:
        backend: The inner backend, installed on every node.
        replicas: How many replicas.
        backend_opts: The inner backend's options; those of the core too (``batch_size``, ...).
        resources: For each replica: ``num_cpus`` (1), ``num_gpus`` (0), and ``placement``:
            ``"spread"`` over the nodes (the default) or ``"pack"`` them onto few.
        address: A running cluster, as ``ray.init`` takes it (``"10.0.0.1:6379"``, ``"ray://..."``);
            ``None`` takes ``RAY_ADDRESS``, else starts a cluster on this machine alone.
        name: A fleet that outlives this program and that several programs share. It starts with
            the first that names it; the others join it. ``None`` is a fleet of one's own.
        start_timeout: Seconds to wait for the replicas to load, and later for any replica to be
            there again.
    """

    backend: str = "hf"
    replicas: int = 2
    backend_opts: Mapping[str, Any] = field(default=None, converter=or_empty)
    resources: Mapping[str, Any] = field(default=None, converter=or_empty)
    address: str | None = None
    name: str | None = None
    start_timeout: float = 600.0

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> RayOptions:
        """The options as the user gave them.

        Raises:
            InvalidOptionError: one is unknown or out of range.
        """
        refuse_unknown("ray", options, [attribute.name for attribute in fields(cls)])
        own = cls(**options)
        checks.integer("replicas", own.replicas, least=1)
        for name in ("backend_opts", "resources"):
            if not isinstance(getattr(own, name), Mapping):
                raise InvalidOptionError(
                    f"{name} must be a dict; got {checks.safe_repr(getattr(own, name))}"
                )
        own._check_resources()
        own._check_texts()
        if own.backend == "ray":
            raise InvalidOptionError("backend='ray' cannot be inside 'ray'; name the engine's own")
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
        placement = self.resources.get("placement", "spread")
        if not isinstance(placement, str) or placement not in STRATEGIES:
            raise InvalidOptionError(
                f"resources['placement'] must be one of {', '.join(STRATEGIES)}; "
                f"got {checks.safe_repr(placement)}"
            )

    def _check_texts(self) -> None:
        for name in ("backend", "address", "name"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (value is not None or name == "backend"):
                raise InvalidOptionError(
                    f"{name} must be a string, not empty; got {checks.safe_repr(value)}"
                )
        if self.address == "auto":
            raise InvalidOptionError(
                "address='auto' joins whatever cluster it finds, perhaps a stranger's; give "
                "host:port, or leave it out for a cluster of this program's own"
            )
        checks.number("start_timeout", self.start_timeout, "of seconds above 0", lambda n: n > 0)

    def actor_options(self, index: int) -> dict[str, Any]:
        """What Ray is asked for, for one replica."""
        asked: dict[str, Any] = {
            "num_cpus": self.resources.get("num_cpus", 1),
            "num_gpus": self.resources.get("num_gpus", 0),
            "scheduling_strategy": STRATEGIES[self.resources.get("placement", "spread")],
        }
        if self.name is not None:
            # Whatever namespace the program is connected in.
            named = {"name": f"genlm-{self.name}-{index}", "namespace": NAMESPACE}
            asked |= {**named, "lifetime": "detached", "get_if_exists": True}
        return asked
