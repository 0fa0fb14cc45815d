"""Settings of the whole process that belong to the program."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from attrs import fields, frozen

T = TypeVar("T")

#: Variables of the environment that pytest itself changes.
PYTEST_PREFIX = "PYTEST_"


@frozen
class Settings:
    """Settings of the process that libraries read and that only the program may change."""

    default_dtype: str
    default_device: str
    torch_threads: int
    torch_threads_of_a_new_thread: int
    deterministic_algorithms: bool
    signal_handlers: Mapping[str, str]
    environment: Mapping[str, str]
    working_directory: str
    recursion_limit: int

    @classmethod
    def now(cls) -> Settings:
        import torch

        return cls(
            default_dtype=str(torch.get_default_dtype()),
            default_device=str(torch.get_default_device()),
            torch_threads=torch.get_num_threads(),
            # PyTorch keeps this number for each thread. A new thread has the number that was set
            # last in any thread.
            torch_threads_of_a_new_thread=in_a_new_thread(torch.get_num_threads),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            signal_handlers={
                signal.Signals(one).name: repr(signal.getsignal(one))
                for one in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)
            },
            environment={k: v for k, v in os.environ.items() if not k.startswith(PYTEST_PREFIX)},
            working_directory=os.getcwd(),
            recursion_limit=sys.getrecursionlimit(),
        )

    def changes(self, before: Settings) -> list[str]:
        """The changes since before, in words. Variables of the environment that are new do not
        count: libraries add their own."""
        found = []
        for each in fields(Settings):
            old, new = getattr(before, each.name), getattr(self, each.name)
            name = each.name.replace("_", " ")
            if not isinstance(new, Mapping):
                old, new, name = {"": old}, {"": new}, f"the {name}"
            for key in sorted({**old, **new}):
                was, now = old.get(key), new.get(key)
                if was != now and was is not None:
                    what = f"{key} of the {name}" if key else name
                    found.append(f"{what} was {was!r:.60} and is {now!r:.60}")
        return found


def in_a_new_thread(call: Callable[[], T]) -> T:
    """The result of a call in a new thread."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


def set_generators(call: Callable[[], object]) -> list[str]:
    """The program's generators of random numbers that a call seeds: those whose state after it is
    the same, whatever it was before. A call may take numbers from them."""
    states = []
    with _kept_generators():
        for seed in (1234567, 7654321):
            _seed(seed)
            call()
            states.append(_generators())
    first, second = states
    return [name for name in first if first[name] == second[name]]


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _generators() -> dict[str, str]:
    import torch

    state: Any = np.random.get_state(legacy=True)
    _, keys, *rest = state
    return {
        "Python's": repr(random.getstate()),
        "NumPy's": repr([keys.tolist(), *rest]),
        "PyTorch's": repr(torch.get_rng_state().tolist()),
    }


@contextmanager
def _kept_generators() -> Iterator[None]:
    import torch

    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
