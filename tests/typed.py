"""The type of an awaited result is that of ``then``. This file is checked by mypy, and not run."""

from __future__ import annotations

import asyncio
from typing import assert_type

import torch

from genlm.core import AsyncLM, TokenCharacterTrie, together
from genlm.core.reductions import draw, likeliest, prefix_masses


@together
def named(rows: torch.Tensor, names: list[str]) -> list[tuple[str, float]]:
    return [*zip(names, rows.amax(-1).tolist(), strict=True)]


@together
def halves(rows: torch.Tensor) -> torch.Tensor:
    return rows / 2


async def program(lm: AsyncLM, trie: TokenCharacterTrie) -> None:
    ids, contexts = [1, 2], [[1], [2]]
    assert_type(await lm.next_token_logprobs(ids), torch.Tensor)
    assert_type(await lm.next_token_logprobs(ids, "poems", then=None), torch.Tensor)
    assert_type(await lm.next_token_logprobs(ids, then=named("a")), tuple[str, float])
    assert_type(await lm.next_token_logprobs(ids, then=halves()), torch.Tensor)
    assert_type(await lm.next_token_logprobs(ids, then=draw(0.5, None)), tuple[int, float])
    assert_type(await lm.next_token_logprobs(ids, then=likeliest(3)), list[tuple[int, float]])
    assert_type(await lm.next_token_logprobs(ids, then=prefix_masses(trie)([b"a"])), list[float])
    assert_type(await lm.batch_next_token_logprobs(contexts), torch.Tensor)
    assert_type(
        await lm.batch_next_token_logprobs(contexts, then=named("a")), list[tuple[str, float]]
    )
    assert_type(
        await lm.batch_next_token_logprobs(contexts, then=map(named, "ab")),
        list[tuple[str, float]],
    )
    assert_type(lm.next_token_logprobs_sync(ids), torch.Tensor)
    assert_type(lm.next_token_logprobs_sync(ids, then=halves()), torch.Tensor)
    assert_type(lm.batch_next_token_logprobs_sync(contexts), torch.Tensor)
    assert_type(lm.batch_next_token_logprobs_sync(contexts, then=[halves()]), list[torch.Tensor])
    both = asyncio.gather(lm.next_token_logprobs(ids, then=named("a")), lm.next_token_logprobs(ids))
    assert_type(await both, tuple[tuple[str, float], torch.Tensor])
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    assert_type(rows, list[torch.Tensor])
