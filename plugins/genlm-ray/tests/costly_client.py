"""A program outside the cluster, by Ray's client: on this machine, through the server of a head."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import PATIENCE

pytest.importorskip("grpc", reason="Ray's client needs grpcio: pip install 'ray[client]'")

PROGRAM = """
import asyncio, ray, sys, torch
from genlm.core import InvalidQueryError, MockAsyncLM, load_model_by_name

options = {"backend": "mock", "replicas": 2, "address": sys.argv[1]}
lm = load_model_by_name("mock", "ray", options)
mock = MockAsyncLM()

async def rows(first):
    asked = [[first, i] for i in range(50)]
    for ids, row in zip(asked, await asyncio.gather(*map(lm.next_token_logprobs, asked))):
        assert row.equal(mock.next_token_logprobs_sync(ids)), ids

async def cancelled():
    draw = asyncio.ensure_future(lm.sample([1, 2], 10_000_000, []))
    await asyncio.sleep(0.1)
    draw.cancel()
    await lm.next_token_logprobs([9])

asyncio.run(rows(1))
for model in (lm, mock):
    model.add_new_lora("first-adapter", "a")
ids = [1, 2, 3]
adapted = [model.next_token_logprobs_sync(ids, lora_name="a") for model in (lm, mock)]
assert adapted[0].equal(adapted[1])
drawn = [model.sample_sync(ids, 9, [], seed=1) for model in (lm, mock)]
assert drawn[0] == drawn[1]
asyncio.run(cancelled())
ray.kill(lm.underlying_model[0])
asyncio.run(rows(2))
lm.close()
assert not ray.is_initialized()
print("the same")
"""

REAL = """
import sys, torch
from genlm.core import load_model_by_name

address, model, adapter = sys.argv[1:]
asked = [[1, 2], [1, 2, 3], [7, 8, 9, 10]]
rows = []
for name, options in (("hf", {}), ("ray", {"backend": "hf", "replicas": 1, "address": address})):
    with load_model_by_name(model, name, options) as lm:
        lm.add_new_lora(adapter, "a")
        rows.append([
            lm.batch_next_token_logprobs_sync(asked),
            lm.batch_next_token_logprobs_sync(asked, lora_name="a"),
        ])
for here, there in zip(*rows):
    torch.testing.assert_close(here, there, atol=1e-5, rtol=0)
assert (rows[0][0] - rows[0][1]).abs().max() > 0.01
print("the same")
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # sockets' paths may not be long
        yield short


@pytest.fixture(params=["mock", "hf"])
def program(request: pytest.FixtureRequest) -> list[str]:
    """A program, and what it gets after the cluster's address."""
    if request.param == "mock":
        return [PROGRAM]
    pytest.importorskip("peft", reason="LoRA needs peft")
    adapters = request.getfixturevalue("lora_folders")
    return [REAL, request.getfixturevalue("tiny"), str(adapters["a"])]


def test_a_program_outside_the_cluster(folder: str, program: list[str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
    }
    port, client = free_port(), free_port()
    head = subprocess.Popen(
        [
            Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=4",
            "--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client}",
            "--include-dashboard=false", f"--temp-dir={folder}",
        ],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert any("Ray runtime started" in line for line in head.stdout or ())
        for _ in range(3):  # Ray gives its server half a minute to start, whatever the machine
            ended = subprocess.run(
                [sys.executable, "-c", program[0], f"ray://127.0.0.1:{client}", *program[1:]],
                env=environment, capture_output=True, text=True, timeout=3 * PATIENCE,
            )  # fmt: skip
            if "no Ray cluster answers" not in ended.stderr:
                break
        assert ended.stdout.endswith("the same\n"), ended.stderr[-2000:]
    finally:
        head.terminate()
        head.wait(PATIENCE)
