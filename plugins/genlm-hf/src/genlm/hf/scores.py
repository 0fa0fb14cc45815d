"""The scores of continuations, from the rows of all their positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from genlm.hf.evaluator import Evaluator
from genlm.hf.strategies import Result
from genlm.hf.upload import Upload
from genlm.kit.kv.sequence import TokenSequence


@torch.no_grad()
def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Float32 and normalised, outside inference mode, so that the core may write into them."""
    return logits.float().log_softmax(-1)


class Scores:
    """The scores of some continuations, filled in by what forwards give.

    Args:
        sequences: A context and all but the last token of its continuation, whose positions are
            wanted.
        continuations: Of each of them.
        evaluator: Says where sequences must be cut.
        device: Where the scores go.

    Attributes:
        whole: For each continuation ``[len(continuation)]`` float32.
        pieces: What to compute: the sequences, cut.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        continuations: Sequence[Sequence[int]],
        evaluator: Evaluator,
        device: str,
    ) -> None:
        self.whole = [
            torch.empty(len(continuation), dtype=torch.float32, device=device)
            for continuation in continuations
        ]
        self.pieces: list[TokenSequence] = []
        self._targets: list[Sequence[int]] = []  # of each piece, as all that follows
        self._parts: list[torch.Tensor] = []
        for sequence, continuation, score in zip(sequences, continuations, self.whole, strict=True):
            at = 0
            for piece in evaluator.pieces(sequence):
                self.pieces.append(piece)
                self._targets.append(continuation[at : at + piece.keep])
                self._parts.append(score[at : at + piece.keep])
                at += piece.keep
        self._done = [0] * len(self.pieces)

    def add(self, result: Result) -> None:
        """Write the scores that a forward gave, behind those of its pieces that are done."""
        if not result.owners:  # of a chunk before the first position that is wanted
            return
        runs = [(owner, len(list(run))) for owner, run in groupby(result.owners)]
        targets = [
            token
            for owner, n in runs
            for token in self._targets[owner][self._done[owner] : self._done[owner] + n]
        ]
        columns = Upload().add(targets).on(result.logits.device)
        picked = logprobs(result.logits).gather(1, columns[:, None])
        for (owner, n), part in zip(
            runs, torch.split(picked[:, 0], [n for _, n in runs]), strict=True
        ):
            self._parts[owner][self._done[owner] : self._done[owner] + n] = part
            self._done[owner] += n
