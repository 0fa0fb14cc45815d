"""Blocks of sequences, for caches that the planner's table cannot hold: recurrent states, and
attention that mlx-lm computes in another way. Shared prefixes are computed once, and known ones are
not computed again."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

from attrs import frozen

import mlx.core as mx
from genlm.core import Query
from genlm.kit.kv import Placement, TokenSequence
from genlm.kit.kv.placement import nested
from genlm.kit.prefixes import PrefixIndex, common_length
from genlm.mlx.block import Block, Target
from genlm.mlx.cache_limit import CacheLimit
from genlm.mlx.runner import Cache, Key, Runner, in_order, key_of

#: The number of tokens that is worth a forward pass of its own. So it is the least length of a
#: shared prefix that is computed first, of a saving for which a longer sequence is trimmed and
#: used, and of the distance at which state that cannot be trimmed is kept while a context grows
#: token by token.
MIN_SHARED_TOKENS = 16

#: Up to this many tokens before those whose logits are read are computed together with them. If
#: there are more, they are computed first, without their logits.
MAX_TOKENS_BEFORE_READ = 64

#: If at least this share of a block stays when sequences leave it, the block is not changed,
#: because a copy costs more than the unused room.
MIN_STAYING_SHARE = 1 / 4

#: Sequences with at most this many padded positions are always evaluated together.
MAX_PADDING_TOKENS = 4096


@frozen(eq=False)
class Place:
    """The place of a sequence's state: its block, and its index in the block."""

    block: Block
    number: int

    @property
    def key(self) -> Key:
        return self.block.keys[self.number]


class Blocks:
    """Evaluates contexts, each from the longest prefix of it that a kept sequence holds.

    A sequence that is extended moves to a new block, where its tokens can still be found as a
    prefix. It leaves unused room in the old block, until that is dropped or has little else left.
    Some states cannot be trimmed once they have grown (recurrent states, and windows that wrap). Of
    these, some stay in the old block: those that a context extends by several tokens, since the
    next context may leave the new ones; and, of those that grow token by token, one every
    ``MIN_SHARED_TOKENS`` tokens.

    Args:
        runner: The model.
        max_bytes: The most bytes to keep besides pinned sequences and those of the last call; the
            least recently used blocks are dropped first. For ``None`` see
            :class:`~genlm.mlx.cache_limit.CacheLimit`.
        ragged: Whether sequences of unequal length can be fed together.
    """

    def __init__(self, runner: Runner, max_bytes: int | None, ragged: bool = True) -> None:
        self._runner = runner
        self._cache_limit = CacheLimit(max_bytes)
        self._ragged = ragged
        self._blocks: list[Block] = []
        self._index: PrefixIndex[Key, Place] = PrefixIndex()
        self._tick = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return _nbytes(self._blocks)

    def logits(self, queries: Sequence[Query]) -> mx.array:
        """The logits of the next token of each of the distinct ``queries``, ``[len(queries),
        vocab_size]`` float32."""
        return in_order([*self.results([TokenSequence(q.context, q.adapter) for q in queries])])

    def results(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[list[int], mx.array]]:
        """The wanted rows of distinct sequences, as they are computed. Yields the sequence of each
        row, and logits, ``[n, vocab_size]`` float32. The rows of one sequence come in order."""
        self._tick += 1
        placed = list[Placement[TokenSequence]]()
        for at, sequence in enumerate(sequences):
            key = (sequence.version, *sequence.tokens)
            if sequence.keep == 1 and key in self._index:
                yield [at], self._recalled(self._index[key])[None]
            else:
                known = max(1, self._source(key, 1 + sequence.latest_start)[1]) - 1
                placed.append(Placement(at, sequence, None, known))
        targets = [_target(one) for one in nested(placed)]
        for some in self._rounds(targets):
            for owners, rows in self._advance(some):
                asked = [at for at, owner in enumerate(owners) if owner >= 0]
                if len(asked) < len(owners):
                    rows = rows[mx.array(asked, mx.int32)] if asked else rows[:0]
                yield [owners[at] for at in asked], rows
        self._evict()

    def known(self, query: Query) -> int:
        """How many tokens of a context are known."""
        key = key_of(query)
        return query.length if key in self._index else max(1, self._source(key, -1)[1]) - 1

    def branch(self, query: Query) -> tuple[Cache, int]:
        """A cache outside the store that holds the known prefix of a context without its last
        token, and the length of this prefix."""
        place, reused = self._source(key_of(query), -1)
        if place is None:
            return self._runner.empty_cache(), 0
        place.block.used = self._tick
        if reused < len(place.key):
            branch = place.block.trimmed(place.number, reused - 1)
        else:
            branch = place.block.copied([place.number])
            branch.settle()
        return branch.cache, reused - 1

    def pin(self, query: Query) -> bool:
        """Compute a context if necessary, and keep it until it is dropped; ``False`` if its row is
        NaN, so that its state is not kept."""
        key, is_nan = key_of(query), False
        if key not in self._index:
            is_nan = bool(mx.isnan(self.logits([query])[0, 0]))
        place = self._index.get(key)
        if place is not None and not place.block.pinned:
            pinned, *_ = self._replace(
                place.block, [[place.number], sorted(place.block.living - {place.number})]
            )
            pinned.pinned = True
        return not is_nan

    def drop(self, version: int) -> None:
        """Drop every sequence of an adapter."""
        for block in [
            block for block in self._blocks if any(key[0] == version for key in block.keys)
        ]:
            others = [at for at in sorted(block.living) if block.keys[at][0] != version]
            self._replace(block, [others])

    def clear(self) -> None:
        """Drop all sequences."""
        self._blocks.clear()
        self._index = PrefixIndex()
        self._cache_limit.clear()

    def close(self) -> None:
        """Drop all sequences."""
        self.clear()

    # --- the course of a call ---------------------------------------------------------------------

    def _rounds(self, targets: Sequence[Target]) -> Iterator[Sequence[Target]]:
        """The targets in rounds. The long prefixes that several of them share come first, shorter
        prefixes before longer ones."""
        asked = {target.key: target for target in targets}
        left = self._branches(targets)
        while left:
            first, longer = list[Key](), list[Key]()
            for prefix in left:  # sorted, so that prefixes follow the prefix that they begin with
                begins = first and prefix[: len(first[-1])] == first[-1]
                (longer if begins else first).append(prefix)
            yield [asked.pop(prefix) if prefix in asked else Target.of(prefix) for prefix in first]
            left = longer
        yield list(asked.values())

    def _branches(self, targets: Sequence[Target]) -> list[Key]:
        """The prefixes that are worth their own pass, sorted."""
        # The first element of a key is the adapter's version and no token.
        known = {one.key: max(1, self._source(one.key, one.first)[1]) for one in targets}
        found = {*self._shared(targets, known), *_begun(targets, known)}
        return sorted(prefix for prefix in found if prefix not in self._index)

    def _shared(self, targets: Sequence[Target], known: Mapping[Key, int]) -> list[Key]:
        """The prefixes that two or more keys lack, and the prefixes at which a key leaves a known
        context, since other keys may leave it there too."""
        left = [one for one in targets if one.first + 1 - known[one.key] >= MIN_SHARED_TOKENS]
        left.sort(key=attrgetter("key"))
        shared = {
            a.key[:size]
            for a, b in itertools.pairwise(left)
            if (size := _common(a, b)) > max(known[a.key], known[b.key])
        }
        for one in left:
            near = min(self._index.nearest(one.key)[1], one.first)
            if known[one.key] < near:
                shared.add(one.key[:near])
        worthwhile: list[Key] = []
        for prefix in sorted(shared):
            below = common_length(prefix, worthwhile[-1]) if worthwhile else 0
            if len(prefix) - max(below, self._source(prefix, -1)[1]) >= MIN_SHARED_TOKENS:
                worthwhile.append(prefix)
        return worthwhile

    def _advance(self, targets: Sequence[Target]) -> Iterator[tuple[list[int], mx.array]]:
        """Compute targets, and make them part of the store. Yields the sequence that wants each row
        on the way, and the logits."""
        waiting: dict[tuple[int, int], list[Block]] = defaultdict(list)
        started = self._started(targets)
        count = sum(len(tokens) for block in started for tokens in block.missing)
        ahead = count > MAX_TOKENS_BEFORE_READ
        for block in started:
            parts: dict[tuple[int, int], list[int]] = defaultdict(list)
            for at, (target, tokens) in enumerate(zip(block.targets, block.missing, strict=True)):
                first = len(tokens) if ahead else 0
                more = len(target.key) - len(block.keys[at]) - first
                parts[self._width_class(first), self._width_class(more - 1)].append(at)
            for widths, part in zip(parts, block.split([*parts.values()]), strict=True):
                waiting[widths].append(part)
        fed: dict[int, list[Block]] = defaultdict(list)
        for (_, width), blocks in waiting.items():
            for block in _packed(blocks):
                if ahead and any(missing := block.missing):
                    block.feed(self._runner, missing)
                fed[width].append(block)
        for blocks in fed.values():
            for block in _packed(blocks):
                result = block.finish(self._runner)
                self._keep(block)
                yield result

    def _width_class(self, width: int) -> int:
        """The class of a number of new tokens. Sequences of one class are fed together; at most
        about half of their tokens are padding."""
        return ((width + 7) // 8).bit_length() if self._ragged else width

    # --- where contexts start ---------------------------------------------------------------------

    def _source(self, key: Key, most: int) -> tuple[Place | None, int]:
        """The sequence from which ``key[:most]`` can start, and how many of its elements can be
        used."""
        key = key[:most]
        prefix = self._index.longest_prefix(key)
        whole = len(prefix) if prefix else 0
        near, common = self._index.nearest(key)
        if near and common >= whole + MIN_SHARED_TOKENS and self._index[near].block.trimmable:
            return self._index[near], common
        return (self._index[prefix], whole) if prefix else (None, 0)

    def _started(self, targets: Sequence[Target]) -> list[Block]:
        """Blocks that hold a known prefix of every target, which may be empty."""
        extended: dict[Block, list[tuple[int, Target]]] = defaultdict(list)
        started, fresh = [], []
        for one in targets:
            place, reused = self._source(one.key, one.first)
            if place is None:
                fresh.append(one)
            elif reused < len(place.key):
                self._touch(place.block)
                started.append(place.block.trimmed(place.number, reused - 1).towards([one]))
            else:
                extended[place.block].append((place.number, one))
        for block, items in extended.items():
            # The sort is stable, so keys that extend the same sequence stay in the order asked.
            numbers, some = zip(*sorted(items, key=itemgetter(0)), strict=True)
            stays = any(len(one.key) > len(block.keys[number]) + 1 for number, one in items)
            started.append(self._moved_on(block, numbers, stays, needed=extended).towards(some))
        if fresh:
            versions = [one.key[0] for one in fresh]
            started.append(Block.empty(self._runner, versions).towards(fresh))
        return started

    def _moved_on(
        self, block: Block, numbers: Sequence[int], stays: bool, needed: Collection[Block]
    ) -> Block:
        """Take the sequences that are extended out of their block, and leave the others in it.

        Args:
            block: The block.
            numbers: The indices of the extended sequences in the block.
            stays: Whether the extended sequences also stay in the old block if their state cannot
                be trimmed.
            needed: Blocks that are used in this call.
        """
        far = max(block.since)
        if block.pinned or ((stays or far >= MIN_SHARED_TOKENS) and not block.stays_trimmable):
            self._touch(block)
            if far == MIN_SHARED_TOKENS and not stays and not block.pinned:
                # The block has grown by single tokens, and probably no context returns to it, so it
                # is evicted first.
                block.used = 0
            moved = block.copied(numbers)
            moved.since = [0] * len(numbers)
            return moved
        staying = sorted(block.living.difference(numbers))
        if len(staying) >= MIN_STAYING_SHARE * len(block.keys):
            for number in block.living.intersection(numbers):
                self._index.remove(block.keys[number])
            block.living = set(staying)
            self._evict(needed, left=block)
            return block.copied(numbers) if block in self._blocks else block.split([numbers])[0]
        self._forget(block)
        moved, *left = block.split([numbers, staying] if staying else [numbers])
        for rest in left:
            self._keep(rest)
            rest.used = block.used
        return moved

    # --- keeping ----------------------------------------------------------------------------------

    def _keep(self, block: Block) -> None:
        broken = mx.isnan(block.logits[:, 0]).tolist()  # state with NaN makes all later rows NaN
        block.used = self._tick
        block.living = {
            number
            for number, (key, bad) in enumerate(zip(block.keys, broken, strict=True))
            if not bad and key not in self._index  # a score may end where a context does
        }
        if block.living:
            self._blocks.append(block)
        for number in sorted(block.living):
            self._index.add(block.keys[number], Place(block, number))

    def _forget(self, block: Block) -> None:
        self._blocks.remove(block)
        for number in block.living:
            self._index.remove(block.keys[number])

    def _replace(self, block: Block, parts: Sequence[Sequence[int]]) -> list[Block]:
        """Split a block of the store; empty parts give no block."""
        self._forget(block)
        blocks = block.split([part for part in parts if part])
        for split in blocks:
            self._keep(split)
            split.used, split.pinned = block.used, block.pinned
        return blocks

    def _touch(self, block: Block) -> None:
        """Note that contexts start from a block. It is then evicted later than unused blocks, but
        earlier than blocks of this call."""
        block.used = max(block.used, self._tick - 1)

    def _recalled(self, place: Place) -> mx.array:
        place.block.used = self._tick
        return place.block.logits[place.number]

    def _evict(self, needed: Collection[Block] = (), left: Block | None = None) -> None:
        """Forget the least recently used blocks beyond the limit.

        Args:
            needed: Blocks whose sequences this call still takes.
            left: A block of ``needed`` that may be evicted once its sequences are copied.
        """
        in_hand = [
            block
            for block in self._blocks
            if block.used == self._tick or block.pinned or block in needed
        ]
        others = [block for block in self._blocks if block is left or block not in in_hand]
        excess = _nbytes(others) - self._cache_limit.limit(_nbytes(in_hand))
        for block in sorted(others, key=attrgetter("used")):
            if excess > 0:
                excess -= block.nbytes
                self._forget(block)


def _nbytes(blocks: Iterable[Block]) -> int:
    return sum(block.nbytes for block in blocks)


def _target(placement: Placement[TokenSequence]) -> Target:
    """A sequence as a target, with the rows on the way that shorter sequences want."""
    sequence = placement.sequence
    key = (sequence.version, *sequence.tokens)
    return Target(key, [(owner, 1 + at) for owner, at in placement.rows()])


def _begun(targets: Sequence[Target], known: Mapping[Key, int]) -> list[Key]:
    """The prefixes before the first row of targets with several rows, if all of them together are
    worth a forward pass. They are kept, since other tokens may follow next time. A prefix that
    extends another one has a pass of its own, after the other."""
    several = [one for one in targets if len(one.rows) > 1]
    least = MIN_SHARED_TOKENS / max(len(several), 1)  # the least number of each target
    chosen, chain = list[Key](), list[Key]()
    for prefix in sorted(
        {one.key[: one.first] for one in several if one.first - known[one.key] >= least}
    ):
        while chain and prefix[: len(chain[-1])] != chain[-1]:
            chain.pop()
        if not chain or len(prefix) - len(chain[-1]) >= MIN_SHARED_TOKENS:
            chosen.append(prefix)
            chain.append(prefix)
    return chosen


def _common(one: Target, other: Target) -> int:
    """The length of the longest beginning from which both targets may start, where ``one`` sorts
    before ``other``. It may also be all of ``one``."""
    shared = common_length(one.key, other.key)
    latest = shared if shared == len(one.key) else one.first
    return min(shared, latest, other.first)


def _packed(blocks: Sequence[Block]) -> list[Block]:
    """Join blocks, the longest first, as long as padding is not more than half of the result."""
    packed: list[list[Block]] = []
    for block in sorted(blocks, key=lambda block: -block.length):
        if packed and _dense([*packed[-1], block]):
            packed[-1].append(block)
        else:
            packed.append([block])
    return [first.joined(others) for first, *others in packed]


def _dense(blocks: Sequence[Block]) -> bool:
    lengths = [len(key) for block in blocks for key in block.keys]
    padding = max(lengths) * len(lengths) - sum(lengths)
    return padding <= max(MAX_PADDING_TOKENS, sum(lengths))
