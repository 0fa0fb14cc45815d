"""From start to end: whose cluster it is, who shares a fleet, and what is left behind."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from genlm.core import AsyncLM, InvalidOptionError

from .conftest import PATIENCE

Fleet = Callable[..., AsyncLM]

START = """
import os, ray
from genlm.core import load_model_by_name
lm = load_model_by_name("mock", "ray", {"backend": "mock", "replicas": 2})
lm.next_token_logprobs_sync([1, 2, 3])
pids = [os.getpid()]
@ray.remote
def pid(): return os.getpid()
context = ray.get_runtime_context()
from ray._private.worker import _global_node as node
pids += [p.process.pid for ps in node.all_processes.values() for p in ps]
print(*pids, flush=True)
"""


@pytest.mark.parametrize(
    "ending", ["lm.close()", "pass", "raise SystemExit(3)", "os.kill(os.getpid(), 2)"]
)
def test_a_program_that_ends_leaves_no_process_behind(ending: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", START + ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) > 3, program.communicate()[1].decode()
    ends = [end for pid in pids if (end := end_of(pid)) is not None]
    program.communicate(timeout=PATIENCE)
    for end in ends:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        assert poll.poll(PATIENCE * 1000), "a process of the cluster lives on"
        os.close(end)


def end_of(pid: int) -> int | None:
    """A file descriptor that is readable once the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


JOIN = """
import sys, time
from genlm.core import load_model_by_name
import ray
ray.init(sys.argv[1], namespace="genlm", logging_level="ERROR", log_to_driver=False)
began = time.monotonic()
options = {"backend": "mock", "replicas": 2, "name": "shared"}
lm = load_model_by_name("mock", "ray", options)
print(time.monotonic() - began)
lm.add_new_lora("first-adapter", "mine")
print(float(lm.next_token_logprobs_sync([1, 2, 3], lora_name="mine")[7]))
print(sorted(actor._actor_id.hex() for actor in lm.underlying_model))
lm.close()
"""


def test_programs_share_a_fleet_by_its_name(fleet: Fleet, cluster: Any) -> None:
    """A second process joins it at once, with adapters of its own; the fleet outlives both."""
    lm = fleet(name="shared")
    mine = sorted(actor._actor_id.hex() for actor in lm.underlying_model)
    lm.add_new_lora("another-adapter", "mine")
    before = lm.next_token_logprobs_sync([1, 2, 3], lora_name="mine")
    address = cluster.get_runtime_context().gcs_address
    joined = subprocess.run(
        [sys.executable, "-c", JOIN, address], capture_output=True, text=True, timeout=PATIENCE
    )
    seconds, theirs, replicas = joined.stdout.splitlines() or [joined.stderr] * 3
    assert float(seconds) < PATIENCE / 4, "it loaded the model again"
    assert replicas == str(mine)
    assert float(theirs) != float(before[7])  # the same version, of another program
    lm.clear_cache()
    again = lm.next_token_logprobs_sync([1, 2, 3], lora_name="mine")
    assert again.equal(before)
    with pytest.raises(InvalidOptionError, match=r"the fleet serves 'mock'.*give it another name"):
        fleet(name="shared", backend_opts={"max_context": 5})
    lm.close()
    for index in range(2):
        cluster.kill(cluster.get_actor(f"genlm-shared-{index}", namespace="genlm"))


def test_a_cluster_that_the_program_joined_itself_is_left_alone(fleet: Fleet, cluster: Any) -> None:
    fleet().close()
    assert cluster.is_initialized()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'.*ray start --head"),
        ("somewhere", "address must be host:port, or ray://host:port; got 'somewhere'"),
    ],
)
def test_an_address_without_a_cluster_is_a_clear_error_at_once(address: str, said: str) -> None:
    code = (
        "from genlm.core import load_model_by_name\n"
        f"load_model_by_name('mock', 'ray', {{'backend': 'mock', 'address': {address!r}}})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(said, ended.stderr), ended.stderr


NODES = """
import asyncio, os
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
from genlm.core import load_model_by_name, MockAsyncLM
options = {"backend": "mock", "replicas": 2, "address": cluster.address}
options["backend_opts"] = {"delay": 0.2}
lm = load_model_by_name("mock", "ray", options)
asked = [[i, i + 1] for i in range(40)]
async def main():
    rows = [asyncio.ensure_future(lm.next_token_logprobs(ids)) for ids in asked]
    await asyncio.sleep(0)
    cluster.remove_node(nodes[0], allow_graceful=False)
    return await asyncio.gather(*rows)
rows = asyncio.run(main())
with MockAsyncLM() as mock:
    assert all(row.equal(mock.next_token_logprobs_sync(ids)) for row, ids in zip(rows, asked))
lm.close()
cluster.shutdown()
print("nothing lost")
"""


def test_a_node_that_is_lost_takes_no_request_with_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NODES], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert "nothing lost" in ended.stdout, ended.stderr[-2000:]
