"""The demo, a sequential Monte Carlo over the real model, end to end: ours beside genlm-backend's.

The program is that of ``examples/smc.py`` on both sides, and draws the same random numbers.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import Any

import torch

from examples.smc import allowed_tokens, smc
from genlm.core import load_model_by_name
from genlm.core.together import Then
from tools.gpu import peer
from tools.gpu.timing import seconds
from tools.smollm2 import default_folder

PROMPT = "The best thing about a walk in the hills is"
MAX_TOKENS = 25
RUNS = 3


def program_figures(device: str, dtype: str, particles: int) -> dict[str, Any]:
    """Seconds for ``particles`` particles of 25 tokens: medians of three runs, after a short one;
    and the logs of the normalising constant, which are equal on both sides but for rounding."""
    options = {"device": device, "dtype": dtype}
    with load_model_by_name(str(default_folder()), "hf", options) as lm:
        allowed = allowed_tokens(lm, "e")

        def forget() -> None:
            lm.clear_cache()
            lm.clear_kv_cache()

        figures = _measured("ours", lm, allowed, particles, device, forget)
        if peer.is_here():
            theirs = WithThen(peer.over(_loaded(device, dtype)))
            figures |= _measured("theirs", theirs, allowed, particles, device, theirs.clear_cache)
            figures["times_faster"] = figures["theirs_s"] / figures["ours_s"]
    return figures


class WithThen:
    """A model without ``then``: each caller applies the function to its own row."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    async def next_token_logprobs(self, token_ids: list[int], then: Then[Any]) -> Any:
        return then([await self._model.next_token_logprobs(token_ids)])


def _measured(
    side: str, lm: Any, allowed: torch.Tensor, particles: int, device: str, forget: Any
) -> dict[str, Any]:
    prompt = lm.tokenizer.encode(PROMPT)
    constants = []

    def run(n: int, tokens: int, seed: int) -> None:
        program = smc(lm, prompt, allowed, n, tokens, random.Random(seed))
        constants.append(asyncio.run(program)[1])

    run(8, 3, 0)
    taken = []
    for seed in range(RUNS):
        forget()
        taken.append(seconds(lambda seed=seed: run(particles, MAX_TOKENS, seed), device))  # type: ignore[misc]
    return {
        f"{side}_s": statistics.median(taken),
        f"{side}_log_constants": [round(constant, 3) for constant in constants[1:]],
    }


def _loaded(device: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_folder(), dtype=getattr(torch, dtype))
    return model.to(device)
