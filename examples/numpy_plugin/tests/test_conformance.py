from pathlib import Path

import numpy as np
import pytest
from genlm_numpy.lm import AsyncNumpyLM
from genlm_numpy.network import Array, Network

from genlm.conformance import ConformanceSuite

LAYERS, WIDTH, INNER, RANK = 2, 32, 64, 2


class TestNumpy(ConformanceSuite):
    backend = "numpy"
    effort = 0.1  # the share of the examples that run; use 1.0 before a release

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("numpy")
        cls.model = write_model(folder / "model.npz")
        cls.adapters = {
            name: write_adapter(folder / f"{name}.npz", seed=ord(name)) for name in "ab"
        }


def write_model(path: Path) -> str:
    random = np.random.default_rng(0)
    shapes = {
        "attention": (LAYERS, WIDTH, 3 * WIDTH),
        "output": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, INNER),
        "down": (LAYERS, INNER, WIDTH),
    }
    weights = {name: normal(random, *shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    Network({"embedding": normal(random, 258, WIDTH), **weights}).save(path)
    return str(path)


def write_adapter(path: Path, seed: int) -> str:
    random = np.random.default_rng(seed)
    up, down = normal(random, LAYERS, WIDTH, RANK), normal(random, LAYERS, RANK, 3 * WIDTH)
    np.savez(path, up=up / WIDTH**0.5, down=down / RANK**0.5)
    return str(path)


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def test_the_class_of_its_own(tmp_path: Path) -> None:
    with AsyncNumpyLM.from_name(write_model(tmp_path / "model.npz")) as lm:
        assert lm.next_token_logprobs_sync([72]).shape == (258,)
        assert repr(lm).startswith("<AsyncNumpyLM model=")
