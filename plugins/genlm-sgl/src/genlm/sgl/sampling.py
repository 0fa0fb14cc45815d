"""Which draws SGLang can make itself."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from genlm.core import SamplingParams

#: More tokens than any model has; SGLang keeps the number in 32 bits.
GREATEST_TOP_K = 1 << 30

#: Beyond, the 32 bits of SGLang's probabilities round different ones to the same, and at last
#: those of padding to NaN.
HIGHEST_TEMPERATURE = 100.0


def native_draw(params: SamplingParams, always_stop: Set[int]) -> dict[str, Any] | None:
    """SGLang's sampling parameters for a draw, or ``None`` if it would draw something else.

    * A seed fixes its draws only in a mode that few attention backends have.
    * It stops at no token at all (``ignore_eos``), or at the model's own end in addition to the
      listed tokens.
    * With ``top_k`` and ``top_p`` together, it takes the mass before ``top_k`` cuts off the tail;
      the contract takes it after that.
    * At high temperatures it keeps, with ``top_k`` and ``top_p``, any of the tokens that it rounds
      to the same probability.

    Args:
        always_stop: The tokens at which it stops, unless told to stop at none.
    """
    if params.seed is not None or (params.top_k is not None and params.top_p is not None):
        return None
    if params.temperature > HIGHEST_TEMPERATURE:
        return None
    if params.stop_token_ids and not always_stop <= params.stop_token_ids:
        return None
    draw: dict[str, Any] = {"max_new_tokens": params.max_tokens, "temperature": params.temperature}
    if params.top_k is not None:
        draw["top_k"] = min(params.top_k, GREATEST_TOP_K)
    if params.top_p is not None:
        draw["top_p"] = params.top_p
    if params.stop_token_ids:
        return {**draw, "stop_token_ids": set(params.stop_token_ids)}
    return {**draw, "ignore_eos": True}
