"""The construction of SGLang's scheduler in this process, and the clean-up at the end."""

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
    """Construct the scheduler as ``run_scheduler_process`` does, but without making the process a
    worker: title, signal handlers and affinity stay. For the arguments see
    :class:`genlm.sgl.internals.Scheduler`."""
    from sglang.srt.managers import scheduler as module
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish

    load_plugins()
    # The watchdog would be a thread that never ends, and that signals the process when a step takes
    # long.
    module.create_scheduler_watchdog = lambda *_, **__: None
    if options.get("device") == "cpu":
        attention.install()
    arguments = _server_args(options)
    ports = _ports(arguments)
    # Early releases take the ranks as arguments of the scheduler.
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
        with required(arguments.model_path, settings, arguments.load_format):
            scheduler.__init__(arguments, ports, **place)
    finally:
        # This also runs if the constructor fails. An open socket that is garbage-collected would
        # wait for ever until its messages are read.
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
    """The addresses of the other processes, which do not exist here. The files with which SGLang
    reserves their names are removed."""
    from sglang.srt.server_args import PortArgs

    ports = PortArgs.init_new(arguments)
    for address in vars(ports).values():
        if str(address).startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink()
    return ports


def _close_channels(scheduler: Any) -> None:
    """Close the sockets to the tokenizer and detokenizer processes, which do not exist here, so
    that no messages pile up."""
    channels = scheduler.ipc_channels
    for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
        sender.socket = None  # SGLang's own mark for a missing receiver
    # The context is destroyed with all its sockets, since options may add some.
    channels.recv_from_tokenizer.context.destroy(linger=0)


def _remove_load_report(scheduler: Any) -> None:
    """Remove the file in shared memory in which a scheduler reports its load to other processes. It
    has no reader here, and SGLang would leave it behind."""
    if (report := getattr(scheduler, "load_snapshot_writer", None)) is not None:
        scheduler.load_snapshot_writer = None  # SGLang's own mark for a missing reader
        report.close()
        if path := getattr(report, "path", None):
            Path(path).unlink(missing_ok=True)


def release_globals() -> None:
    """Release SGLang's process-wide state, so that another model can be loaded."""
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
        # The coordinator would keep sockets open.
        if isinstance(value, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)
    # The places of the last model's experts must not be used for another model.
    runtime_context.get_resources().expert_location_metadata = None
    factory._ROPE_DICT.clear()
    _forget_frames()


def _forget_frames() -> None:
    """Drop the tracebacks of failed imports that SGLang's modules keep. Their frames may hold the
    scheduler."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            for value in list(vars(module).values()):
                if isinstance(value, BaseException):
                    value.__traceback__ = value.__context__ = None
