from pathlib import Path

import numpy as np
import pytest
from genlm_numpy.lm import AsyncRNN
from genlm_numpy.network import Array, Network

from genlm.core.conformance import ConformanceSuite

WIDTH, RANK = 32, 2


class TestRNN(ConformanceSuite):
    backend = "rnn"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("rnn")
        cls.model = write_model(folder / "model.npz")
        cls.adapters = {
            name: write_adapter(folder / f"{name}.npz", seed=ord(name)) for name in "ab"
        }


def write_model(path: Path) -> str:
    random = np.random.default_rng(0)
    recurrence = normal(random, WIDTH, WIDTH) / WIDTH**0.5
    Network(normal(random, 258, WIDTH), recurrence).save(path)
    return str(path)


def write_adapter(path: Path, seed: int) -> str:
    random = np.random.default_rng(seed)
    np.savez(path, up=normal(random, WIDTH, RANK), down=normal(random, RANK, WIDTH))
    return str(path)


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def test_the_class_of_its_own(tmp_path: Path) -> None:
    with AsyncRNN.from_name(write_model(tmp_path / "model.npz")) as lm:
        assert lm.next_token_logprobs_sync([72]).shape == (258,)
        assert repr(lm).startswith("<AsyncRNN model=")
