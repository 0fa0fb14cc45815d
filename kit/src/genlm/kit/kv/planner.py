"""The planner: where sequences start, what is copied for them, and what is kept of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import sub
from typing import Any, Generic, TypeVar, cast

from genlm.core.errors import PluginError
from genlm.kit.kv.capacity import Capacity, Needs
from genlm.kit.kv.commands import Blank, Copy, Fork, NewTrunk, Table
from genlm.kit.kv.history import noted
from genlm.kit.kv.placement import Placement, nested
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import BatchCost, SharingCosts, best_cut
from genlm.kit.kv.tree import Tree
from genlm.kit.kv.trunks import Trunks
from genlm.kit.segments import Segment, Slot, Trunk

A = TypeVar("A", bound=TokenSequence)

#: The costs for a batch, and how many positions of each trunk it would copy.
Weighed = tuple[SharingCosts, Counter[Trunk]]


class Planner(Generic[A]):
    """Keeps the state of contexts in a tree of segments, within a budget. The least recently used
    state is evicted first.

    The planner decides where each sequence starts, in which segments it runs, which sequences of a
    batch wait for another one, and what is copied, shared, pinned and evicted. The engine decides
    which sequences are computed now, and how many tokens one forward has. The table moves the
    bytes.

    A sequence starts from the kept context that shares the longest prefix with it. If it extends
    that context, or ends within its slot, it runs in the same slot, and nothing is copied.
    Otherwise it is a fork: a long common prefix is stored once, as a shared prefix (a
    :class:`~genlm.kit.segments.Trunk`), and a short one is copied to a new slot. A slot's state is
    valid up to its key. Positions beyond the key are never read, so a failed batch leaves the tree
    correct.

    If a sequence of a batch is a prefix of another one, it is *inside* the longer one: its rows
    come from the longer one's forward.

    For each of the :meth:`batches`, the engine computes the batch, answers with the rows that the
    placements name (:meth:`~genlm.kit.kv.placement.Placement.rows`), and commits the sequences that
    it has computed. State that is not committed is given up.

    Args:
        table: Carries out commands.
        costs: The numbers for decisions on sharing.
        shares: Whether prefixes may be shared; otherwise every context has a slot of its own.

    Attributes:
        tree: The kept segments.
    """

    def __init__(
        self, table: Table, costs: SharingCosts | None = None, shares: bool = True
    ) -> None:
        self._table = table = noted(table)
        self._costs = costs or SharingCosts()
        self._shares = shares
        self.tree = Tree()
        self._capacity = Capacity(self.tree, table, self._costs)
        self._trunks = Trunks(self.tree, self._capacity, table, self._costs)
        self._running: list[Placement[A]] = []  # the batch that is neither committed nor given up

    # --- what is known ----------------------------------------------------------------------------

    def fits(self, length: int) -> bool:
        """Whether a context of this length can be kept besides the pinned ones."""
        if self._shares and length >= self._costs.trunk:
            return self._capacity.has(Needs(trunks=length))
        return self._capacity.has(Needs(slots=1, columns=self._costs.columns(length)))

    def known(self, sequence: TokenSequence) -> int:
        """How many leading tokens of a sequence need not be computed."""
        return min(self.tree.start_of(sequence)[1], sequence.latest_start)

    def batch_cost(self) -> BatchCost[Any]:
        """The most that further sequences would cost in a batch. What several new sequences would
        save together is not counted."""
        return BatchCost(self._costs.waiting, nests=True)

    # --- batches ----------------------------------------------------------------------------------

    def batches(self, sequences: Sequence[A]) -> Iterator[list[Placement[A]]]:
        """Place distinct sequences, each of which :meth:`fits`, batch by batch. Compute and
        :meth:`commit` each batch before the next one.

        Raises:
            PluginError: a sequence does not fit.
            Exception: an error of the table. The current batch is not placed then.
        """
        left: Sequence[int] = range(len(sequences))
        while left and (batch := self.place(sequences, left)):
            placed = {index for placement in batch for index in placement.indices()}
            left = [at for at in left if at not in placed]
            yield batch
        if left:
            raise PluginError(
                f"a context of {sequences[left[0]].length} tokens does not fit into the table; let "
                "its limit(used) be at least used, or look at fits(length) first"
            )

    def place(
        self, sequences: Sequence[A], indices: Sequence[int] | None = None
    ) -> list[Placement[A]]:
        """Place as many of some distinct sequences as fit together: at least one, if each
        :meth:`fits`. Sequences that are inside a placed one, or should wait for it, are left out.

        Args:
            sequences: All sequences.
            indices: The indices of the sequences to place; ``None`` means all.

        Raises:
            Exception: an error of the table. Nothing is placed then.
        """
        self.abandon()
        located = self._located(sequences, range(len(sequences)) if indices is None else indices)
        batch, cuts = self._leaders(located)
        self._plan(batch, cuts)

        def again(some: Sequence[Placement[A]]) -> list[Placement[A]]:
            planned = self._located(sequences, [placement.index for placement in some])
            for new, old in zip(planned, some, strict=True):
                if old.inside:
                    new.inside = [other for other in old.inside if new.computes(other)]
            self._plan(planned, cuts)
            return planned

        needs = self._needs(batch)
        while self._shares and self._trunks.share_forked(batch, needs):
            batch = again(batch)
            needs = self._needs(batch)
        while batch:
            if self._shares and self._trunks.share_common(needs):
                batch = again(batch)
                needs = self._needs(batch)
            if self._begin(batch, needs):
                return batch
            if len(batch) == 1:  # even its own source does not fit beside it, so start from nothing
                alone = Placement(batch[0].index, batch[0].sequence)
                alone.inside = batch[0].inside
                if (found := batch[0].found) is not None and found.pinned:
                    alone.kept = batch[0].kept  # a pinned segment stays where it is
                if self._shares and alone.sequence.length >= self._costs.trunk:
                    alone.cut = alone.sequence.length
                return [alone] if self._begin([alone], self._needs([alone])) else []
            batch = again(batch[: len(batch) // 2])
            needs = self._needs(batch)
        return []

    def commit(self, computed: Sequence[Placement[A]]) -> None:
        """Keep the state of these sequences of the batch. The others are given up.

        Raises:
            Exception: an error of the table, while shared prefixes were merged. The sequences are
                committed nevertheless.
        """
        wanted = set(computed)
        self._give_up([placement for placement in self._running if placement not in wanted])
        computed = [placement for placement in self._running if placement in wanted]
        self._running = []
        # Remove all old keys first, because the new key of one may be the old key of another.
        for placement in computed:
            if placement.kept and placement.continued and placement.slot is not None:
                self.tree.rename(placement.slot, placement.sequence.tokens)
        for placement in computed:
            if placement.kept:
                for segment in placement.own:
                    self.tree.keep(segment)
            elif not placement.continued:
                for segment in reversed(placement.own):
                    self.tree.discard(segment)
        self._shorten(computed)  # last, because this drops kept state, and may fail

    def _shorten(self, computed: Sequence[Placement[A]]) -> None:
        """Keep the paths below new trunks short; the segments in which sequences end stay."""
        made = [each.trunk for each in computed if each.kept and each.trunk is not None]
        if not made:
            return
        ends = [each.end if each.kept else each.found for each in computed]
        staying = [end for end in ends if end is not None]
        for own in made:
            trunk = self.tree.at_end(own.version, own.context)
            if isinstance(trunk, Trunk):
                self._trunks.shorten(trunk, staying)

    def abandon(self) -> None:
        """Give up the batch that is not committed, if there is one. Any later call of the planner
        does this too."""
        batch, self._running = self._running, []
        self._give_up(batch)

    def _give_up(self, batch: Sequence[Placement[A]]) -> None:
        """Free new segments, and overwrite what was written into slots with zeros: it may be NaN,
        and masked columns still take part in products."""
        for placement in batch:
            if placement.slot is not None and not placement.continued:
                self.tree.discard(placement.slot)
            elif placement.slot is not None:
                self.tree.cut(placement.slot, placement.start)
            if placement.trunk is not None:
                self.tree.discard(placement.trunk)
        try:
            for placement in batch:
                if (slot := placement.slot) is not None:
                    self._table.do(Blank(slot, max(placement.start - slot.start, 0)))
        except Exception as error:  # after this, no slot can be shared
            self._running = []
            self._capacity.lose(error)

    # --- what stays and what goes -----------------------------------------------------------------

    def pin(self, sequence: TokenSequence) -> bool:
        """Keep a committed sequence's state until :meth:`clear`; ``False`` if there is none."""
        self.abandon()
        found, shared = self.tree.nearest(sequence.key)
        if found is None or shared < sequence.length:
            return False
        while found.parent is not None and found.start >= sequence.length:
            found = found.parent
        if (
            self._shares
            and isinstance(found, Slot)
            and sequence.length - found.start >= self._costs.step
        ):
            self._trunks.split([found], sequence.length)
            found = self.tree.at_end(sequence.version, sequence.tokens) or found
        self.tree.pin(found)
        return True

    def clear(self) -> None:
        """Drop everything and release the memory."""
        self._running = []
        self._capacity.clear()

    def drop_unpinned(self) -> None:
        """Drop all but the pinned contexts and release the memory."""
        self.abandon()
        staying = self.tree.pinned()
        for segment in list(self.tree.kept):
            if segment not in staying:
                self.tree.drop(segment)
        self._capacity.trim()

    def drop_adapter(self, version: int) -> None:
        """Drop the state computed with a version of an adapter, pinned or not."""
        self.abandon()
        for segment in list(self.tree.kept):
            if segment.version == version:
                self.tree.drop(segment)

    # --- planning ---------------------------------------------------------------------------------

    def _located(self, sequences: Sequence[A], indices: Iterable[int]) -> list[Placement[A]]:
        """Placements of some of the sequences, with only the segment that each starts from."""
        return [Placement(at, sequences[at], *self.tree.start_of(sequences[at])) for at in indices]

    def _leaders(
        self, batch: list[Placement[A]]
    ) -> tuple[list[Placement[A]], dict[int, list[int]]]:
        """The sequences to compute now. The other sequences are inside one of these, or wait for
        one that computes much of their prefix. In addition, by the index of a sequence that others
        wait for: how many leading tokens each of them shares with it."""
        new = [placement.new_tokens for placement in batch]
        if max(new, default=0) > 1:
            batch = nested(batch)
            new = [placement.new_tokens for placement in batch]
        scored = any(
            placement.sequence.keep > 1 for placement in batch
        )  # these sequences are compared in any case
        each = min(self._costs.each, 2) if scored else self._costs.each
        if sum(new) - max(new, default=0) < self._costs.waiting or max(new) < each:
            return batch, {}  # no sequence would wait for one of these
        followers: dict[int, list[tuple[Placement[A], int]]] = {}
        cost: BatchCost[int] = BatchCost(each)
        # The longest sequence comes first, because others may be inside it.
        for placement in sorted(batch, key=lambda placement: -placement.sequence.length):
            leader, common = cost.leader(placement.sequence, placement.start)
            if leader is None:
                cost.add(placement.sequence, placement.start, placement.index)
            else:
                followers.setdefault(leader, []).append((placement, common))
        waiting = {
            leader: some
            for leader, some in followers.items()
            if sum(common - follower.start for follower, common in some) >= self._costs.waiting
        }
        wait = {follower for some in waiting.values() for follower, _ in some}
        cuts = {leader: [common for _, common in some] for leader, some in waiting.items()}
        return [placement for placement in batch if placement not in wait], cuts

    def _plan(self, batch: Sequence[Placement[A]], cuts: dict[int, list[int]]) -> None:
        """Decide where each sequence runs: in an existing slot, on a trunk, or in a new slot with a
        copy."""
        taken: set[Segment] = set()
        weighed = self._weighed(batch, sum(map(len, cuts.values())))
        for placement in batch:
            found = placement.found
            if isinstance(found, Slot) and found not in taken and placement.start >= found.start:
                extends = placement.shared == found.stop and not found.pinned
                if extends or not placement.kept:
                    placement.slot, placement.continued = found, True
                    placement.base = placement.cut = found.start
                    taken.add(found)
                    continue
            self._plan_new(placement, weighed, cuts.get(placement.index, ()))
        if self._shares:
            self._set_apart(batch, weighed)

    def _plan_new(self, placement: Placement[A], weighed: Weighed, cuts: Sequence[int]) -> None:
        """Place a sequence that continues no existing slot."""
        below, (costs, saved) = placement.below(), weighed
        if isinstance(below, Trunk) and costs.a_product(below, placement.start, saved[below]):
            placement.parent, placement.base = below, placement.start
        elif below is not None:
            placement.parent, placement.base, placement.source = below.parent, below.start, below
        self._with_trunk(placement, costs, cuts)

    def _weighed(self, batch: Sequence[Placement[A]], waiting: int) -> Weighed:
        """The numbers for decisions on sharing in a batch for which this many sequences wait."""
        saved: Counter[Trunk] = Counter()
        if not self._costs.plenty:  # as if memory were always plentiful
            return self._costs, saved
        for placement in batch:
            if isinstance(below := placement.below(), Trunk):
                saved[below] += placement.start - below.start
        longest = max([placement.sequence.length for placement in batch], default=0)
        return self._trunks.costs(len(batch) + waiting, longest), saved

    def _with_trunk(
        self, placement: Placement[A], costs: SharingCosts, cuts: Sequence[int]
    ) -> None:
        """Give a new context its own trunk up to where others will fork."""
        placement.cut = placement.base
        if cuts and self._shares and placement.kept:
            cut, saved = best_cut(cuts, placement.base)
            if cut - placement.base >= costs.trunk and saved >= costs.plenty:
                placement.cut = cut

    def _set_apart(self, batch: Sequence[Placement[A]], weighed: Weighed) -> None:
        """Give contexts that are new, or grow by many tokens, trunks of their own if they would
        make all slots longer."""
        step = self._costs.step
        grows = [
            placement
            for placement in batch
            if (placement.new_tokens > step if placement.continued else placement.needs_slot)
        ]
        if not grows:
            return
        sizes = [placement.sequence.length - placement.cut for placement in grows]
        slots = {placement.slot for placement in grows if placement.slot is not None}
        new = [*zip(sizes, grows, strict=True)]
        for owner in self._trunks.too_long(self._costs.columns(max(sizes)), new, slots):
            if isinstance(owner, Placement) and owner.kept:
                if owner.continued:
                    owner.slot, owner.continued = None, False
                    self._plan_new(owner, weighed, ())
                owner.cut = owner.sequence.length

    def _needs(self, batch: Sequence[Placement[A]]) -> Needs:
        new = [placement for placement in batch if not placement.continued]
        used = {placement.found for placement in batch}
        used.update(
            segment for placement in new for segment in (placement.parent, placement.source)
        )
        used.discard(None)
        lengths = [placement.sequence.length for placement in batch]
        cuts = [placement.cut for placement in batch]
        starts = [placement.start for placement in batch]
        return Needs(
            slots=sum(placement.needs_slot for placement in new),
            columns=self._costs.columns(max(map(sub, lengths, cuts), default=0)),
            computed=sum(lengths) - sum(map(max, starts, cuts)),
            trunks=sum(placement.cut - placement.base for placement in new),
            protected=cast("set[Segment]", used),
        )

    # --- carrying out -----------------------------------------------------------------------------

    def _begin(self, batch: Sequence[Placement[A]], needs: Needs) -> bool:
        """Make room for a batch, take segments, and copy known positions to them; ``False`` if it
        does not fit."""
        if not self._capacity.make(needs):
            return False
        self._running = list(batch)
        self.tree.touch(*[each.found for each in batch if each.found is not None])
        new = [placement for placement in batch if not placement.continued]
        for placement in new:
            self._enter(placement)
        try:
            for placement in new:
                if placement.trunk is not None:
                    self._table.do(NewTrunk(placement.trunk))
            self._copy(new)
        except BaseException:
            self._running = new  # nothing was written into the other slots
            self.abandon()
            raise
        return True

    def _enter(self, placement: Placement[A]) -> None:
        """The new segments of a placement."""
        sequence, parent, base = placement.sequence, placement.parent, placement.base
        if placement.cut > base:
            context = sequence.tokens.first(placement.cut)
            placement.trunk = parent = self.tree.new_trunk(context, sequence.version, parent, base)
            base = placement.cut
        if placement.needs_slot:
            placement.slot = self.tree.new_slot(sequence, parent, base)
        like, length = sequence.known_key, sequence.length
        if not like and placement.found is not None:
            like, length = placement.found.known_key, placement.shared
        for segment in placement.own if like else ():
            segment.begins_like(like, length)

    def _copy(self, batch: Sequence[Placement[A]]) -> None:
        """Copy known positions to new segments: the forks of slots together, and those of a
        trunk."""
        forks: list[tuple[Slot, Slot, int]] = []
        leaving: defaultdict[Segment, list[tuple[Slot, int]]] = defaultdict(list)
        for placement in batch:
            size, source = placement.start - placement.base, placement.source
            target = placement.trunk or placement.slot
            if source is None or target is None or not size:
                continue
            if isinstance(target, Trunk):
                self._table.do(Copy(source, (target,), size))
            elif isinstance(source, Slot):
                forks.append((source, target, size))
            else:
                leaving[source].append((target, size))
        for trunk, slots in leaving.items():
            targets, sizes = zip(*slots, strict=True)
            self._table.do(Copy(trunk, targets, max(sizes)))
        if forks:
            sources, targets, sizes = zip(*forks, strict=True)
            self._table.do(Fork(sources, targets, max(sizes)))
