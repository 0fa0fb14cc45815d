"""The samples that SGLang can draw itself."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from genlm.core import SamplingParams

#: More tokens than any model's context has, within the 32 bits in which SGLang keeps the number.
GREATEST_TOP_K = 1 << 30

#: The highest temperature that SGLang serves. At higher ones, its 32-bit probabilities round
#: different tokens to the same value and, at last, those of padding to NaN.
HIGHEST_TEMPERATURE = 100.0


def native_draw(params: SamplingParams, always_stop: Set[int]) -> dict[str, Any] | None:
    """SGLang's sampling parameters for a sample, or ``None`` if SGLang would draw from another
    distribution.

    * A seed fixes its samples only in a mode that few attention backends have.
    * It stops at no token at all (``ignore_eos``), or at the model's end-of-sequence tokens in
        addition to the listed ones.
    * With ``top_k`` and ``top_p`` together, it computes the mass for ``top_p`` before ``top_k``
        cuts off the tail; the contract computes it afterwards.
    * With ``top_k`` and ``top_p`` at high temperatures, it keeps arbitrary ones of the tokens that
        it rounds to the same probability.

    Args:
        always_stop: The tokens at which SGLang always stops, unless told to stop at none.
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
