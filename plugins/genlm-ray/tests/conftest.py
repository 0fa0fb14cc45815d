from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define

from genlm.core import AsyncLM, load_model_by_name

#: How long a test waits for what must happen before it says that it did not, seconds. Starting a
#: process and importing PyTorch in it takes most of it on a busy machine.
PATIENCE = 120.0


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[Any]:
    """One local cluster for all tests of this process, with more places than cores."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts its workers with niceness 15. Beside a busy neighbour they would hardly run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        "local",
        num_cpus=32,
        namespace="genlm",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def address(cluster: Any) -> str:
    """Where other programs join that cluster."""
    found: str = cluster.get_runtime_context().gcs_address
    return found


@pytest.fixture
def fleet(cluster: Any) -> Iterator[Callable[..., AsyncLM]]:
    """Loads models on replicas, and closes them."""
    made: list[AsyncLM] = []

    def make(model: str = "mock", backend: str = "mock", **options: Any) -> AsyncLM:
        opts = {"backend": backend, "replicas": 2, "start_timeout": PATIENCE, **options}
        made.append(load_model_by_name(model, "ray", opts))
        return made[-1]

    yield make
    for lm in made:
        lm.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama and a byte tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = str(tmp_path_factory.mktemp("tiny"))
    vocab_size = save_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=256,
    )
    model = AutoModelForCausalLM.from_config(config)
    spread(model, "", 0.15)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: str, more: int = 0) -> int:
    """Save a tokenizer of bytes, with further tokens that no text has; how many there are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<end>", *(f"more{i}" for i in range(more))]
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>").save_pretrained(folder)
    return len(tokens)


@pytest.fixture(scope="session")
def lora_folders(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters of the tiny model."""
    import peft
    from transformers import AutoModelForCausalLM

    folders = {}
    for name, rank in (("a", 4), ("b", 8)):
        torch.manual_seed(rank)
        model = AutoModelForCausalLM.from_pretrained(tiny)
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
        adapted = peft.get_peft_model(model, lora)
        spread(adapted, "lora_", 0.3)
        folders[name] = tmp_path_factory.mktemp(f"lora_{name}")
        adapted.save_pretrained(folders[name])
    return folders


def spread(model: torch.nn.Module, name: str, deviation: float) -> None:
    """Random weights that are far from zero, so that a mix-up shows."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if name in parameter_name and parameter.ndim > 1:
                parameter.normal_(0, deviation)


class Gate:
    """Holds the replicas' engines at their next batch, wherever they run, until it is opened."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._changed = asyncio.Condition()
        self._held: list[int] = []
        self._turn = 0

    async def hold(self, turn: int, pid: int) -> None:
        if turn != self._turn:  # of a test that is over
            return
        async with self._changed:
            self._held.append(pid)
            self._changed.notify_all()
        await self._open.wait()

    async def held(self, number: int) -> list[int]:
        """Wait until that many engines are held; their processes."""
        async with self._changed:
            await self._changed.wait_for(lambda: len({*self._held}) >= number)
        return sorted({*self._held})

    async def open(self) -> None:
        self._open.set()

    async def close(self) -> int:
        """For another test; its number."""
        self._open.clear()
        self._held.clear()
        self._turn += 1
        return self._turn


@define
class Held:
    """A gate, as a test uses it."""

    ray: Any
    actor: Any
    turn: int

    @property
    def on_batch(self) -> Callable[[Any], None]:
        """For the mock's option of that name."""
        actor, ray, turn = self.actor, self.ray, self.turn

        def hold(queries: Any) -> None:
            ray.get(actor.hold.remote(turn, os.getpid()))

        return hold

    def wait_held(self, number: int) -> list[int]:
        pids: list[int] = self.ray.get(self.actor.held.remote(number), timeout=PATIENCE)
        return pids

    def open(self) -> None:
        self.ray.get(self.actor.open.remote(), timeout=PATIENCE)


@pytest.fixture(scope="session")
def gatekeeper(cluster: Any) -> Any:
    return cluster.remote(Gate).options(num_cpus=0, max_concurrency=100).remote()


@pytest.fixture
def gate(cluster: Any, gatekeeper: Any) -> Iterator[Held]:
    turn = cluster.get(gatekeeper.close.remote(), timeout=PATIENCE)
    held = Held(cluster, gatekeeper, turn)
    yield held
    held.open()
