"""The rows of the small real model are transformers' own: what a tiny model cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm.core import AsyncLM

TEXT = (
    "The first steam engines pumped water out of mines. They were slow, heavy and hungry: one of "
    "them burned more coal in a day than a village in a month. Fifty years later the same idea, "
    "made lighter by better iron and a separate condenser, drove mills, looms and at last ships. "
    "def area(width, height):\n    return width * height\n\n"
    "Who owned an engine sold its power by the hour; who did not, moved to where it stood. Towns "
    "grew around chimneys, and clocks, which had told farmers the season, now told workers the "
    "minute. Of all that the engine changed, perhaps nothing changed as much as the day itself. "
    "A child born beside the first pump could die beside an express train."
)

#: The positions at which contexts diverge: after the first token, within a block of state, and
#: beyond the 128 tokens of any block.
FORKS = (1, 40, 131)


def check_rows(lm: AsyncLM, folder: str, atol: float = 1e-3) -> None:
    """Ask for contexts in every way that state is reused in.

    Args:
        lm: Has loaded the real model, and has computed nothing.
        folder: Of the real model.
        atol: How far a log-probability may be off, nats. Engines differ by their kernels.

    Raises:
        AssertionError: A row is another one than that of transformers in float32.
    """
    ids = lm.tokenizer.encode(TEXT)
    assert len(ids) > FORKS[-1] + 4, len(ids)
    forks = [[*ids[:at], 7 + at, *ids[at + 1 : at + 4]] for at in FORKS]
    texts = [ids, *forks]
    references = _references(folder, texts)

    def check(*asked: tuple[int, int]) -> None:
        """Contexts that come together, each the beginning of a text, and its length."""
        given = lm.batch_next_token_logprobs_sync([texts[which][:n] for which, n in asked])
        for (which, length), row in zip(asked, given, strict=True):
            expected = references[which][length - 1, : len(row)].log_softmax(-1)
            torch.testing.assert_close(
                row.float(), expected, atol=atol, rtol=0, msg=lambda found: f"{asked}: {found}"
            )

    check((0, FORKS[-1]))
    check((0, FORKS[-1] + 1), *((which, len(texts[which])) for which in (1, 2, 3)))
    check((0, len(ids)), (0, 1), (0, 64), (0, 65))
    lm.clear_cache()
    lm.clear_kv_cache()
    check((0, FORKS[-1] + 1), (3, len(texts[3])))
    _check_scores(lm, references[0], ids, atol)


def _check_scores(lm: AsyncLM, reference: torch.Tensor, ids: Sequence[int], atol: float) -> None:
    given = lm.sequence_logprobs_sync(ids[:100], ids[100:])
    rows = reference[99:-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids[100:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(given.float(), expected, atol=atol, rtol=0)


@torch.no_grad()
def _references(folder: str, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits at every position of some texts, by transformers alone in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [model(torch.tensor([text])).logits[0] for text in texts]
