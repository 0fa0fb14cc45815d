"""The store keeps rows whole: what it says is in a row is there, under any budget and after any
failure.

The tokens themselves stand in for key/value state, so that every row can be read.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm.core import Adapter
from genlm.hf.job import Job
from genlm.hf.layout import Span, UniformLayout
from genlm.hf.pool import RowPool
from genlm.hf.store import COLUMN_STEP, KVStore, Placement

ADAPTERS = (None, Adapter("a", "folder", 1))
BYTES_PER_ROW = 2 * 4 * COLUMN_STEP  # a key and a value of one float32 for each token


@st.composite
def batches(draw: Any) -> list[list[Job]]:
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
            job = Job((*context[:cut], *grown)[:150], draw(st.sampled_from(ADAPTERS)))
            jobs[job.key] = job
        made.append(list(jobs.values()))
        known.extend(tuple(job.tokens) for job in made[-1])
    return made


class Tokens:
    """A pool of one layer whose state is the tokens."""

    def __init__(self) -> None:
        self.pool = RowPool()
        self.pool.resize(1, 1)
        self.pool.layout = UniformLayout([Span(0, 0, 1)])
        self.pool.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
        self.pool.resize(0, 0)

    def read(self, slot: int, length: int) -> list[int]:
        layer = self.pool.layers[0]
        assert torch.equal(layer.keys, layer.values)
        return [int(token) for token in layer.keys[slot, 0, :length, 0]]

    @torch.inference_mode()
    def write(self, placement: Placement) -> None:
        tokens = torch.tensor(placement.job.tokens[placement.start :], dtype=torch.float32)
        for states in (self.pool.layers[0].keys, self.pool.layers[0].values):
            states[placement.slot, 0, placement.start : placement.job.length, 0] = tokens


@settings(deadline=None, max_examples=150)
@given(batches(), st.integers(0, 12), st.data())
def test_rows_are_whole(asked: list[list[Job]], rows: int, data: st.DataObject) -> None:
    state = Tokens()
    store = KVStore(state.pool, rows * BYTES_PER_ROW)
    pinned = None
    for jobs in asked:
        left = [job for job in jobs if store.fits(job.length)]
        while left:
            placements = store.place(left)
            if not placements:
                break
            assert len({placement.slot for placement in placements}) == len(placements)
            for placement in placements:
                assert placement.start <= placement.job.latest_start
                assert state.read(placement.slot, placement.start) == list(
                    placement.job.tokens[: placement.start]
                )
            for placement in placements:
                state.write(placement)
            if data.draw(st.integers(0, 4), "fails") == 0:
                store.abandon(placements)
            else:
                store.commit(placements)
                assert all(
                    store.known(placement.job) == placement.job.latest_start
                    for placement in placements
                )
                if pinned is None and data.draw(st.booleans(), "pins"):
                    pinned = placements[0].job
                    store.pin(pinned)
            left = left[len(placements) :]
            store.check_integrity()
            assert state.pool.rows * state.pool.columns <= rows * COLUMN_STEP
            assert pinned is None or store.known(pinned) == pinned.latest_start
    store.drop_unpinned()
    store.check_integrity()
    assert pinned is None or store.known(pinned) == pinned.latest_start
    if pinned is not None and pinned.adapter is not None:
        store.drop_adapter(pinned.adapter)
        assert store.known(pinned) == 0
    store.clear()
    store.check_integrity()
