from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from genlm.core import MockAsyncLM, Query
from tools.entry_points import write_metadata

from .fixtures import pytest_collection_finish, real_model  # noqa: F401

#: Seconds that a test waits before it fails.
PATIENCE = 120.0


#: The module of a backend.
PLUGIN = """
from genlm.core import BackendInfo, hookimpl

@hookimpl
def genlm_backend_info():
    return BackendInfo(
        "for tests", engine="numpy", unavailable={unavailable!r}, preference={preference}
    )

@hookimpl
def genlm_load(model, options):
    from genlm.core.mock import ByteTokenizer, MockEngine
    return MockEngine(ByteTokenizer(), **options)
"""


class Gate:
    """Given to the mock as ``on_batch``: records every batch, and holds the engine while it is
    shut."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()

    def __call__(self, queries: Sequence[Query]) -> None:
        self.batches.append([query.token_ids for query in queries])
        self._entered.release()
        if not self._open.wait(PATIENCE):
            raise TimeoutError("the test never opened the gate")

    def wait_entered(self) -> None:
        """Wait until the engine has one more batch in hand."""
        if not self._entered.acquire(timeout=PATIENCE):
            raise TimeoutError("the engine never got a batch")

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


async def busy(lm: Any, gate: Gate, token_ids: Any, **options: Any) -> asyncio.Future[Any]:
    """Shut the gate, and ask for a row; it is held inside the engine when this returns."""
    gate.shut()
    asked = asyncio.ensure_future(lm.next_token_logprobs(token_ids, **options))
    await asyncio.to_thread(gate.wait_entered)
    return asked


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter; a hang is a failure."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def gathered(*asked: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of requests made together: answers, or errors in their places."""

    async def together() -> list[Any]:
        outcomes = asyncio.gather(*asked, return_exceptions=True)
        return await asyncio.wait_for(outcomes, PATIENCE)

    return asyncio.run(together())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """A test that is a coroutine runs in an event loop of its own."""
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test):
        pyfuncitem.obj = lambda **fixtures: asyncio.run(test(**fixtures))
    return (yield)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """An open gate."""
    gate = Gate()
    yield gate
    gate.open()  # otherwise closing the model would wait for it


@pytest.fixture
def mock(gate: Gate) -> Iterator[Callable[..., MockAsyncLM]]:
    """Makes mocks over the byte tokenizer whose batches pass the gate, and closes them."""
    made: list[MockAsyncLM] = []

    def make(cls: type[MockAsyncLM] = MockAsyncLM, **options: Any) -> MockAsyncLM:
        made.append(cls(**{"on_batch": gate, **options}))
        return made[-1]

    yield make
    gate.open()
    for lm in made:
        lm.close()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution with one entry point, for this process and those that it starts."""

    def install(
        name: str,
        source: str | None = None,
        group: str = "genlm.backends",
        distribution: str | None = None,
        target: str | None = None,
        unavailable: str | None = None,
        preference: int = 0,
    ) -> None:
        folder = tmp_path / (distribution or name)
        entry_points = {group: {name: target or f"plugin_{name}"}}
        write_metadata(folder, distribution or name, "1.2", entry_points)
        if source is None:
            source = PLUGIN.format(unavailable=unavailable, preference=preference)
        (folder / f"plugin_{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        monkeypatch.delitem(sys.modules, f"plugin_{name}", raising=False)

    return install
