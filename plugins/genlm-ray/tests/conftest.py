from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from genlm.core import AsyncLM, load_model_by_name
from genlm.ray import end_fleet
from tests.fixtures import fuzz_seed, pytest_collection_finish, say  # noqa: F401
from tools.tiny import write_adapter, write_model, write_tokenizer

#: Seconds that a test waits before it fails. On a busy machine, starting a process and importing
#: PyTorch in it take most of them.
PATIENCE = 120.0

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Otherwise programs would repeat Ray's warnings about a cluster that has been full for half a
# minute.
os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
# Ray starts its workers with niceness 15, with which they hardly run beside a busy neighbour.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """One local cluster for all tests of this process, with more places than cores."""
    import ray

    start = functools.partial(
        ray.init,
        "local",
        num_cpus=32,
        namespace="genlm",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        start()
    # A busy machine does not start within 15 s: github.com/ray-project/ray/issues/65983.
    except Exception:
        start()
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def address(cluster: Any) -> str:
    """The address at which other programs join that cluster."""
    found: str = cluster.get_runtime_context().gcs_address
    return found


@pytest.fixture
def fleet(cluster: Any) -> Iterator[Callable[..., AsyncLM]]:
    """Loads models on replicas, and ends them."""
    made: list[AsyncLM] = []
    names: set[str] = set()

    def make(model: str = "mock", backend: str = "mock", **options: Any) -> AsyncLM:
        opts = {"backend": backend, "replicas": 2, "start_timeout": PATIENCE, **options}
        if "name" in opts:
            names.add(opts["name"])
        made.append(load_model_by_name(model, "ray", opts))
        return made[-1]

    yield make
    for lm in made:
        lm.close()
    for name in names:
        end_fleet(name)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder / "words", "<end>")
    return write_model(str(folder / "words"), folder / "model")


@pytest.fixture(scope="session")
def lora_folders(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two LoRA adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(tiny, folder / name, seed) for seed, name in enumerate("ab")}
