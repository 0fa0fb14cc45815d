from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import patch

import pytest
import torch

from genlm.core import Query
from tests.adapter_kinds import Kind
from tests.adapter_kinds import make_adapter as make_kind
from tests.adapter_outcomes import reference_rows
from tests.driven import Driven
from tests.fixtures import *  # noqa: F403
from tools.tiny import write_tokenizer

TOKENS = 257  # every byte, and the end
WIDTH = 264  # rows are wider than the vocabulary, as in many real models


@pytest.fixture(scope="session")
def contexts() -> Callable[..., list[tuple[int, ...]]]:
    """Draws contexts: how many, the least and the most tokens."""

    def draw(n: int, least: int, most: int, seed: int = 0) -> list[tuple[int, ...]]:
        source = random.Random(seed)
        return [
            tuple(source.choices(range(TOKENS), k=source.randint(least, most))) for _ in range(n)
        ]

    return draw


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama of two layers and a byte tokenizer, whose rows are wider than
    its vocabulary."""
    return save_tiny(str(tmp_path_factory.mktemp("tiny")), WIDTH)


@pytest.fixture(scope="session")
def tiny_without_padding(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same folder, with rows as wide as its vocabulary."""
    return save_tiny(str(tmp_path_factory.mktemp("unpadded")), TOKENS)


def save_tiny(folder: str, width: int) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, "<end>")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=width, max_position_embeddings=512, eos_token_id=TOKENS - 1, **shape
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # otherwise every row is nearly uniform, and a mix-up could pass
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_adapter(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes the folder of a random PEFT adapter of the tiny model from a seed and the layers it
    changes."""

    def make(seed: int, layers: str, rank: int = 4) -> str:
        kind = Kind("", {"r": rank, "target_modules": layers.split()})
        return make_kind(kind, tiny, tmp_path_factory.mktemp(f"adapter{seed}"), seed)

    return make


@pytest.fixture(scope="session")
def reference(tiny: str) -> Callable[..., torch.Tensor]:
    """Rows of the tiny model as transformers computes them, with an adapter's folder or without,
    ``[n, WIDTH]``."""

    return lambda contexts, adapter=None: torch.stack(reference_rows(tiny, adapter, contexts))


class Hooks(Driven):
    def rows(self, contexts: Iterable[Iterable[int]], **query) -> torch.Tensor:
        return torch.stack(self.ask(*(Query(tuple(context), **query) for context in contexts)))

    def tokens(self, contexts: Iterable[Iterable[int]], **query) -> int:
        """How many tokens the engine runs through the model to answer."""
        with patch.object(self.engine.model, "forward", wraps=self.engine.model.forward) as forward:
            self.rows(contexts, **query)
        return sum(len(call.args[0]) for call in forward.call_args_list)


@pytest.fixture(scope="module")
def load_tiny(tiny: str) -> Iterator[Callable[..., Hooks]]:
    """Loads a model, the tiny one unless another is given, with engine options; a process holds
    one, so the one before is closed first."""
    from genlm.sgl.loading import load

    loaded: list[Hooks] = []

    def close() -> None:
        for hooks in loaded:
            hooks.genlm_close()
        loaded.clear()

    def make(folder=tiny, **engine_opts) -> Hooks:
        close()
        options = {"engine_opts": {"max_total_tokens": 4096, **engine_opts}}
        loaded.append(Hooks(load(folder, options)))
        return loaded[0]

    yield make
    close()
