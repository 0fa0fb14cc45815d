"""The construction of SGLang's scheduler in this process, and the cleaning up at the end."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.core.options import unknown_argument
from genlm.sgl import attention
from genlm.sgl.weights import required


def construct(options: Mapping[str, Any], gpu_id: int, settings: Any) -> Any:
    """Does what ``run_scheduler_process`` does, without making the process a worker: no title, no
    handlers, no affinity. For the arguments see :class:`genlm.sgl.internals.Scheduler`."""
    from sglang.srt.managers import scheduler as module
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish

    load_plugins()
    # It would be a thread that never ends, and signals the process when a step takes its time.
    module.create_scheduler_watchdog = lambda *_, **__: None
    if options.get("device") == "cpu":
        attention.install()
    arguments = _server_args(options)
    ports = _ports(arguments)
    # Early releases take the ranks here.
    if "gpu_id" in inspect.signature(module.Scheduler.__init__).parameters:
        publish(arguments, role="scheduler")
        ranks = {
            "tp_rank": 0,
            "moe_ep_rank": 0,
            "pp_rank": 0,
            "attn_cp_rank": 0,
            "moe_dp_rank": 0,
            "dp_rank": None,
        }
        place = {"gpu_id": gpu_id, **ranks}
    else:
        from sglang.srt.runtime_context import SpawnRanks

        publish(
            arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=gpu_id)
        )
        place = {}
    scheduler = module.Scheduler.__new__(module.Scheduler)
    try:
        with required(arguments.model_path, settings):
            scheduler.__init__(arguments, ports, **place)
    finally:
        # Also when the constructor fails: when an open socket is collected, it waits for ever until
        # its messages are read.
        if hasattr(scheduler, "ipc_channels"):
            _close_channels(scheduler)
        _remove_load_report(scheduler)
    return scheduler


def _server_args(options: Mapping[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    known = set(inspect.signature(ServerArgs).parameters)
    for name in options:
        if name not in known:
            raise unknown_argument("SGLang", "server argument", name, known)
    arguments = ServerArgs(**options)
    if hasattr(arguments, "resolve_once"):  # early releases resolve in the constructor
        arguments.resolve_once()
    arguments.check_server_args()
    return arguments


def _ports(arguments: Any) -> Any:
    """Addresses of the other processes, which do not exist here; without the files that SGLang
    makes to reserve their names."""
    from sglang.srt.server_args import PortArgs

    ports = PortArgs.init_new(arguments)
    for address in vars(ports).values():
        if str(address).startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink()
    return ports


def _close_channels(scheduler: Any) -> None:
    """Close the sockets to the tokenizer and detokenizer processes, which do not exist here:
    messages would pile up."""
    channels = scheduler.ipc_channels
    for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
        sender.socket = None  # SGLang's own sign that nobody listens
    # And all of its sockets; options add some.
    channels.recv_from_tokenizer.context.destroy(linger=0)


def _remove_load_report(scheduler: Any) -> None:
    """Remove the file in shared memory by which a scheduler tells other processes how busy it is:
    nobody reads it here, and SGLang leaves it behind."""
    if (report := getattr(scheduler, "load_snapshot_writer", None)) is not None:
        scheduler.load_snapshot_writer = None  # SGLang's own sign that nobody asks
        report.close()
        if path := getattr(report, "path", None):
            Path(path).unlink(missing_ok=True)


def release_globals() -> None:
    """Let go of what SGLang keeps for the whole process, so that another model can be loaded."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        parallel_state,
    )
    from sglang.srt.layers.rotary_embedding import factory

    destroy_model_parallel()
    destroy_distributed_environment()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator):  # it would keep sockets open
            setattr(parallel_state, name, None)
    # Where the experts of the last model are; another model's must not be there.
    runtime_context.get_resources().expert_location_metadata = None
    factory._ROPE_DICT.clear()
    _forget_frames()


def _forget_frames() -> None:
    """Modules of SGLang keep why an import failed, with all frames of that time: also those that
    hold the scheduler."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            for value in list(vars(module).values()):
                if isinstance(value, BaseException):
                    value.__traceback__ = value.__context__ = None
