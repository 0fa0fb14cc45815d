"""Random programs: rows from kept state, compared with rows computed from their tokens alone."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from attrs import define
from genlm_numpy.engine import NumpyEngine
from genlm_numpy.network import Array, Attend, Indices, Network
from genlm_numpy.states import States

from genlm.conformance import Program
from genlm.kit.kv import SharingCosts

from .test_conformance import write_adapter, write_model

#: Costs so small that short contexts are shared, split, moved, joined and evicted in every way.
SMALL = SharingCosts(2, 2, 4, 2, 6, 1.25, 1, 2, 2, 3)


class Failing(Network):
    """It fails halfway."""

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], wanted: Indices, attend: Attend
    ) -> Array:
        def failing(layer: int, *states: Array) -> Array:
            if layer > 0:
                raise MemoryError
            return attend(layer, *states)

        return super().forward(tokens, positions, wanted, failing)


@define(eq=False, kw_only=True)
class OnNumpy(Program):
    """Forwards fail now and then, and the planner's books are looked at."""

    engine: NumpyEngine

    def ways(self) -> dict[Callable[[], None], int]:
        return {**super().ways(), self.fail: 15}

    def look(self) -> None:
        self.engine._states.planner.tree.check_integrity()

    def fail(self) -> None:
        networks = self.engine._networks
        working = dict(networks)
        for version, network in working.items():
            networks[version] = Failing(network.weights)
        with pytest.raises(MemoryError):
            self.step()
        networks.update(working)
        self.in_flight.clear()


@pytest.mark.parametrize(
    ("costs", "longest", "budget"),
    [*((SMALL, 30, budget) for budget in (0, 20, 100, 400, 10_000)), (SharingCosts(), 1024, 3000)],
)
def test_random_programs(costs: SharingCosts, longest: int, budget: int, tmp_path: Path) -> None:
    engine = NumpyEngine(write_model(tmp_path / "model.npz"))
    engine._states = States(engine._networks, budget, costs)
    program = OnNumpy(
        engine=engine,
        source=random.Random(budget),
        longest=longest,
        adapters={name: write_adapter(tmp_path / f"{name}.npz", ord(name)) for name in "ab"},
        chunk=256 if longest > 256 else 4,
        most=12,
    )
    program.adapt()
    program.run(100)
