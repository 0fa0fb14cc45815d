"""Live sessions that stay running requests of vLLM: extending one costs what a decoding step costs.

vLLM's own streaming input removes a request from its batch when a turn ends, and adds it again for
the next turn. Here turns never end: the token that vLLM draws for a session is reported, but not
appended. So the scheduler finds nothing to compute for the session, and skips it. To extend the
session, the known tokens are appended where the scheduler and the model runner keep a request's
tokens.

With asynchronous scheduling, which the model runner V2 allows here, vLLM plans a step before the
last one has ended, and counts a token that is to come for each request of that step. For a session
this token is counted until it is reported. A session is extended only while no step computes it:
what such a step draws belongs to the shorter context, and would be taken for the answer.

When a model is loaded, all names of vLLM that this module uses are checked, and a row of an
extended session is compared with a cold one. If a name is missing or the rows differ, sessions
pause between their turns, as in vLLM itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from genlm.core.logs import get_logger
from genlm.vllm.forks import absent_names
from genlm.vllm.runner_tokens import RunnerTokens, WorkerTokens, runner_tokens

log = get_logger()

CORE_NAMES = (
    "scheduler", "vllm_config.parallel_config.world_size",
    "vllm_config.parallel_config.tensor_parallel_size",
    "vllm_config.parallel_config.distributed_executor_backend",
    "vllm_config.scheduler_config.async_scheduling",
)  # fmt: skip
SCHEDULER_NAMES = (
    "requests", "running", "connector", "_update_request_with_output",
    "kv_cache_config.kv_cache_groups",
)  # fmt: skip
REQUEST_NAMES = (
    "num_tokens", "num_computed_tokens", "num_output_tokens", "append_output_token_ids",
)  # fmt: skip
#: The attributes that requests have in addition if scheduling is asynchronous.
ASYNC_NAMES = ("num_output_placeholders", "num_in_flight_tokens")
#: The executors whose workers compute a step and answer other calls in the same thread, and so on
#: the same stream.
OF_ONE_THREAD = ("uni", "mp")


class RunningSessions:
    """Wraps one method of a scheduler, and gives its model runners the tokens that are known.

    Args:
        scheduler: vLLM's scheduler.
        tokens: The tokens of its model runners.
        is_async: Whether scheduling is asynchronous.
    """

    def __init__(self, scheduler: Any, tokens: RunnerTokens, *, is_async: bool) -> None:
        self._scheduler, self._tokens, self._is_async = scheduler, tokens, is_async
        self._ids: set[str] = set()
        self._append = scheduler._update_request_with_output
        scheduler._update_request_with_output = self._report

    def add(self, request_id: str) -> None:
        """Note a request that is about to be handed to vLLM."""
        self._ids.add(request_id)

    def remove(self, request_ids: Sequence[str]) -> None:
        self._ids.difference_update(request_ids)

    def can_extend(self, request_id: str) -> bool:
        """Whether no step that has not ended computes an idle session: one may, if the session was
        preempted."""
        return not (self._is_async and self._scheduler.requests[request_id].num_in_flight_tokens)

    def extend(self, request_id: str, token_ids: list[int]) -> None:
        """Append tokens to an idle session, in place of the token that vLLM has drawn."""
        request = self._scheduler.requests[request_id]
        start = request.num_tokens
        request.append_output_token_ids(token_ids)
        self._tokens.append(request, start, token_ids)

    def write(self) -> None:
        """Write appended tokens into the model runners. Called before each step, on vLLM's
        stream."""
        self._tokens.write()

    def stop(self) -> None:
        """Restore the scheduler. No session may be held when this is called."""
        self._scheduler._update_request_with_output = self._append

    def _report(
        self, request: Any, new_token_ids: list[int], *args: Any, **options: Any
    ) -> tuple[list[int], bool]:
        if request.request_id in self._ids:
            # If the request was preempted meanwhile, vLLM has reset the count already.
            if self._is_async and not options.get("is_stale"):
                request.num_output_placeholders -= len(new_token_ids)
            return new_token_ids, False  # the token is not appended, and the request does not end
        reported: tuple[list[int], bool] = self._append(request, new_token_ids, *args, **options)
        return reported


def running_sessions(
    engine_core: Any, adapters: int, call_workers: Callable[..., list[Any]]
) -> RunningSessions | None:
    """The running sessions of an engine core; ``None`` if sessions must pause.

    Args:
        engine_core: vLLM's engine core; ``None`` if it is in another process.
        adapters: The most adapters that requests may have.
        call_workers: Calls a method of all workers, and returns the results by rank.
    """
    if (reason := _unsuited(engine_core, adapters)) is None:
        tokens = _tokens_of(engine_core, call_workers)
        is_async = engine_core.vllm_config.scheduler_config.async_scheduling
        if isinstance(tokens, str):
            reason = tokens
        elif is_async and not tokens.in_order:
            reason = "asynchronous scheduling begins a step before the last one has ended"
        else:
            return RunningSessions(engine_core.scheduler, tokens, is_async=is_async)
    log.info("vllm.sessions_pause", reason=reason)
    return None


def _tokens_of(engine_core: Any, call_workers: Callable[..., list[Any]]) -> RunnerTokens | str:
    """The tokens of the model runners, in this process or in several; or the reason why they cannot
    be written."""
    if (worker := getattr(engine_core.model_executor, "driver_worker", None)) is not None:
        return runner_tokens(getattr(getattr(worker, "worker", None), "model_runner", None))
    reasons: list[str | None] = call_workers("genlm_keep_tokens")
    return next(filter(None, reasons), None) or WorkerTokens(call_workers)


def _unsuited(engine_core: Any, adapters: int) -> str | None:
    """Why sessions must pause; ``None`` if they may keep running."""
    from vllm import SamplingParams
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
    from vllm.v1.request import Request

    if engine_core is None:
        return "the engine core is in a process of its own"
    if missing := absent_names(engine_core, *CORE_NAMES):
        return f"this vLLM has no {', '.join(missing)}"
    scheduler, config = engine_core.scheduler, engine_core.vllm_config
    parallel = config.parallel_config
    if parallel.world_size > parallel.tensor_parallel_size:
        return "the layers are in several processes, whose steps overlap"
    if parallel.distributed_executor_backend not in OF_ONE_THREAD:
        return f"{parallel.distributed_executor_backend} may compute and write in different threads"
    names = REQUEST_NAMES + (ASYNC_NAMES if config.scheduler_config.async_scheduling else ())
    missing = absent_names(Request("", [0], SamplingParams(max_tokens=1), None), *names)
    if missing := missing + absent_names(scheduler, *SCHEDULER_NAMES):
        return f"this vLLM has no {', '.join(missing)}"
    if scheduler.connector is not None:
        return "a KV connector looks at requests too"
    if adapters > (scheduler.lora_config.max_loras if scheduler.lora_config else 0):
        return "a step could have more adapters than slots: max_cpu_loras is above max_loras"
    attention = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    if any(type(spec) not in attention for spec in specs):
        return "not all layers have attention"
    return None
