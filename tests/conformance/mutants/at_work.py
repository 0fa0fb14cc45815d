"""Faults that show where requests meet. The engines stand in ``blind/``."""

from __future__ import annotations

from ..blind import at_work
from .registry import breaks

for engine, clause in {
    at_work.GeneratorsDoNotMoveUp: "requests_on_a_schedule",
    at_work.PlaceLeaksWithADroppedDraw: "cancelled_requests_leave_nothing",
    at_work.ScoresOfADroppedPrompt: "cancelled_requests_leave_nothing",
    at_work.EightShortestRun: "nobody_waits_behind_a_crowd",
    at_work.DeferredBehindNewcomers: "nobody_waits_behind_a_crowd",
    at_work.SecondWakeIsLost: "row_during_a_draw",
    at_work.KeptTablesGrowByTheirFirstColumns: "long_contexts_grow",
    at_work.PinnedAreNotMoved: "pinned_contexts_are_moved_with_the_others",
    at_work.PinsOfRemovedAdaptersStay: "adapters_are_bound_and_pinned_again_and_again",
    at_work.ScoresFromAHundredOn: "long_continuations",
    at_work.DrawsInARingOf128: "long_continuations",
    at_work.PositionsEndAt512: "cold_rows_are_the_reference",
}.items():
    breaks(clause, max_context=1024)(engine)
