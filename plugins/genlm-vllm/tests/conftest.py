from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from genlm.core.types import Query, Request, SampleRequest, SamplingParams, ScoreRequest
from tests.fixtures import *  # noqa: F403
from tools.tiny import write_adapter as save_adapter

# Small enough that prompts are computed in chunks, sessions give way to each other (the cache of
# the tiny model holds 864 tokens), and the length limit is near.
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 28 * 32 * 1024,
}


class Driven:
    """An engine, and ways to drive it through its one step, as the core does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *newcomers: Request, dropped: Sequence[Request] = ()) -> dict[Request, Any]:
        """One step: what was answered."""
        kinds: dict[type, list[Any]] = {Query: [], SampleRequest: [], ScoreRequest: []}
        for request in newcomers:
            kinds[type(request)].append(request)
        answers = self._engine.genlm_step(*kinds.values(), list(dropped))
        return {answer.request: answer.result for answer in answers}

    def ask(self, *requests: Request) -> list[Any]:
        """What the engine says of each request, admitted together."""
        answers = self.step(*requests)
        while len(answers) < len(set(requests)):
            answers |= self.step()
        return [answers[request] for request in requests]

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
        """Rows against those that read no key/value state of others."""
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


@pytest.fixture(scope="session")
def driven() -> type[Driven]:
    return Driven


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    """No test asks a network: models are local folders. And vLLM sends usage statistics where it is
    not told not to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield


@pytest.fixture(scope="session")
def small_opts() -> dict[str, Any]:
    return dict(SMALL)


@pytest.fixture(scope="session")
def make_tiny(real_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Make a small random model, whose heads two workers can share, with the real model's
    tokenizer: ``make_tiny("Llama", **config)`` gives its folder."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(real_model)

    def make(family: str, **config: Any) -> str:
        size = {
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "pad_token_id": 0,
        }
        made = getattr(transformers, f"{family}Config")(**size | config)
        folder = tmp_path_factory.mktemp("tiny")
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def tiny_path(make_tiny: Callable[..., str]) -> str:
    return make_tiny("Llama")


@contextmanager
def opening(tiny_path: str) -> Iterator[Callable[..., Driven]]:
    """Makes engines, of the tiny model unless another is given, and closes them."""
    from genlm.vllm.loading import load

    opened = []

    def open_engine(
        path: str = tiny_path, live_sessions: bool | int = True, **engine_opts: Any
    ) -> Driven:
        options = {"engine_opts": SMALL | engine_opts, "live_sessions": live_sessions}
        # vLLM collects garbage five times as it loads, which takes longer than all else here. What
        # is frozen now it thaws when it closes.
        gc.freeze()
        opened.append(Driven(load(path, options)))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.genlm_close()


@pytest.fixture(scope="module")
def load_engine(tiny_path: str) -> Iterator[Callable[..., Driven]]:
    """Engines that are closed at the end of the module."""
    with opening(tiny_path) as load:
        yield load


@pytest.fixture
def load_briefly(tiny_path: str) -> Iterator[Callable[..., Driven]]:
    """Engines that are closed at the end of the test."""
    with opening(tiny_path) as load:
        yield load


@pytest.fixture(scope="session")
def write_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_path: str) -> Callable[..., str]:
    """Writes a random LoRA adapter of the tiny model, new or over another; gives its folder."""
    folder = tmp_path_factory.mktemp("adapters")
    return lambda name, seed, rank=4: save_adapter(tiny_path, folder / name, seed, rank)
