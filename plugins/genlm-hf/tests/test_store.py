"""The store keeps rows whole: what it says is in a row is there, under any budget and after any
failure.

The tokens themselves stand in for key/value state, so that every row can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm.core import Adapter
from genlm.core.context import Context
from genlm.hf.layout import Chunks, UniformLayout
from genlm.hf.pool import RowPool
from genlm.hf.table import PoolTable
from genlm.hf.upload import Upload
from genlm.kit.kv.placement import Placement
from genlm.kit.kv.planner import Planner
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import Worth
from genlm.kit.segments import Row, Segment

ADAPTERS = (None, Adapter("a", "folder", 1))
WORTH = Worth()
BYTES_PER_ROW = 2 * 4 * WORTH.step  # a key and a value of one float32 for each token


@st.composite
def batches(draw: Any) -> list[list[TokenSequence]]:
    """Contexts that extend, cut and fork those before them."""
    known: list[tuple[int, ...]] = [(1,)]
    made = []
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=12)):
        jobs = {}
        for _ in range(size):
            context = draw(st.sampled_from(known))
            cut = draw(st.integers(1, len(context)) | st.just(len(context)))
            grown = draw(st.lists(st.integers(1, 3), max_size=3)) * draw(
                st.sampled_from([1, 1, 1, 40])
            )
            job = TokenSequence((*context[:cut], *grown)[:150], draw(st.sampled_from(ADAPTERS)))
            jobs[job.key] = job
        made.append(list(jobs.values()))
        known.extend(tuple(job.tokens) for job in made[-1])
    return made


class Tokens:
    """A pool of one layer whose state is the tokens."""

    def __init__(self) -> None:
        self.pool = RowPool()
        self.pool.resize(1, 1)
        self.pool.layout = UniformLayout(Chunks([(Row(Context((1,)), slot=0), 0, 1)]), Upload())
        self.pool.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
        self.pool.resize(0, 0)

    def read(self, segment: Segment | None, length: int) -> list[int]:
        """The first tokens of the context that a segment ends."""
        if segment is None:
            return []
        layer = self.pool.layers[0]
        own = layer.keys[segment.slot] if isinstance(segment, Row) else segment.layers[0][0][0]
        tokens = [int(token) for token in own[0, : max(length - segment.start, 0), 0].tolist()]
        return self.read(segment.parent, min(length, segment.start)) + tokens

    @torch.inference_mode()
    def write(self, one: Placement[TokenSequence]) -> None:
        layer = self.pool.layers[0]
        for segment, start, stop in one.segments(one.start, one.sequence.length):
            tokens = torch.tensor(one.sequence.tokens[start:stop], dtype=torch.float32)
            for which, rows in enumerate((layer.keys, layer.values)):
                states = (
                    rows[segment.slot] if isinstance(segment, Row) else segment.layers[0][which][0]
                )
                states[0, start - segment.start : stop - segment.start, 0] = tokens


def planner_of(
    state: Tokens, budget: int, worth: Worth = WORTH, shares: bool = True
) -> Planner[TokenSequence]:
    return Planner(PoolTable(state.pool, budget), worth, shares)


@pytest.mark.parametrize("sharing", [1, 2, 8, 64])
@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(batches(), st.integers(0, 12), st.booleans(), st.data())
def test_segments_are_whole(
    sharing: int,
    asked: list[list[TokenSequence]],
    rows: int,
    trunks: bool,
    data: st.DataObject,
) -> None:
    state = Tokens()
    worth = Worth(sharing=sharing, trunk=2 * sharing)
    store = planner_of(state, rows * BYTES_PER_ROW, worth, trunks)
    pinned = None
    for sequences in asked:
        left = [one for one in sequences if store.fits(one.length)]
        while left:
            assignments = store.place(left)
            if not assignments:  # what is pinned has taken its room
                break
            store.tree.check_integrity()
            slots = [one.row.slot for one in assignments if one.row is not None]
            assert len({*slots}) == len(slots)
            for one in assignments:
                assert one.start <= one.sequence.latest_start
                known = list(one.sequence.tokens[: one.start])
                assert state.read(one.row or one.trunk, one.start) == known
            for one in assignments:
                state.write(one)
            if data.draw(st.integers(0, 4), "fails") == 0:
                store.abandon()
            else:
                store.commit(assignments)
                for one in assignments:
                    assert store.known(one.sequence) == one.sequence.latest_start
                if pinned is None and data.draw(st.booleans(), "pins"):
                    pinned = assignments[0].sequence
                    assert store.pin(pinned)
            left = without(left, assignments)
            store.tree.check_integrity()
            assert store.tree.positions <= rows * WORTH.step
            assert pinned is None or store.known(pinned) == pinned.latest_start
    store.drop_unpinned()
    store.tree.check_integrity()
    assert pinned is None or store.known(pinned) == pinned.latest_start
    if pinned is not None and pinned.adapter is not None:
        store.drop_adapter(pinned.adapter.version)
        assert store.known(pinned) == 0
    store.clear()
    store.tree.check_integrity()
    assert store.tree.positions == 0


def without(
    sequences: Sequence[TokenSequence], placed: Sequence[Placement[TokenSequence]]
) -> list[TokenSequence]:
    """Those that are not placed yet."""
    done = {one.index for one in placed}
    return [one for at, one in enumerate(sequences) if at not in done]
