"""Capacity: what is dropped when the budget is spent, and how large the table is."""

from __future__ import annotations

from collections import Counter

from attrs import define, field

from genlm.core.checks import describe_error
from genlm.core.logs import get_logger
from genlm.kit.kv.commands import Resize, Table
from genlm.kit.kv.sharing import SharingCosts
from genlm.kit.kv.tree import Tree
from genlm.kit.segments import Segment, Slot, Trunk

logger = get_logger()


@define(eq=False)
class Needs:
    """The capacity that a batch takes.

    Attributes:
        slots: New slots.
        columns: The columns of the longest slot, new or continued.
        computed: The positions that are computed for slots.
        trunks: The positions of new trunks.
        protected: Segments that must stay.
    """

    slots: int = 0
    columns: int = 0
    computed: int = 0
    trunks: int = 0
    protected: set[Segment] = field(factory=set)


class Capacity:
    """Keeps slots and trunks within the budget. The least recently used is dropped first.

    Args:
        tree: What is kept.
        table: Carries out commands, and says what the budget is.
        costs: The numbers.
    """

    def __init__(self, tree: Tree, table: Table, costs: SharingCosts) -> None:
        self._tree = tree
        self._table = table
        self._costs = costs

    def has(self, needs: Needs) -> bool:
        """Whether there is room after dropping all that is neither needed nor pinned."""
        slots, columns, trunks = self._taken(needs)
        used = slots * columns + trunks
        return used <= self._table.limit(used)

    def make(self, needs: Needs) -> bool:
        """Drop the least recently used until the batch fits, and resize the table; ``False`` if it
        cannot fit."""
        if self._has_it(needs):
            return True
        slots, least, trunks = self._taken(needs)
        used = slots * least + trunks
        if used > self._table.limit(used):
            return False
        tree = self._tree
        sizes = Counter(self._costs.columns(slot.size) for slot in tree.slots)
        columns, count = max(needs.columns, *sizes, 0), sizes.total() + needs.slots
        # All slots have the same length, so with long slots in the table, a batch of short ones
        # takes more room. If it takes more than twice as much, the long slots should be evicted.
        limit = self._table.limit(slots * max(least, min(columns, 2 * needs.columns)) + trunks)
        room = limit - tree.trunk_positions - needs.trunks
        dropped = True
        while count * columns > room and dropped:
            dropped = False
            for segment in list(tree.kept):
                if segment.pinned or segment.children or segment in needs.protected:
                    continue
                tree.drop(segment)
                dropped = True
                if isinstance(segment, Trunk):
                    room += segment.size
                else:
                    sizes[self._costs.columns(segment.size)] -= 1
                    count -= 1
                    columns = max(needs.columns, *(+sizes), 0)
                if count * columns <= room:
                    break
        self._fit(count, columns, room)
        return True

    def _has_it(self, needs: Needs) -> bool:
        """Whether a batch fits into the table as it is, beside all that is kept."""
        tree = self._tree
        positions = tree.positions + needs.trunks
        return (
            len(tree.slots) + needs.slots <= tree.allocated
            and needs.columns <= tree.columns
            # The batch takes at least this much, so the limit cannot be lower.
            and positions <= self._table.limit(needs.slots * needs.columns + needs.trunks)
        )

    def is_tight(self, slots: int, columns: int) -> bool:
        """Whether more than half of the budget is used when this many slots are added and all slots
        have this many columns. There may then be no room for unused columns, or for a copy of the
        slots."""
        tree = self._tree
        taken = (len(tree.slots) + slots) * columns + tree.trunk_positions
        return 2 * taken > self._table.limit(slots * columns)

    def trim(self) -> None:
        """Shrink the table to its slots."""
        slots = self._tree.slots
        self._resize(len(slots), self._costs.columns(max((slot.size for slot in slots), default=0)))

    def clear(self) -> None:
        """Drop everything, and free the memory."""
        self._tree.clear()
        self._table.do(Resize(0, 0, ()))

    def lose(self, error: BaseException) -> None:
        """Drop everything, because an error has left incomplete state."""
        tree = self._tree
        pinned = sum(segment.pinned for segment in tree.kept)
        logger.warning(
            "kv.lost", slots=len(tree.slots), pinned=pinned, reason=describe_error(error)
        )
        self.clear()

    def _taken(self, needs: Needs) -> tuple[int, int, int]:
        """The room that a batch and all pinned contexts need: the number of slots, their fewest
        columns, and the positions of trunks."""
        tree = self._tree
        staying = tree.with_paths(needs.protected) | tree.pinned()
        slots = [segment.size for segment in staying if isinstance(segment, Slot)]
        trunks = sum(segment.size for segment in staying if isinstance(segment, Trunk))
        columns = max(needs.columns, *map(self._costs.columns, slots), 0)
        return len(slots) + needs.slots, columns, trunks + needs.trunks

    def _fit(self, slots: int, columns: int, room: int) -> None:
        """Give the table at least ``slots`` slots of ``columns``, at most ``room`` positions in
        all.

        Allocating memory is slow, so some more slots are allocated if the budget allows it: later
        forks use them.
        """
        tree, step = self._tree, self._costs.step
        too_large = tree.allocated * tree.columns > room
        if slots <= tree.allocated and columns <= tree.columns and not too_large:
            return
        wide = columns
        wider = self._costs.columns(columns + columns // 8)
        if columns > tree.columns and columns >= 8 * step and slots * wider <= room:
            wide = wider
        # More slots if they are short, so that the spare memory is about the same for any length.
        more = min(slots // 2, max(slots // 8, slots * step // max(wide, 1)))
        spare = slots if too_large else max(slots + more, tree.allocated)
        self._resize(max(slots, min(spare, room // max(wide, 1))), wide)

    def _resize(self, slots: int, columns: int) -> None:
        """Resize the table, and move slots to its front."""
        kept = sorted(self._tree.slots, key=lambda slot: slot.index)
        try:
            self._table.do(Resize(slots, columns, tuple(slot.index for slot in kept)))
        except BaseException as error:  # with only some layers moved, no slot is complete
            self.lose(error)
            raise
        self._tree.resized(slots, columns, kept)
        logger.debug("kv.resized", slots=slots, columns=columns, kept=len(kept))
