"""What is worth sharing: which positions are kept once, as a trunk, and which are copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from attrs import define

from genlm.core.engines.prefixes import shared_length
from genlm.core.engines.segments import Row, Trunk

#: Columns are allotted in steps of this many.
COLUMN_STEP = 32

#: Forks share their parent's state as a trunk if it saves this many positions, counted once for
#: each fork. Fewer are copied: another trunk is another product in every layer of every forward,
#: which costs as much as attention over this many positions in rows.
WORTH_SHARING = 1024

#: One more context shares the beginning of a trunk if that has at least this many positions: it
#: costs a product of its own.
WORTH_A_PRODUCT = 2 * COLUMN_STEP

#: A new context with at least this many positions of its own gets a trunk of its own: rows are all
#: as long as the longest.
WORTH_A_TRUNK = 512

#: Rows may take this many times the positions that they hold; then the longest becomes a trunk.
MOST_WASTE = 1.25

#: Each row may take this many positions besides.
SPARE_COLUMNS = 48

#: What rows have in common becomes a trunk, to save memory, if it has at least this many positions.
WORTH_COLLECTING = 64

#: The most rows that become trunks because they are longer than the others: each costs a product.
MOST_OUTLIERS = 4

#: The most trunks below a context, as a rule: each costs a product in every layer.
MOST_TRUNKS = 6


@define(eq=False)
class Family:
    """Rows that stand side by side on the same trunk, in the order of their keys.

    Attributes:
        rows: The rows.
        common: How many of their first positions two neighbours have in common.
    """

    rows: list[Row]
    common: list[int]

    @property
    def copies(self) -> int:
        """How many positions are copies of others."""
        return sum(self.common)

    def best(self) -> tuple[int, list[Row], int]:
        """The part of some rows that is worth most as a trunk: how many copies it saves, the rows,
        and the position where it stops."""
        saved, first, last, size = 0, 0, 0, 0
        rising: list[tuple[int, int]] = []  # the first row, and what has been common since then
        for at, common in enumerate([*self.common, 0]):
            since = at
            while rising and rising[-1][1] >= common:
                since, height = rising.pop()
                if height * (at - since) > saved:
                    saved, first, last, size = height * (at - since), since, at, height
            rising.append((since, common))
        return saved, self.rows[first : last + 1], self.rows[0].start + size


def common_parts(rows: Iterable[Row]) -> list[Family]:
    """What rows have in common beyond the trunks that they stand on."""
    families: dict[tuple[Trunk | None, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        families.setdefault((row.parent, row.start), []).append(row)
    return [
        Family(
            family,
            [max(shared_length(one.key, other.key) - start, 0) for one, other in pairwise(family)],
        )
        for (_, start), family in families.items()
    ]


Owner = TypeVar("Owner")


def is_worth_a_product(trunk: Trunk, start: int) -> bool:
    """Whether a context that leaves a trunk at ``start`` should stand on it."""
    with_others = start == trunk.stop and len(trunk.children) > 0
    return with_others or start - trunk.start >= WORTH_A_PRODUCT


def best_cut(cuts: Sequence[int], start: int) -> tuple[int, int]:
    """Where to cut a row that is forked at ``cuts``, so that the most positions are not copied, and
    how many these are."""
    ordered = sorted(cuts, reverse=True)
    return max(
        ((cut, (cut - start) * count) for count, cut in enumerate(ordered, 1)),
        key=lambda one: one[1],
    )


def outliers_of(tails: Sequence[tuple[int, Owner]]) -> list[Owner]:
    """The few long ones without which rows would not be much longer than what is in them."""
    tails = sorted(tails, key=lambda one: one[0], reverse=True)
    total = sum(size for size, _ in tails)
    outliers: list[Owner] = []
    for at, (size, owner) in enumerate(tails[: MOST_OUTLIERS + 1]):
        count = len(tails) - at
        if size <= 2 * COLUMN_STEP or columns_of(size) * count <= MOST_WASTE * total + 32 * count:
            return outliers
        outliers.append(owner)
        total -= size
    return []


def columns_of(length: int) -> int:
    """How many columns are allotted for ``length`` positions."""
    return -(-length // COLUMN_STEP) * COLUMN_STEP
