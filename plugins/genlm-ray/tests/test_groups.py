"""Replicas in placement groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genlm.ray.free_resources import FreeResources
from genlm.ray.options import RayOptions

from .conftest import PATIENCE

OPTIONS = {"backend": "mock", "replicas": 1, "start_timeout": PATIENCE}


@pytest.fixture(scope="module")
def group(cluster: Any) -> Iterator[Any]:
    """A placement group of two bundles with all cores, so that there is no room outside it."""
    every = int(cluster.cluster_resources()["CPU"])
    made = placement_group([{"CPU": every - 1}, {"CPU": 1}])
    cluster.get(made.ready(), timeout=PATIENCE)
    yield made
    remove_placement_group(made)


def inside(group: Any) -> Any:
    return PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)


def test_capturing_placement_group_of_an_actor_gets_the_replicas(cluster: Any, group: Any) -> None:
    class Trial:
        def rows(self) -> int:
            from genlm.core import load_model_by_name

            with load_model_by_name("mock", "ray", OPTIONS) as lm:
                return len(lm.next_token_logprobs_sync([1]))

    trial = cluster.remote(num_cpus=1, scheduling_strategy=inside(group))(Trial).remote()
    assert cluster.get(trial.rows.remote(), timeout=PATIENCE) == 258
    cluster.kill(trial)


@pytest.mark.parametrize("how", ["given", "from_name"])
def test_placement_group_of_a_task_is_found(cluster: Any, group: Any, how: str) -> None:
    def rows(how: str) -> int:
        import ray

        from genlm.core import load_model_by_name
        from genlm.ray import AsyncRayLM

        if how == "from_name":
            lm: Any = AsyncRayLM.from_name("mock", **OPTIONS)
        else:
            there = {"placement": ray.util.get_current_placement_group()}
            lm = load_model_by_name("mock", "ray", {**OPTIONS, "resources": there})
        with lm:
            return len(lm.next_token_logprobs_sync([1]))

    task = cluster.remote(num_cpus=1, scheduling_strategy=inside(group))(rows)
    assert cluster.get(task.remote(how), timeout=PATIENCE) == 258


def test_error_about_room_only_in_placement_groups_names_the_remedy(
    cluster: Any, group: Any
) -> None:
    free = FreeResources.of(cluster, RayOptions())
    assert free.only_in_groups
    assert "asks for 1 CPU; free outside of placement groups: 0 CPU, and in" in free.described()
    assert "get_current_placement_group()" in free.described()
    own = FreeResources.of(cluster, RayOptions(resources={"placement": group}))
    assert not own.only_in_groups
