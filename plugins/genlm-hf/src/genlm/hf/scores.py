"""The scores of continuations, from the rows of all their positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, islice

import torch

from genlm.hf.evaluator import Evaluator
from genlm.hf.strategies import Result
from genlm.hf.upload import Upload
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.prefixes import PrefixIndex, tokens_in

#: A sequence takes rows from another one if that has at least this many of them, or all: the first
#: is the context's own, and a start one token later than that of others is not worth it.
FEW = 2


@torch.no_grad()
def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Float32 and normalised, outside inference mode, so that the core may write into them."""
    return logits.float().log_softmax(-1)


class Scores:
    """The scores of some continuations, filled in by what forwards give. Where continuations begin
    alike, as those of a list of candidates do, they have rows in common, which one of them
    computes.

    Args:
        sequences: A context and all but the last token of its continuation, whose positions are
            wanted.
        continuations: Of each of them.
        evaluator: Says where sequences must be cut.
        device: Where the scores go.

    Attributes:
        whole: For each continuation ``[len(continuation)]`` float32.
        pieces: What to compute: the sequences, or what is their own of them, cut.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        continuations: Sequence[Sequence[int]],
        evaluator: Evaluator,
        device: str,
    ) -> None:
        sizes = [*map(len, continuations)]
        self._tokens = [*chain.from_iterable(continuations)]
        self._scores = torch.empty(len(self._tokens), dtype=torch.float32, device=device)
        self.whole: Sequence[torch.Tensor] = torch.split(self._scores, sizes)
        self.pieces: list[TokenSequence] = []
        self._rows: list[list[list[int]]] = []  # of each piece: the scores that each gives
        starts = [0, *accumulate(sizes)]
        known: PrefixIndex[bytes, tuple[int, list[list[int]]]] = PrefixIndex()
        # The longest first, as where they are computed: others wait for it.
        for at in sorted(range(len(sequences)), key=lambda at: -sequences[at].length):
            sequence = sequences[at]
            rows = _common_rows(known, sequence)
            own = TokenSequence(sequence.tokens, sequence.adapter, sequence.keep - len(rows))
            own.continue_key(sequence.key, sequence.length)
            rows = [*rows, *([] for _ in range(own.keep))]
            for score, row in enumerate(rows, starts[at]):
                row.append(score)
            if not own.keep:
                continue
            known.add(own.key, (sequence.latest_start, rows))
            left = iter(rows[-own.keep :])
            for piece in evaluator.pieces(own):
                self.pieces.append(piece)
                self._rows.append([*islice(left, piece.keep)])
        self._done = [0] * len(self.pieces)

    def add(self, result: Result) -> None:
        """Write the scores that a forward gave, behind those of its pieces that are done."""
        if not result.owners:  # of a chunk before the first position that is wanted
            return
        rows: list[int] = []
        scores: list[int] = []
        for at, owner in enumerate(result.owners):
            given = self._rows[owner][self._done[owner]]
            self._done[owner] += 1
            scores += given
            rows += [at] * len(given)
        upload = Upload()
        indices = [upload.add(each) for each in (rows, [self._tokens[at] for at in scores], scores)]
        row, token, _ = (each.on(result.logits.device) for each in indices)
        picked = logprobs(result.logits)[row, token]
        self._scores[indices[-1].on(self._scores.device)] = picked.to(self._scores.device)


def _common_rows(
    known: PrefixIndex[bytes, tuple[int, list[list[int]]]], sequence: TokenSequence
) -> list[list[int]]:
    """The first rows of a sequence, if another one has them."""
    nearest, common = known.nearest(sequence.key)
    if nearest is None:
        return []
    first, rows = known[nearest]
    count = tokens_in(common) - sequence.latest_start
    if first > sequence.latest_start or count < min(FEW, sequence.keep):
        return []
    return rows[sequence.latest_start - first :][:count]
