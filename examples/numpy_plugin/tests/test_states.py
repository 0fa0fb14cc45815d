"""Rows from kept state, compared with rows computed from their tokens alone."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from genlm_numpy.network import Array, Attend, Indices, Network
from genlm_numpy.states import States

from genlm.core import Adapter
from genlm.kit.kv import TokenSequence, Worth

from .test_conformance import write_adapter, write_model

#: So small that short contexts are shared, split, moved, joined and evicted in every way.
SMALL = Worth(2, 2, 4, 2, 6, 1.25, 1, 2, 2, 3)

#: Lengths on both sides of the planner's own numbers.
LONG = [size + by for size in (16, 64, 256, 512, 1024) for by in (-1, 0, 1)]


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Network]:
    folder = tmp_path_factory.mktemp("networks")
    model = Network.load(write_model(folder / "model.npz"))
    return {0: model, 1: model.adapted(write_adapter(folder / "a.npz", seed=1))}


@pytest.mark.parametrize("budget", [0, 20, 100, 400, 10_000])
def test_any_short_contexts(networks: dict[int, Network], budget: int) -> None:
    lengths = [*range(1, 9), 13, 20]
    Contexts(networks, budget, SMALL, random.Random(budget), lengths).run(60, 8)


def test_any_long_contexts(networks: dict[int, Network]) -> None:
    Contexts(networks, 3000, Worth(), random.Random(0), LONG).run(8, 16)


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


class Contexts:
    """Contexts that extend, cut, fork and repeat others."""

    def __init__(
        self,
        networks: dict[int, Network],
        budget: int,
        worth: Worth,
        source: random.Random,
        lengths: list[int],
    ) -> None:
        self._networks = dict(networks)
        self._states = States(self._networks, budget, worth)
        self._source = source
        self._lengths = lengths
        self._live = [TokenSequence(self._tokens(5))]
        self._cold: dict[bytes, Array] = {}

    def run(self, rounds: int, most: int) -> None:
        planner = self._states.planner
        for _ in range(rounds):
            if self._source.random() < 0.3:  # as resampling does
                self._live = [self._source.choice(self._live)]
            asked = [self._any() for _ in range(self._source.randint(1, most))]
            self._live = [*{one.key: one for one in asked}.values()]
            if self._source.random() < 0.2:
                self._fail()
            for one, row in zip(self._live, self._states.logits(self._live), strict=True):
                np.testing.assert_allclose(row, self._expected(one), atol=2e-4)
            self._source.choice([*[lambda: None] * 8, self._pin, planner.drop_unpinned])()
            planner.tree.check_integrity()

    def _fail(self) -> None:
        working = dict(self._networks)
        for version, network in working.items():
            self._networks[version] = Failing(network.weights)
        with pytest.raises(MemoryError):
            self._states.logits(self._live)
        self._networks.update(working)

    def _pin(self) -> None:
        one = self._source.choice(self._live)
        self._states.logits([one])
        assert self._states.planner.pin(one)

    def _expected(self, one: TokenSequence) -> Array:
        if one.key not in self._cold:
            self._cold[one.key] = self._networks[one.version].cold(one.tokens)
        return self._cold[one.key]

    def _any(self) -> TokenSequence:
        before = self._source.choice(self._live)
        kind = self._source.randrange(5)
        if kind == 0:
            adapter = self._source.choice([None, Adapter("a", "", 1)])
            return TokenSequence(self._tokens(self._source.choice(self._lengths)), adapter)
        tokens = tuple(before.tokens)
        if kind == 1:
            tokens = tokens[: self._source.randint(1, len(tokens))]
        more = self._source.choice([0, 1, 1, 1, self._source.choice(self._lengths)])
        return TokenSequence((*tokens, *self._tokens(more))[:1500], before.adapter)

    def _tokens(self, count: int) -> tuple[int, ...]:
        """One of a few tokens, so that contexts share prefixes."""
        seed = self._source.randrange(3 if count > 1 else 30)
        return tuple(random.Random(seed).choices(range(256), k=count))
