from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.core.types import Query, Request, SampleRequest, SamplingParams, ScoreRequest
from tools import any_speed  # noqa: F401

MiB = 1 << 20

# Small enough that prompts are computed in chunks, sessions give way to each other, and the length
# limit is near.
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 40 * MiB,
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
def model_path() -> str:
    """The folder of a small real Llama; the environment names it."""
    path = os.environ.get("GENLM_TEST_MODEL")
    if path is None:
        pytest.skip("GENLM_TEST_MODEL does not name a model folder; nox -s 'plugin(vllm)' sets it")
    return path


@pytest.fixture(scope="session")
def small_opts() -> dict[str, Any]:
    return dict(SMALL)


@pytest.fixture(scope="session")
def make_tiny(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Make a small random model, whose heads two workers can share, with the real model's
    tokenizer: ``make_tiny("Llama", **config)`` gives its folder."""
    import transformers

    def make(family: str, **config: Any) -> str:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
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


@pytest.fixture(scope="module")
def load_engine(model_path: str) -> Iterator[Callable[..., Any]]:
    """Engines that are closed at the end of the module: ``load_engine(live_sessions=...,
    **engine_opts)``."""
    from genlm.vllm.loading import load

    opened = []

    def open_engine(live_sessions: bool | int = True, **engine_opts: Any) -> Any:
        options = {"engine_opts": SMALL | engine_opts, "live_sessions": live_sessions}
        engine = Driven(load(model_path, options))
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        engine.genlm_close()


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., list[Any]]:
    """Ask an engine through its step hook, as the core does: ``rows_of(engine, queries)``, in the
    order of the queries."""

    return lambda engine, queries: engine.ask(*queries)


@pytest.fixture(scope="session")
def write_adapter(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Callable[..., str]:
    """Write a random LoRA adapter in PEFT's format: ``write_adapter(name, seed)`` gives its folder,
    new or written over."""
    import json

    from safetensors.torch import save_file

    config = json.loads((Path(model_path) / "config.json").read_text())
    hidden, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    outs = {"q_proj": hidden, "v_proj": hidden // heads * kv_heads}

    def write(name: str, seed: int, rank: int = 4) -> str:
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for module, out in outs.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{prefix}.lora_A.weight"] = (
                    torch.randn(rank, hidden, generator=generator) / hidden**0.5
                )
                weights[f"{prefix}.lora_B.weight"] = (
                    torch.randn(out, rank, generator=generator) * 0.2
                )
        folder = tmp_path_factory.getbasetemp() / "adapters" / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "adapter_model.safetensors")
        settings = {
            "peft_type": "LORA",
            "base_model_name_or_path": model_path,
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "task_type": "CAUSAL_LM",
            "target_modules": sorted(outs),
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return str(folder)

    return write
