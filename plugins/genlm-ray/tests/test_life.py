"""The life of a fleet: which cluster it uses, which programs share it, and what it leaves
behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genlm.core import AsyncLM, EngineDeadError, InvalidOptionError
from genlm.ray import end_fleet
from tools.tiny import write_tokenizer

from .conftest import PATIENCE

Fleet = Callable[..., AsyncLM]

START = """
import os, ray
from genlm.core import load_model_by_name
lm = load_model_by_name("mock", "ray", {"backend": "mock", "replicas": 1})
row = lm.next_token_logprobs_sync([1, 2, 3])
from ray._private.worker import _global_node as node
parts = {name: [p.process.pid for p in ps] for name, ps in node.all_processes.items()}
pids = [os.getpid(), *(pid for part in parts.values() for pid in part)]
print(*pids, flush=True)
"""

#: The interrupt goes to this thread, so that it also works if the test runner ignores interrupts,
#: as it does in the background.
INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.raise_signal(signal.SIGINT)
"""

#: The control process of the cluster's head dies. Rows are answered until Ray ends the program.
HEADLESS = """
lm.clear_cache()
os.kill(parts["gcs_server"][0], 9)
assert row.equal(lm.next_token_logprobs_sync([1, 2, 3]))
print("answered", flush=True)
while True:
    lm.next_token_logprobs_sync([1, 2, 3])
    lm.clear_cache()
"""

#: The program ends Ray, which ends the model. Nothing starts another cluster.
SHUT_DOWN = """
ray.shutdown()
try:
    lm.next_token_logprobs_sync([4])
except Exception as error:
    print(type(error).__name__, flush=True)
lm.close()
assert not ray.is_initialized()
"""

SAID = {INTERRUPTED: b"", HEADLESS: b"answered\n", SHUT_DOWN: b"EngineDeadError\n"}


@pytest.mark.parametrize("ending", SAID)
def test_a_program_that_ends_leaves_no_process_behind(ending: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", START + ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"},
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) > 3, program.communicate()[1].decode()
    ends = [end for pid in pids if (end := end_of(pid)) is not None]
    said, problems = program.communicate(timeout=PATIENCE)
    assert said.endswith(SAID[ending]), problems.decode()
    assert bool(program.returncode) == (ending != SHUT_DOWN), problems.decode()
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


#: Joins a fleet, binds an adapter, begins a long sample, and stays.
NEIGHBOUR = """
import asyncio, sys, ray
import genlm.ray.watch
genlm.ray.watch.PULSE_SECONDS = 0.5
from genlm.core import load_model_by_name
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
opts = {"continuous": True, "steps": 1}
options = {"backend": "mock", "replicas": 1, "name": "shared", "backend_opts": opts}
lm = load_model_by_name("mock", "ray", options)
lm.add_new_lora("first-adapter", "mine")

async def main():
    draw = asyncio.ensure_future(lm.sample([1, 2, 3], 10_000_000, [], lora_name="mine"))
    row = await lm.next_token_logprobs([1, 2, 3], lora_name="mine")
    print(lm.underlying_model[0]._actor_id.hex(), float(row[7]), flush=True)
    await draw

asyncio.run(main())
"""


def test_killed_program_leaves_nothing_in_a_shared_fleet(
    fleet: Fleet, cluster: Any, address: str
) -> None:
    """Neither its adapter nor its sample remains; until the sample ends, an engine accepts no new
    adapter."""
    lm = fleet(replicas=1, name="shared", backend_opts={"continuous": True, "steps": 1})
    (actor,) = lm.underlying_model
    lm.add_new_lora("another-adapter", "mine")
    mine = lm.next_token_logprobs_sync([1, 2, 3], lora_name="mine")
    before = adapters_of(cluster, actor)
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, address], stdout=subprocess.PIPE, text=True
    )
    assert neighbour.stdout is not None
    replica, theirs = neighbour.stdout.readline().split()
    assert replica == actor._actor_id.hex(), "it loaded the model again"
    assert float(theirs) != float(mine[7])  # another program's adapter has the same version
    lm.clear_cache()
    assert lm.next_token_logprobs_sync([1, 2, 3], lora_name="mine").equal(mine)
    (held,) = adapters_of(cluster, actor) - before
    neighbour.send_signal(signal.SIGKILL)
    neighbour.wait()
    lm.add_new_lora("second-adapter", "another")  # waits behind the sample
    deadline = time.monotonic() + PATIENCE
    while held in adapters_of(cluster, actor):
        assert time.monotonic() < deadline, "its adapter is there"
    assert lm.underlying_model[0] is actor


def adapters_of(cluster: Any, actor: Any) -> set[str]:
    """The adapters that the replica's model has."""
    found = actor.__ray_call__.remote(lambda replica: {*replica.lm.adapters})
    names: set[str] = cluster.get(found, timeout=PATIENCE)
    return names


def names(cluster: Any, fleet: str) -> list[str]:
    named = cluster.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["name"].startswith(f"genlm-{fleet}-")]


def test_a_named_fleet_outlives_its_programs_until_it_is_ended(fleet: Fleet, cluster: Any) -> None:
    fleet(name="kept").close()
    before = [cluster.get_actor(f"genlm-kept-{i}", namespace="genlm") for i in range(2)]
    with pytest.raises(InvalidOptionError, match=r"the fleet serves 'mock'.*give it another name"):
        fleet(name="kept", backend_opts={"max_context": 5})
    lm = fleet(name="kept")
    there = [actor._actor_id for actor in lm.underlying_model]
    assert there == [actor._actor_id for actor in before]
    # A replica ends even if the program that ends it has died: otherwise it could be neither used
    # nor started again.
    cluster.wait([before[0].end.remote()], timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while names(cluster, "kept") != ["genlm-kept-1"]:
        assert time.monotonic() < deadline, "a replica that has ended is there"
    assert end_fleet("kept") == 1
    with pytest.raises(EngineDeadError, match="the fleet has been ended; load the model again"):
        lm.next_token_logprobs_sync([1, 2, 3])
    assert names(cluster, "kept") == []
    assert end_fleet("kept") == 0
    lm.close()
    # The program joined the cluster itself, before there was a model.
    assert cluster.is_initialized()


def test_fleet_whose_model_does_not_load_names_the_reason_and_ends(
    fleet: Fleet, cluster: Any
) -> None:
    with pytest.raises(InvalidOptionError, match="backend 'mock' has no option maximum"):
        fleet(replicas=1, name="misspelt", backend_opts={"maximum": 3})
    assert names(cluster, "misspelt") == []


NODES = """
import asyncio, os, ray, signal
from pathlib import Path
from ray.cluster_utils import Cluster
import genlm.ray.watch
genlm.ray.watch.PULSE_SECONDS = 0.8
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
from genlm.core import load_model_by_name, MockAsyncLM
options = {"backend": "mock", "replicas": 2, "address": cluster.address}
options["backend_opts"] = {"delay": 0.2}
lm = load_model_by_name("mock", "ray", options)

def raylet(node):
    return node.all_processes["raylet"][0].process.pid

def replicas(node):
    children = Path(f"/proc/{raylet(node)}/task/{raylet(node)}/children").read_text().split()
    named = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, name in named.items() if b"ray::Replica" in name]

def remove(node):
    cluster.remove_node(node, allow_graceful=False)

def stop(node):
    for pid in (raylet(node), *replicas(node)):
        os.kill(pid, signal.SIGSTOP)

async def ask_while(fault, node, asked):
    rows = [asyncio.ensure_future(lm.next_token_logprobs(ids)) for ids in asked]
    await asyncio.sleep(0)
    fault(node)
    for row, ids in zip(await asyncio.gather(*rows), asked):
        assert row.equal(mock.next_token_logprobs_sync(ids)), (fault, ids)

first, second = [node for node in nodes if replicas(node)]
with MockAsyncLM() as mock:
    asyncio.run(ask_while(remove, first, [[i, i + 1] for i in range(40)]))
    asyncio.run(ask_while(stop, second, [[i, i + 2] for i in range(40)]))
os.kill(raylet(second), signal.SIGCONT)
lm.close()
assert not ray.is_initialized()
cluster.shutdown()
print("nothing lost")
"""


def test_requests_survive_a_lost_or_unreachable_node() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NODES], capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert "nothing lost" in ended.stdout, ended.stderr[-2000:]


FULL = """
import asyncio, sys, numpy, ray
config = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 1e-4}
ray.init(
    "local", num_cpus=2, namespace="genlm", include_dashboard=False, log_to_driver=False,
    logging_level="ERROR", object_store_memory=80_000_000, _system_config=config,
)
from genlm.core import EngineError, MockAsyncLM, load_model_by_name
lm = load_model_by_name(sys.argv[1], "ray", {"backend": "mock", "replicas": 1})

async def ask(first):
    rows = (lm.next_token_logprobs([first, i]) for i in range(20))
    return await asyncio.gather(*rows, return_exceptions=True)

held = []
for first in range(1, 11):  # Ray may still free something of its own, and a row finds room there
    for size in (4_000_000, 110_000):
        try:
            while True:
                held.append(ray.put(numpy.zeros(size, "uint8")))
        except (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError):
            pass
    rows = asyncio.run(ask(first))
    if all(isinstance(row, EngineError) and "full" in str(row) for row in rows):
        break
else:
    raise AssertionError(rows)
del held
while any(isinstance(row, EngineError) for row in rows):  # Ray makes room a little later
    rows = asyncio.run(ask(first))
with load_model_by_name(sys.argv[1], "mock") as mock:
    assert all(row.equal(mock.next_token_logprobs_sync([first, i])) for i, row in enumerate(rows))
lm.close()
ray.shutdown()
print("works again")
"""


def test_full_object_store_is_a_clear_error_until_there_is_room(tmp_path: Path) -> None:
    more = (f"more{i}" for i in range(26_000))
    # Makes rows of 105 KB: Ray keeps objects below 100 KB inside messages.
    write_tokenizer(tmp_path, *more)
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert "works again" in ended.stdout, ended.stderr[-2000:]
