"""Trunks: which positions of slots are kept only once for all contexts that share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Any, TypeVar

from attrs import evolve

from genlm.core.checks import describe_error
from genlm.core.context import Context
from genlm.core.logs import get_logger
from genlm.kit.kv.capacity import Capacity, Needs
from genlm.kit.kv.commands import Copy, Join, NewTrunk, Shift, Table
from genlm.kit.kv.placement import Placement
from genlm.kit.kv.sharing import SharingCosts, best_cut, common_parts, families_of
from genlm.kit.kv.tree import Tree
from genlm.kit.segments import Segment, Slot, Trunk

T = TypeVar("T")

logger = get_logger()

#: Common prefixes and slots that are too long are looked for once one slot in this many is new.
SLOTS_PER_NEW_SLOT = 8


class Trunks:
    """Makes trunks of slots, and joins trunks.

    Args:
        tree: The kept segments.
        capacity: Makes room for trunks.
        table: Carries out commands.
        costs: The numbers for decisions on sharing.
    """

    def __init__(self, tree: Tree, capacity: Capacity, table: Table, costs: SharingCosts) -> None:
        self._tree = tree
        self._capacity = capacity
        self._table = table
        self._ample, self._tight = costs, evolve(costs, plenty=0)
        self._new_slots = 0  # new slots since the last search for common prefixes
        # The arguments of the last search for slots that are too long, if it found none, and the
        # number of new slots since then.
        self._vain: tuple[int, SharingCosts, int] | None = None
        self._since_vain = 0

    def share_forked(self, batch: Sequence[Placement[Any]], needs: Needs) -> bool:
        """Turn into trunks what several contexts will share, and slots that are too long beside
        those of a batch.

        Returns:
            Whether a trunk was made.
        """
        changed = False
        protected = {placement.found for placement in batch if placement.found is not None}
        # A context that extends its slot, or ends in it, runs there and shares nothing new.
        new = [placement for placement in batch if not placement.continued]
        forked = {placement.found for placement in new}
        wanted: dict[Slot, list[int]] = {}
        for placement in batch if new else ():
            if isinstance(placement.found, Slot) and placement.found in forked:
                wanted.setdefault(placement.found, []).append(placement.start)
        # Slots that have become trunks are weighed as if they were still slots.
        whole = [placement for placement in new if placement.cut == placement.sequence.length]
        apart = [placement.sequence.length - placement.base for placement in whole]
        columns = max([needs.columns, *apart])
        parts: list[tuple[Slot, int]] = []
        for slot, cuts in wanted.items():
            cut, saved = best_cut(cuts, slot.start)
            size = cut - slot.start
            if self.costs(len(new), max(columns, size)).shared(size, saved):
                parts.append((slot, cut))
        if self._too_late(len(new), columns, parts) and self._share(needs, self._tight):
            return True
        for slot, cut in parts:
            changed |= self._are_kept([slot]) and self.split([slot], cut, protected)
        fresh = [(each.sequence.length - each.cut, each) for each in new if each.needs_slot]
        for long in self.too_long(needs.columns, fresh):
            if isinstance(long, Slot) and self._are_kept([long]):
                changed |= self.split([long], long.stop, protected)
        return changed

    def _too_late(self, slots: int, columns: int, parts: Sequence[tuple[Slot, int]]) -> bool:
        """Whether slots that were not made trunks while there was plenty of room would each become
        one now. Their common prefixes are made trunks first."""
        if not self._ample.plenty or self.costs(slots, columns) is self._ample:
            return False
        return len(parts) > 0 or any(slot.size >= self._tight.trunk for slot in self._tree.slots)

    def costs(self, slots: int, columns: int) -> SharingCosts:
        """The numbers for decisions on sharing when this many slots are added and all slots have at
        least this many columns."""
        columns = max(columns, self._tree.columns)
        return self._tight if self._capacity.is_tight(slots, columns) else self._ample

    def too_long(
        self, columns: int, new: Sequence[tuple[int, T]], grown: Set[Slot] = frozenset()
    ) -> list[Slot | T]:
        """The slots that should become trunks: those that make all others much longer than their
        contents, and every long slot once memory is short, because a slot is copied to become a
        trunk.

        Args:
            columns: The columns that the batch needs.
            new: The size and the owner of each slot that the batch adds.
            grown: The slots that some of the new ones replace.
        """
        tree = self._tree
        asked, columns, more = columns, max(columns, tree.columns), len(new) - len(grown)
        total = (
            tree.slot_positions + sum([size for size, _ in new]) - sum(slot.size for slot in grown)
        )
        costs = self.costs(more, columns)
        short = columns >= costs.trunk and costs is self._tight
        if not (short or costs.too_wide(columns, len(tree.slots) + more, total)):
            return []
        if self._was_in_vain(asked, costs, len(new)):
            return []
        slots: list[tuple[int, Slot | T]] = [
            (slot.size, slot) for slot in tree.slots if slot not in grown
        ]
        slots += new
        if short and costs.saves_room([size for size, _ in slots], columns):
            others = [each for each in slots if each[0] < costs.trunk]
            found = costs.long(slots) + costs.outliers_of(others)
        else:
            found = costs.outliers_of(slots)
        self._vain = None if found else (asked, costs, len(tree.slots))
        self._since_vain = 0
        return found

    def _was_in_vain(self, columns: int, costs: SharingCosts, new: int) -> bool:
        """Whether the last search found no slot that is too long, and not much has changed since.
        With thousands of slots, a search in every step would take longer than the step."""
        self._since_vain += new
        if self._vain is None:
            return False
        most, weighed, slots = self._vain
        changed = self._since_vain + abs(len(self._tree.slots) - slots)
        return columns <= most and costs is weighed and SLOTS_PER_NEW_SLOT * changed < slots

    def share_common(self, needs: Needs) -> bool:
        """If the table would take much more room than its contents, turn common prefixes of slots
        into trunks, and the few slots that are longer than all others.

        Returns:
            Whether some were.
        """
        changed = False
        while self._enough_new(needs) and self._share(needs, None):
            changed = True
        return changed

    def _share(self, needs: Needs, costs: SharingCosts | None) -> bool:
        """Turn into trunks what :meth:`_splits` finds."""
        chosen, done = self._splits(needs, costs), False
        protected = needs.protected.union(*(slots for slots, _ in chosen))
        for slots, cut in chosen:
            if not self._are_kept(slots):
                continue  # the common prefix of the others is searched for again
            if not self.split(slots, cut, protected):
                break
            done = True
        return done

    def _are_kept(self, slots: Iterable[Slot]) -> bool:
        """Whether all chosen slots still exist. An earlier split may have dropped one: to make
        room, or because an equal trunk has taken its place elsewhere in the tree."""
        return all(slot in self._tree.slots for slot in slots)

    def _enough_new(self, needs: Needs) -> bool:
        """Count the new slots of a table that would grow. Once the budget is spent, every new slot
        counts: slots are searched when enough are new, or one is longer."""
        slots, longer = len(self._tree.slots), needs.columns > self._tree.columns
        if slots + needs.slots <= self._tree.allocated and not longer:
            return False
        self._new_slots += needs.slots
        enough = longer or self._new_slots >= slots // SLOTS_PER_NEW_SLOT
        if enough:
            self._new_slots = 0
        return enough

    def _splits(self, needs: Needs, costs: SharingCosts | None) -> list[tuple[list[Slot], int]]:
        """Groups of slots with the positions to cut them at; none if little room is unused."""
        tree = self._tree
        slots = list(tree.slots)
        count = len(slots) + needs.slots
        columns = max(needs.columns, *(self._ample.columns(slot.size) for slot in slots), 0)
        costs = costs or self.costs(needs.slots, columns)
        unused = count * (columns - costs.spare) - costs.waste * needs.computed
        if unused <= costs.plenty:  # sharing is not worth it, whatever they have in common
            return []
        families = families_of(slots)
        distinct = tree.slot_positions - sum(sum(common) for _, common in families)
        if unused <= costs.waste * distinct:
            return []
        parts = [
            part
            for family in families
            for part in common_parts(family, max(costs.collecting, costs.plenty))
        ]
        if parts:
            return parts
        long = [slot for slot in slots if slot.size >= columns - costs.step]
        few = len(needs.protected.intersection(long)) <= costs.outliers
        if few and 2 * len(long) <= len(slots) and columns > 2 * costs.step:
            return [([slot], slot.stop) for slot in long]
        return []

    def split(self, slots: Sequence[Slot], cut: int, protected: Iterable[Segment] = ()) -> bool:
        """Store the common positions of slots up to ``cut`` as a trunk; the rest of each slot
        stands on it.

        Args:
            slots: Slots with the same parent and start.
            cut: A position after the slots' first one, and within each slot.
            protected: Segments that must stay.

        Returns:
            ``False`` if the budget does not allow it; then nothing was done.
        """
        first = slots[0]
        context = first.context.first(cut)
        trunk = self._tree.at_end(first.version, context)
        if not isinstance(trunk, Trunk):
            needs = Needs(trunks=cut - first.start, protected={*protected, *slots})
            if not self._capacity.make(needs):
                return False
            trunk = self._collected(first, context)
        if longer := [
            slot for slot in slots if slot.stop > cut
        ]:  # the trunk has replaced the others
            self._move(longer, trunk)
        self._tree.touch(trunk)
        self.shorten(trunk, protected)
        return True

    def _collected(self, slot: Slot, context: Context) -> Trunk:
        """A kept trunk of the first positions of a slot."""
        trunk = self._tree.new_trunk(context, slot.version, slot.parent, slot.start)
        trunk.begins_like(slot.known_key, trunk.stop)
        try:
            self._table.do(NewTrunk(trunk))
            self._table.do(Copy(slot, (trunk,), trunk.size))
        except BaseException:
            self._tree.discard(trunk)
            raise
        self._tree.keep(trunk)
        return trunk

    def _move(self, slots: Sequence[Slot], trunk: Trunk) -> None:
        """Move the positions of slots beyond a trunk to the front, so that they stand on it."""
        columns = max(slot.stop for slot in slots) - trunk.stop
        try:
            self._table.do(Shift(tuple(slots), trunk.stop - slots[0].start, columns))
        except BaseException as error:  # with only some layers moved, the trunks are incomplete
            pinned = sum(slot.pinned for slot in slots)
            lost = {"slots": len(slots), "pinned": pinned, "reason": describe_error(error)}
            logger.warning("kv.lost", **lost)
            for slot in slots:
                self._tree.drop(slot)
            raise
        for slot in slots:
            self._tree.shorten(slot, trunk)

    def shorten(self, trunk: Trunk, protected: Iterable[Segment]) -> None:
        """Join trunks that only one context goes through, and keep the path short."""
        staying = {*protected}
        upper = trunk
        while (below := upper.parent) is not None:
            alone = below.children == {upper} and below.stop == upper.start and not below.pinned
            if alone and below.size <= 2 * upper.size:
                # Only trunks of similar size are joined, so that no position is copied more than
                # log(n) times.
                self._join(upper)
            else:
                upper = below
        while len(path := [trunk, *(below for below, _ in trunk.path())]) > self._ample.path:
            others = {
                upper: self._tree.above(below, but=upper)
                for upper, below in pairwise(path)
                if self._can_join(upper, below, staying)
            }
            free = [
                upper
                for upper, above in others.items()
                if not any(segment.pinned or segment in staying for segment in above)
            ]
            if not free:
                return
            chosen = min(free, key=lambda upper: len(others[upper]))
            for segment in others[chosen]:
                self._tree.drop(segment)
            self._join(chosen)

    def _can_join(self, upper: Trunk, below: Trunk, staying: set[Segment]) -> bool:
        """Whether the trunk below may lose its key and its positions beyond ``upper.start``."""
        return not below.pinned and (below not in staying or below.stop == upper.start)

    def _join(self, upper: Trunk) -> None:
        """Join a trunk with its parent, whose only child it is."""
        below = upper.parent
        assert below is not None
        self._table.do(Join(upper, below, upper.start - below.start))
        self._tree.lengthen(upper, below)
