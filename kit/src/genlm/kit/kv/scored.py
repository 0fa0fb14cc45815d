"""The rows from which scores of continuations are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice

from genlm.core.types import Query
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.prefixes import PrefixIndex, tokens_in

#: A sequence takes rows from another one if it gets at least this many, or all of its rows, from
#: there. The first row is that of the context itself; starting one token later than the others is
#: not worth it.
MIN_ROWS_TAKEN = 2

#: For each row, the indices of the scores that it gives.
Given = list[list[int]]


def scored_sequences(
    queries: Sequence[Query], continuations: Sequence[Sequence[int]]
) -> list[TokenSequence]:
    """A sequence for each score: its context, and all but the last token of its continuation. Its
    last rows are wanted, one for each token of the continuation."""
    contexts = {query: TokenSequence(query.context, query.adapter) for query in {*queries}}
    sequences: list[TokenSequence] = []
    for query, continuation in zip(queries, continuations, strict=True):
        whole = query.context.followed_by(tuple(continuation[:-1]))
        sequence = TokenSequence(whole, query.adapter, len(continuation))
        # The key of a context is made once.
        sequence.continue_key(contexts[query].key, query.length)
        sequences.append(sequence)
    return sequences


class ScoredRows:
    """The rows to compute for scores, and the scores that each row gives. Continuations with a
    common prefix, such as a list of candidates, have rows in common, which are computed once.

    The scores of all continuations have one numbering: those of the first come first, then those of
    the second, and so on.

    Args:
        sequences: The sequences of :func:`scored_sequences`.
        continuations: The continuation of each sequence.
        cut: Cuts a sequence into parts if its rows must not come from one forward.

    Attributes:
        pieces: The sequences to compute, each without the rows that it shares with an earlier one.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        continuations: Sequence[Sequence[int]],
        cut: Callable[[TokenSequence], Sequence[TokenSequence]] = lambda whole: [whole],
    ) -> None:
        self.pieces: list[TokenSequence] = []
        self._tokens = [*chain.from_iterable(continuations)]
        self._given: list[Given] = []  # for each piece, the scores that its rows give
        scores = [0, *accumulate(map(len, continuations))]
        known: PrefixIndex[bytes, tuple[int, Given]] = PrefixIndex()
        # The longest sequence comes first, because the others wait for it.
        lengths = [(-sequence.length, sequence.latest_start) for sequence in sequences]
        for at in sorted(range(len(sequences)), key=lengths.__getitem__):
            sequence = sequences[at]
            given = _common(known, sequence)
            own = TokenSequence(sequence.tokens, sequence.adapter, sequence.keep - len(given))
            own.continue_key(sequence.key, sequence.length)
            given = [*given, *([] for _ in range(own.keep))]
            for score, row in enumerate(given, scores[at]):
                row.append(score)
            if own.keep:
                known.add(own.key, (sequence.latest_start, given))
                self._add(cut(own), given[-own.keep :])
        self._done = [0] * len(self.pieces)

    def _add(self, pieces: Sequence[TokenSequence], given: Given) -> None:
        left = iter(given)
        for piece in pieces:
            self.pieces.append(piece)
            self._given.append([*islice(left, piece.keep)])

    def read(self, owners: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The values to read from the next rows: three lists with the row, the token and the number
        of each score.

        Args:
            owners: The index of the piece that each row belongs to. Rows of one piece come in
                order.
        """
        rows: list[int] = []
        scores: list[int] = []
        for row, owner in enumerate(owners):
            given = self._given[owner][self._done[owner]]
            self._done[owner] += 1
            scores += given
            rows += [row] * len(given)
        return rows, [self._tokens[score] for score in scores], scores


def _common(known: PrefixIndex[bytes, tuple[int, Given]], sequence: TokenSequence) -> Given:
    """The leading rows of a sequence that another sequence computes, if there are any."""
    nearest, common = known.nearest(sequence.key)
    if nearest is None:
        return []
    first, given = known[nearest]
    count = tokens_in(common) - sequence.latest_start
    if first > sequence.latest_start or count < min(MIN_ROWS_TAKEN, sequence.keep):
        return []
    return given[sequence.latest_start - first :][:count]
