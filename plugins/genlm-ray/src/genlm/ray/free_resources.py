"""The free resources of a cluster, described for messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from genlm.ray.options import RayOptions

#: Ray's names of the resources that replicas ask for.
KINDS = {"num_cpus": "CPU", "num_gpus": "GPU"}


@frozen
class FreeResources:
    """The free resources when replicas start.

    Attributes:
        asked: The resources that each replica asks for, by Ray's names.
        free: How much of these is free outside of placement groups.
        in_groups: How much is free in placement groups, together.
        in_a_group: Whether replicas are placed in a placement group.
    """

    asked: Mapping[str, float]
    free: Mapping[str, float]
    in_groups: Mapping[str, float]
    in_a_group: bool

    @classmethod
    def of(cls, ray: Any, options: RayOptions) -> FreeResources:
        given = options.actor_options(0)
        asked = {kind: given[name] for name, kind in KINDS.items() if given[name]}
        there = ray.available_resources()
        groups = {
            kind: sum(
                n for name, n in there.items() if re.fullmatch(f"{kind}_group_[0-9a-f]+", name)
            )
            for kind in asked
        }
        free = {kind: there.get(kind, 0.0) for kind in asked}
        return cls(asked, free, groups, not isinstance(given["scheduling_strategy"], str))

    @property
    def only_in_groups(self) -> bool:
        """Whether there is room for a replica in placement groups and nowhere else."""
        fits = [all(there[k] >= n for k, n in self.asked.items()) for there in
                (self.free, self.in_groups)]  # fmt: skip
        return not self.in_a_group and fits == [False, True]

    def described(self) -> str:
        """A message: which resources are requested and free, and how to use a placement group."""
        asked, free = (
            ", ".join(f"{n:g} {kind}" for kind, n in some.items()) or "nothing"
            for some in (self.asked, self.in_groups if self.in_a_group else self.free)
        )
        where = "in placement groups" if self.in_a_group else "outside of placement groups"
        said = f"each replica asks for {asked}; free {where}: {free}"
        if self.only_in_groups:
            there = ", ".join(f"{n:g} {kind}" for kind, n in self.in_groups.items())
            said += (
                f", and in placement groups {there}: a task that runs in one gives it with "
                "resources={'placement': ray.util.get_current_placement_group()}"
            )
        return said
