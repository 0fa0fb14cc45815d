"""In which order the words of all groups are combined, pair by pair."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.trie.groups import Groups
from genlm.core.trie.words import Ints

# A round of fewer pairs takes as long as a round of none: all that is left then is combined at
# once.
_FEWEST_PAIRS = 100


@frozen(eq=False)
class Pairs:
    """The values that one round combines.

    Attributes:
        new: ``[pairs]`` One value of each pair, made in the round before (in the first round, a
            word).
        other: ``[pairs]`` The other one, made in any round before.
    """

    new: Ints
    other: Ints


class Pairing:
    """Combines the words of each group two by two, in rounds, in all groups at once.

    A group that is left with a single value is done, and passes it on to the group above. Values
    are numbered: the words by position, then the results in the order made.

    Attributes:
        rounds: What is combined, one round after the other.
        result: ``[groups]`` The value that a group ends with; -1 while it is not done.
    """

    def __init__(self, order: Ints, groups: Groups) -> None:
        self.groups = groups
        self.rounds: list[Pairs] = []
        self.result = np.full(len(groups), -1)
        self._made = len(order)
        self._awaited = self._count(groups.above)  # groups below each that are not done
        grouped = groups.of_word >= 0
        # What can be combined now. What is older comes first in its group; of that there is one at
        # most.
        self._value, self._group = order[grouped], groups.of_word[grouped]
        while len(self._value):
            pair = self._pairs()
            if np.count_nonzero(pair) < _FEWEST_PAIRS:
                break
            self._combine(pair)

    def rest(self) -> tuple[Ints, Ints]:
        """End the groups that are not done yet: the values that they consist of, each with its
        group, sorted by group.

        A value occurs once for each group that it belongs to, up to the one that holds all.
        """
        values, groups = [self._value], [self._group]
        while len(groups[-1]):
            above = self.groups.above[groups[-1]]
            values.append(values[-1][above >= 0])
            groups.append(above[above >= 0])
        value, group = np.concatenate(values), np.concatenate(groups)
        pending = np.flatnonzero(self.result < 0)
        self.result[pending] = self._made + np.arange(len(pending))
        order = np.argsort(group, kind="stable")
        return value[order], group[order]

    def _pairs(self) -> npt.NDArray[np.bool_]:
        """Sort by group; whether each value is the second of two, counted from the first of its
        group."""
        order = np.argsort(self._group, kind="stable")
        self._value, self._group = self._value[order], self._group[order]
        place = np.arange(len(order))
        begins = np.append(True, self._group[1:] != self._group[:-1])
        is_second: npt.NDArray[np.bool_] = (
            place - np.maximum.accumulate(np.where(begins, place, 0))
        ) % 2 == 1
        return is_second

    def _combine(self, is_second: npt.NDArray[np.bool_]) -> None:
        second = np.flatnonzero(is_second)
        self.rounds.append(Pairs(self._value[second], self._value[second - 1]))
        made, group = self._made + np.arange(len(second)), self._group[second]
        self._made += len(second)

        alone = ~is_second
        alone[second - 1] = False  # these are the first of two
        left = self._count(np.append(group, self._group[alone]))
        done = (left[group] == 1) & (self._awaited[group] == 0)
        self.result[group[done]] = made[done]
        group[done] = self.groups.above[group[done]]
        self._awaited -= self._count(group[done])
        kept = group >= 0
        self._value = np.append(self._value[alone], made[kept])
        self._group = np.append(self._group[alone], group[kept])

    def _count(self, group: Ints) -> Ints:
        """How often each group occurs."""
        return np.bincount(group[group >= 0], minlength=len(self.groups))
