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

#: A program that asks a fleet and a model in its own process the same. Its arguments are the
#: address, the backend, the model and an adapter.
PROGRAM = """
import asyncio, ray, sys, torch
from genlm.core import load_model_by_name

address, backend, model, adapter = sys.argv[1:]
lm = load_model_by_name(model, "ray", {"backend": backend, "replicas": 2, "address": address})
own = load_model_by_name(model, backend)

def compare(first, lora_name=None):
    asked, how = [[first, i] for i in range(50)], {"lora_name": lora_name}
    rows = [each.batch_next_token_logprobs_sync(asked, **how) for each in (lm, own)]
    torch.testing.assert_close(*rows, atol=1e-4, rtol=0)  # other batches: rounding

async def cancel():
    draw = asyncio.ensure_future(lm.sample([1, 2], 400, []))
    await lm.next_token_logprobs([8])
    draw.cancel()
    await lm.next_token_logprobs([9])

compare(1)
for each in (lm, own):
    each.add_new_lora(adapter, "a")
compare(1, "a")
drawn = [each.sample_sync([1, 2, 3], 9, [], seed=1) for each in (lm, own)]
assert drawn[0] == drawn[1]
asyncio.run(cancel())
ray.kill(lm.underlying_model[0])
compare(2, "a")
lm.close()
assert not ray.is_initialized()
print("the same")
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # the paths of sockets must be short
        yield short


@pytest.mark.parametrize("backend", ["mock", "hf"])
def test_program_outside_the_cluster_gets_right_rows(
    folder: str, backend: str, tiny: str, lora_folders: dict[str, str]
) -> None:
    model = tiny if backend == "hf" else "mock"
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
        for _ in range(3):  # Ray gives its server half a minute to start, however slow the machine
            ended = subprocess.run(
                [
                    sys.executable, "-c", PROGRAM, f"ray://127.0.0.1:{client}", backend, model,
                    lora_folders["a"],
                ],
                env=environment, capture_output=True, text=True, timeout=3 * PATIENCE,
            )  # fmt: skip
            if "no Ray cluster answers" not in ended.stderr:
                break
        assert ended.stdout.endswith("the same\n"), ended.stderr[-2000:]
    finally:
        head.terminate()
        head.wait(PATIENCE)
