"""The base model stays itself, whatever adapters are added, asked and removed, in whatever
order."""

from __future__ import annotations

import itertools

import pytest
import torch

from genlm.hf import AsyncTransformer

CONTEXT = [2, 8, 14, 36]


# PEFT says so of every module where the active one is removed.
@pytest.mark.filterwarnings("error:Adapter .* was active")
@pytest.mark.parametrize("order", list(itertools.permutations("ab")))
@pytest.mark.parametrize("asked_between", [None, "a", "b"])
def test_the_base_model_stays_itself(
    tiny: str, lora_folders: dict[str, str], order: tuple[str, ...], asked_between: str | None
) -> None:
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        base = lm.next_token_logprobs_uncached(CONTEXT)

        def check() -> None:
            torch.testing.assert_close(
                lm.next_token_logprobs_uncached(CONTEXT), base, atol=1e-4, rtol=0
            )

        for name in order:  # they adapt different modules: PEFT wraps some of them only now
            lm.add_new_lora(lora_folders[name], name)
            check()
        if asked_between is not None:
            row = lm.next_token_logprobs_uncached(CONTEXT, lora_name=asked_between)
            assert not torch.allclose(row, base, atol=1e-2)
            check()
        for name in order:
            lm.remove_lora(name)
            check()
