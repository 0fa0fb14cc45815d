"""The scores of continuations, from the rows of all their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm.hf.evaluator import Evaluator
from genlm.hf.strategies import Result
from genlm.hf.upload import Upload
from genlm.kit.kv.scored import ScoredRows
from genlm.kit.kv.sequence import TokenSequence


@torch.no_grad()
def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Float32 log-probabilities. They are made outside inference mode, so that the core may write
    into them."""
    return logits.float().log_softmax(-1)


class Scores:
    """The scores of continuations, filled in from the results of forwards.

    Args:
        sequences: See :class:`~genlm.kit.kv.scored.ScoredRows`.
        continuations: The continuation of each sequence.
        evaluator: Decides where sequences must be divided.
        device: The device of the scores.
        width: The number of tokens that have mass: those of the tokenizer, without padding.

    Attributes:
        whole: The scores of each continuation, ``[len(continuation)]`` float32.
        pieces: The sequences to compute.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        continuations: Sequence[Sequence[int]],
        evaluator: Evaluator,
        device: str,
        width: int,
    ) -> None:
        self._width = width
        self._rows = ScoredRows(sequences, continuations, evaluator.pieces)
        self.pieces = self._rows.pieces
        sizes = [*map(len, continuations)]
        self._scores = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        self.whole: Sequence[torch.Tensor] = torch.split(self._scores, sizes)

    def add(self, result: Result) -> None:
        """Write the scores that a forward gave."""
        if not result.owners:  # the result of a chunk that ends before the first wanted position
            return
        upload = Upload()
        rows, tokens, scores = map(upload.add, self._rows.read(result.owners))
        device = result.logits.device
        picked = logprobs(result.logits[:, : self._width])[rows.on(device), tokens.on(device)]
        self._scores[scores.on(self._scores.device)] = picked.to(self._scores.device)
