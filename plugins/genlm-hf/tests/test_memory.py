"""What happens when the device's memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from genlm.core import EngineError


@contextmanager
def memory_for(model: Any, tokens: int) -> Iterator[None]:
    """Forwards of more tokens than this run out of memory."""

    def refuse(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.engine.model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def test_a_batch_is_split_until_it_fits(llama: Any, contexts: Callable[..., list[tuple[int, ...]]]) -> None:
    prompts = contexts(7, 20)
    with memory_for(llama, 45):
        llama.check(*prompts)
        llama.check(*[(*prompt, 1) for prompt in prompts])


def test_one_that_cannot_fit_says_so(llama: Any, contexts: Callable[..., list[tuple[int, ...]]]) -> None:
    with memory_for(llama, 45), pytest.raises(EngineError, match="50 tokens does not fit"):
        llama.ask(*contexts(1, 50))
    llama.check(*contexts(1, 50))
