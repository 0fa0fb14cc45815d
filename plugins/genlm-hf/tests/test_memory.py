"""What happens when the device's memory runs out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.hf.pool import PoolLayer


@contextmanager
def memory_for(model: Any, tokens: int) -> Iterator[None]:
    """Forwards of more tokens than this run out of memory."""

    def refuse(
        module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]
    ) -> None:
        if kwargs["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.engine.model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def test_a_batch_is_split_until_it_fits(
    llama: Any, contexts: Callable[..., list[tuple[int, ...]]]
) -> None:
    prompts = contexts(7, 20)
    with memory_for(llama, 45):
        llama.check(*prompts)
        llama.check(*[(*prompt, 1) for prompt in prompts])


def test_a_pool_that_cannot_grow_is_emptied(
    llama: Any, contexts: Callable[..., list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, *others = contexts(9, 20)
    llama.engine.genlm_cache_prefix(Query(prompt))
    resize, layers = PoolLayer.resize, itertools.count()

    def refuse(layer: PoolLayer, rows: int, columns: int, kept: Sequence[int]) -> None:
        if rows > 4 and next(layers) % 2:  # the first layer has been moved already
            raise torch.OutOfMemoryError("out of memory")
        resize(layer, rows, columns, kept)

    monkeypatch.setattr(PoolLayer, "resize", refuse)
    with capture_logs() as events:
        llama.check(*others, (*prompt, 1))
    assert {
        "event": "kv.lost",
        "log_level": "warning",
        "rows": 1,
        "pinned": 1,
        "reason": "out of memory",
    } in events
    llama.check(prompt, (*prompt, 1, 2), *[(*other, 1) for other in others])


def test_one_that_cannot_fit_says_so(
    llama: Any, contexts: Callable[..., list[tuple[int, ...]]]
) -> None:
    with memory_for(llama, 45), pytest.raises(EngineError, match="50 tokens does not fit"):
        llama.ask(*contexts(1, 50))
    llama.check(*contexts(1, 50))


def test_one_that_fits_once_the_others_are_dropped(
    llama: Any, contexts: Callable[..., list[tuple[int, ...]]]
) -> None:
    *others, prompt = contexts(4, 20)
    llama.ask(*others)
    failures = iter([True])

    def refuse(module: torch.nn.Module, args: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("out of memory")

    llama.engine.model.register_forward_pre_hook(refuse)
    llama.check(prompt)


def test_rows_given_before_it_ran_out_are_not_asked_for_again(
    pair: Callable[..., Any], llama_config: Callable[..., Any]
) -> None:
    model = pair(llama_config(), max_batch_tokens=32)
    context, continuation = tuple(range(10)), tuple(range(60))
    forwards = itertools.count()

    def refuse(module: torch.nn.Module, args: object) -> None:
        if next(forwards) == 1:
            raise torch.OutOfMemoryError("out of memory")

    model.engine.model.register_forward_pre_hook(refuse)
    (scores,) = model.engine.genlm_sequence_logprobs([Query(context)], [continuation])
    rows = model.expected(*[context + continuation[:n] for n in range(len(continuation))])
    torch.testing.assert_close(
        scores, rows.gather(1, torch.tensor(continuation)[:, None])[:, 0], atol=1e-4, rtol=0
    )
