"""A vLLM that a test drives, small models and random programs for it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from genlm.conformance import Program
from genlm.core.types import Query, SampleRequest, SamplingParams, ScoreRequest
from tests.driven import Driven

# The limits are so small that prompts are computed in chunks, sessions evict each other (the cache
# of the small model holds 864 tokens), and the longest context is near.
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 28 * 32 * 1024,
}

VOCABULARY = 2048

# Two slots, because vLLM's error on a CPU shows if the last one is used.
MOST_ADAPTERS = 2


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, VOCABULARY), k=length))


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """vLLM turns it off on a CPU. Here it stays on."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def but_asynchronous(vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(but_asynchronous))
        yield


@contextmanager
def inspected_here() -> Iterator[None]:
    """In the block, vLLM looks at a class of models in this process, and not in one of its own,
    which takes ten seconds for each class that is new to its cache."""
    from vllm.model_executor.models import registry

    with patch.object(registry, "_run_in_subprocess", lambda look: look()):
        yield


#: A note for each collection of garbage that was left out since the last one.
LEFT_OUT: list[object] = []
MOST_LEFT_OUT = 15


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Of the models that are closed in such blocks, one in 16 is freed at once, and with it those
    before it. Closing a model ends in a search of a million objects of vLLM, which takes longer
    than most tests."""
    collect = gc.collect

    def collect_rarely(*generation: int) -> int:
        if len(LEFT_OUT) < MOST_LEFT_OUT:
            LEFT_OUT.append(generation)
            return 0
        LEFT_OUT.clear()
        return collect(*generation)

    with patch.object(gc, "collect", collect_rarely):
        yield


class DrivenVllm(Driven):
    @contextmanager
    def computed_tokens(self) -> Iterator[list[int]]:
        """How many tokens each forward pass computes, seen from the model itself."""
        counts: list[int] = []
        hook = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: counts.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        yield counts
        hook.remove()

    def assert_cold_rows(self, rows: Mapping[Query, Any], atol: float = 5e-4) -> None:
        """Compare rows with cold rows."""
        for query, row in rows.items():
            (cold,) = self.ask(Query(query.token_ids, query.adapter, cold=True))
            torch.testing.assert_close(row, cold, atol=atol, rtol=0)

    def computes(self, *asked: Query | tuple[int, ...]) -> list[int]:
        """How many tokens each forward pass computes for rows, which are the cold ones."""
        queries = [each if isinstance(each, Query) else Query(each) for each in asked]
        with self.computed_tokens() as counts:
            rows = self.ask(*queries)
        self.assert_cold_rows(dict(zip(queries, rows, strict=True)))
        return counts

    def draw(self, queries: Sequence[Query], params: Sequence[SamplingParams]) -> list[Any]:
        return self.ask(*map(SampleRequest, queries, params))

    def score(self, queries: Sequence[Query], continuations: Sequence[Any]) -> list[Any]:
        return self.ask(*map(ScoreRequest, queries, continuations))


class _Program(Program):
    """This program binds an adapter only if there is room. To rebind a name, the engine holds one
    more adapter for a moment, and rejects that beyond ``max_cpu_loras``."""

    def adapter(self) -> tuple[str, str] | None:
        return super().adapter() if len(self.bound) < MOST_ADAPTERS else None


def random_program(engine: Driven, source: random.Random, **options: Any) -> Program:
    """A program with contexts of several blocks, beside samples that may preempt other requests."""
    return _Program(
        engine=engine,
        source=source,
        longest=200,
        tokens=range(100, VOCABULARY),
        chunk=SMALL["max_num_batched_tokens"] // 2,
        most=12,
        share=0.5,
        may_lack_room=True,
        **options,
    )
