"""Room: what is dropped when the budget is spent, and how large the table is."""

from __future__ import annotations

from collections import Counter

from attrs import define, field

from genlm.core.checks import describe_error
from genlm.core.logs import get_logger
from genlm.kit.kv.commands import Resize, Table
from genlm.kit.kv.sharing import Worth
from genlm.kit.kv.tree import Tree
from genlm.kit.segments import Row, Segment, Trunk

logger = get_logger()


@define(eq=False)
class Needs:
    """The room that a batch takes.

    Attributes:
        rows: New rows.
        columns: The columns of the longest row, new or continued.
        computed: The positions that are computed for rows.
        trunks: The positions of new trunks.
        protected: Segments that must stay.
    """

    rows: int = 0
    columns: int = 0
    computed: int = 0
    trunks: int = 0
    protected: set[Segment] = field(factory=set)


class Room:
    """Keeps rows and trunks within the budget. The least recently used is dropped first.

    Args:
        tree: What is kept.
        table: Carries out commands, and says what the budget is.
        worth: The numbers.
    """

    def __init__(self, tree: Tree, table: Table, worth: Worth) -> None:
        self._tree = tree
        self._table = table
        self._worth = worth

    def has(self, needs: Needs) -> bool:
        """Whether there is room after dropping all that is neither needed nor pinned."""
        rows, columns, trunks = self._taken(needs)
        used = rows * columns + trunks
        return used <= self._table.limit(used)

    def make(self, needs: Needs) -> bool:
        """Drop the least recently used until the batch fits, and resize the table; ``False`` if it
        cannot fit."""
        if self._has_it(needs):
            return True
        rows, least, trunks = self._taken(needs)
        used = rows * least + trunks
        if used > self._table.limit(used):
            return False
        tree = self._tree
        sizes = Counter(self._worth.columns(row.size) for row in tree.rows)
        columns, count = max(needs.columns, *sizes, 0), sizes.total() + needs.rows
        # With long rows in the table a batch of short ones takes more, because all rows have the
        # same length. If that is more than twice as much, the long rows should go.
        limit = self._table.limit(rows * max(least, min(columns, 2 * needs.columns)) + trunks)
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
                    sizes[self._worth.columns(segment.size)] -= 1
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
            len(tree.rows) + needs.rows <= tree.slots
            and needs.columns <= tree.columns
            # What the batch takes is more than this, so the limit is not less.
            and positions <= self._table.limit(needs.rows * needs.columns + needs.trunks)
        )

    def is_tight(self, rows: int, columns: int) -> bool:
        """Whether with so many new rows, and all rows of so many columns, more than half of the
        budget is taken. What rows waste, or a copy of them, may not find room then."""
        tree = self._tree
        taken = (len(tree.rows) + rows) * columns + tree.trunk_positions
        return 2 * taken > self._table.limit(rows * columns)

    def trim(self) -> None:
        """Shrink the table to its rows."""
        rows = self._tree.rows
        self._resize(len(rows), self._worth.columns(max((row.size for row in rows), default=0)))

    def clear(self) -> None:
        """Drop everything, and free the memory."""
        self._tree.clear()
        self._table.do(Resize(0, 0, ()))

    def lose(self, error: BaseException) -> None:
        """Drop everything, because an error has left incomplete state."""
        tree = self._tree
        pinned = sum(segment.pinned for segment in tree.kept)
        logger.warning("kv.lost", rows=len(tree.rows), pinned=pinned, reason=describe_error(error))
        self.clear()

    def _taken(self, needs: Needs) -> tuple[int, int, int]:
        """What a batch and all that is pinned take: rows, their least columns, and the positions
        of trunks."""
        tree = self._tree
        staying = tree.with_paths(needs.protected) | tree.pinned()
        rows = [segment.size for segment in staying if isinstance(segment, Row)]
        trunks = sum(segment.size for segment in staying if isinstance(segment, Trunk))
        columns = max(needs.columns, *map(self._worth.columns, rows), 0)
        return len(rows) + needs.rows, columns, trunks + needs.trunks

    def _fit(self, rows: int, columns: int, room: int) -> None:
        """Give the table at least ``rows`` rows of ``columns``, at most ``room`` positions in all.

        Allocating memory is slow, so some more rows are allocated if the budget allows it: later
        forks use them.
        """
        tree, step = self._tree, self._worth.step
        too_large = tree.slots * tree.columns > room
        if rows <= tree.slots and columns <= tree.columns and not too_large:
            return
        wide = columns
        wider = self._worth.columns(columns + columns // 8)
        if columns > tree.columns and columns >= 8 * step and rows * wider <= room:
            wide = wider
        # More rows if they are short, so that the spare memory is about the same for any length.
        more = min(rows // 2, max(rows // 8, rows * step // max(wide, 1)))
        spare = rows if too_large else max(rows + more, tree.slots)
        self._resize(max(rows, min(spare, room // max(wide, 1))), wide)

    def _resize(self, slots: int, columns: int) -> None:
        """Resize the table, and move rows to its front."""
        kept = sorted(self._tree.rows, key=lambda row: row.slot)
        try:
            self._table.do(Resize(slots, columns, tuple(row.slot for row in kept)))
        except BaseException as error:  # with only some layers moved, no row is complete
            self.lose(error)
            raise
        self._tree.resized(slots, columns, kept)
        logger.debug("kv.resized", rows=slots, columns=columns, kept=len(kept))
