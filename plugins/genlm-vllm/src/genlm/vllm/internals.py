"""The undocumented parts of vLLM that this plugin uses, except those for forks and running
sessions. They are checked when a model is loaded.

Other modules use what is documented: ``vllm.LLM`` and its options, ``SamplingParams``, custom
logits processors and ``worker_extension_cls``. This module uses the engine-core client below
``LLM``. The client takes requests while others are running and, with ``resumable=True``,
continuations of a request that it holds; vLLM's own streaming-input API is a layer above it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from genlm.core.errors import BackendUnavailableError
from genlm.core.types import Adapter, TokenIds
from genlm.kit.settings import rope_limits
from genlm.vllm.forks import MARK, absent_names
from genlm.vllm.request import Output, VllmRequest
from genlm.vllm.running import RunningSessions, running_sessions
from genlm.vllm.streams import EngineStream

PROCESS_SWITCH = "VLLM_ENABLE_V1_MULTIPROCESSING"

#: The environment variable in which a worker on a CPU passes the name of its process group to the
#: code that makes the group.
GROUP_NAME = "VLLM_DIST_IDENT"

CLIENT_METHODS = (
    "add_request", "get_output", "abort_requests", "reset_prefix_cache",
    "collective_rpc", "add_lora", "remove_lora", "shutdown",
)  # fmt: skip
IN_PROCESS_PARTS = ("engine_core.model_executor.shutdown", "engine_core.scheduler.shutdown")
PROCESS_PARTS = ("outputs_queue.get", "ensure_alive")
REQUEST_FIELDS = (
    "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params",
    "arrival_time", "lora_request",
    "cache_salt", "data_parallel_rank", "resumable",
)  # fmt: skip
SCORES = "new_prompt_logprobs_tensors"
OUTPUT_FIELDS = ("request_id", "new_token_ids", "finish_reason", SCORES)
OF_OUTPUTS = attrgetter(*OUTPUT_FIELDS[:3])
#: The parameter with which a request chooses the prompt tokens whose log-probabilities it wants.
SCORED_IDS = "prompt_logprob_token_ids"
#: The field in which vLLM returns the log-probabilities of chosen prompt tokens, if it can.
SCORES_BY_ID = "prompt_token_id_logprobs"

LIVENESS_SECONDS = 1.0  # seconds between checks whether a silent engine process is alive


def _unsupported(reason: str) -> BackendUnavailableError:
    import vllm

    return BackendUnavailableError(
        f"vLLM {vllm.__version__} is installed, and {reason}; install another version of vLLM that "
        "this genlm-vllm is for (its README names them), or a newer genlm-vllm"
    )


def logits_processor_interfaces() -> list[type]:
    """The base classes of logits processors that vLLM's model runners require: that of V1 and, if
    it exists, that of V2."""
    from vllm.v1.sample.logits_processor import LogitsProcessor as V1

    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2
    except ImportError:
        return [V1]
    return [V1, V2]


class EngineCore:
    """The engine core of one ``vllm.LLM``.

    Args:
        llm: The model.
        stream: The stream on which vLLM computes.

    Raises:
        BackendUnavailableError: this vLLM lacks something that the plugin needs, despite its
            version.
    """

    def __init__(self, llm: Any, stream: EngineStream) -> None:
        from vllm import SamplingParams, envs
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

        self._llm, self._stream = llm, stream
        self._client = _require(llm, "llm_engine.engine_core")
        self._request_type = EngineCoreRequest
        self._in_process = hasattr(self._client, "engine_core")
        parts = IN_PROCESS_PARTS if self._in_process else PROCESS_PARTS
        for name in (*CLIENT_METHODS, *parts):
            _require(self._client, name)
        for struct, names in (
            (EngineCoreRequest, REQUEST_FIELDS),
            (EngineCoreOutput, OUTPUT_FIELDS),
        ):
            if missing := set(names) - set(struct.__struct_fields__):
                raise _unsupported(f"{struct.__name__} has no {', '.join(sorted(missing))}")
        config = _require(llm, "llm_engine.vllm_config")
        self.dtype = str(_require(config, "model_config.dtype"))
        self.max_model_len: int = _require(config, "model_config.max_model_len")
        # vLLM may accept longer contexts, and then reads beyond the table of embeddings.
        text = _require(config, "model_config.hf_text_config")
        self.max_positions = rope_limits(text).get("dynamic")
        self.logprobs_mode: str = _require(config, "model_config.logprobs_mode")
        # Before 0.32, this variable alone decides.
        by_environment = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False)
        runs_v2 = bool(getattr(config, "use_v2_model_runner", by_environment))
        #: Makes the seeds of samples without one if the model runner is V2, which would take them
        #: from NumPy's global generator, and that belongs to the program.
        self.seeds = random.Random(_require(config, "model_config.seed")) if runs_v2 else None
        #: Whether the log-probabilities of chosen prompt tokens can be requested: with the model
        #: runner V2, from vLLM 0.32 on.
        self.scores_by_id: bool = (
            runs_v2
            and not getattr(config.cache_config, "kv_sharing_fast_prefill", False)
            and SCORES_BY_ID in EngineCoreOutput.__struct_fields__
            and ids_by_position(SamplingParams)
        )
        self._scores = attrgetter(SCORES_BY_ID if self.scores_by_id else SCORES)
        self.vocab_size: int = _require(config, "model_config.get_vocab_size")()
        self.max_num_seqs: int = _require(config, "scheduler_config.max_num_seqs")
        limits = _require(config, "scheduler_config")
        tokens = _require(limits, "max_num_batched_tokens")
        # Longer prompts are computed in several steps.
        self.longest_chunk: int = min(
            tokens,
            limits.max_num_scheduled_tokens or tokens,
            limits.long_prefill_token_threshold or tokens,
        )
        self.prefix_caching: bool = bool(_require(config, "cache_config.enable_prefix_caching"))
        self.block_size: int = _require(config, "cache_config.block_size")
        self.device_type: str = _require(config, "device_config.device").type
        lora = _require(config, "lora_config")
        # On a CPU there is one more slot, which stays empty (loading.py).
        self.max_loras: int = lora.max_cpu_loras - (self.device_type == "cpu") if lora else 0
        self._lora_requests: dict[int, Any] = {}
        self.hf_config = _require(config, "model_config.hf_config")
        #: Whether vLLM runs the model's layers by transformers' code, under an output layer of its
        #: own. The classes for that have names of this beginning.
        self.runs_transformers = str(_require(config, "model_config.architecture")).startswith(
            "Transformers"
        )
        self.model_path: str = _require(config, "model_config.model")
        self._running: RunningSessions | None = None
        if self._in_process:
            cache = _require(self._client, "engine_core.scheduler.kv_cache_config")
            self._groups = groups_of_layers(cache, config)
        else:
            self._groups = self.call_workers("genlm_groups_of_layers")[0]
        # With a threshold, requests with a common prefix may be computed side by side, a part at a
        # time. With several kinds of layers, some layers may have freed blocks that others still
        # have.
        self.shares_blocks: bool = (
            self.prefix_caching
            and not limits.long_prefill_token_threshold
            and [whole for *_, whole in self._groups] == [True]
        )
        #: Whether the scheduler in this process makes forks.
        self.forks: bool = not absent_names(self._client, f"engine_core.scheduler.{MARK}")
        # vLLM keeps one block for itself and, with a watermark, some for requests that have begun.
        there = _require(config, "cache_config").num_gpu_blocks or 0
        blocks = there - 1 - int(getattr(limits, "watermark", 0) * there)
        #: How many tokens the KV cache holds.
        self.kv_capacity = blocks * self.block_size if blocks > 0 else 1 << 62

        #: How many tokens of the KV cache a context of a given length takes.
        self.footprint = footprint_of(self._groups, self.block_size)

    # --- requests ---------------------------------------------------------------------------------

    def run_sessions(self) -> None:
        """Let sessions stay running requests, if possible."""
        here = self._client.engine_core if self._in_process else None
        self._running = running_sessions(here, self.max_loras, self.call_workers)

    def add(
        self, request: VllmRequest, cache_salt: str | None = None, *, pinned: bool = False
    ) -> None:
        """Hand over a request.

        Args:
            request: The request.
            cache_salt: Only requests with the same salt share state.
            pinned: Whether the request will be held, but never extended.
        """
        resumable = request.resumable
        if resumable and not pinned and self._running is not None:
            self._running.add(request.request_id)
            resumable = False
        self._add(request, request.prompt.token_ids, resumable, cache_salt)

    def can_extend(self, session: VllmRequest) -> bool:
        """Whether an idle session can be extended now."""
        return self._running is None or self._running.can_extend(session.request_id)

    def extend(self, request: VllmRequest, token_ids: TokenIds) -> None:
        """Append tokens to the idle session that has the request's id."""
        if self._running is not None:
            self._running.extend(request.request_id, [*token_ids])
        else:
            self._add(request, token_ids, True, None)

    def _add(
        self, request: VllmRequest, token_ids: TokenIds, resumable: bool, salt: str | None
    ) -> None:
        """Hand a request to vLLM. If an idle paused request has its id, the tokens are appended to
        that."""
        adapter = request.prompt.adapter
        added = self._request_type(
            request_id=request.request_id,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=request.params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter and self._lora_requests[adapter.version],
            cache_salt=salt,
            data_parallel_rank=None,
            resumable=resumable,
        )
        self._client.add_request(added)

    @property
    def sessions_run(self) -> bool:
        """Whether sessions stay running requests. Otherwise they pause."""
        return self._running is not None

    def pause_sessions(self) -> None:
        """Let future sessions pause. No session may be held when this is called."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def step(self) -> list[Output]:
        """Make one step if the engine core is in this process. Otherwise wait for the next step of
        its own process, at most ``LIVENESS_SECONDS`` seconds."""
        if self._in_process:
            with self._stream.entered():
                if self._running is not None:
                    self._running.write()
                return self._outputs(self._client.get_output())
        # get_output is not used, because it waits for ever if the engine's process is killed
        # meanwhile.
        try:
            given = self._client.outputs_queue.get(timeout=LIVENESS_SECONDS)
        except queue.Empty:
            self._client.ensure_alive()
            return []
        if isinstance(given, Exception):
            raise given
        return self._outputs(given)

    def _outputs(self, given: Any) -> list[Output]:
        scores, chosen = self._scores, _of_chosen_tokens
        return [Output(*OF_OUTPUTS(raw), chosen(scores(raw))) for raw in given.outputs]

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._client.abort_requests(list(request_ids))
            if self._running is not None:
                self._running.remove(request_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop the state that no request holds. Returns ``False`` if a request still holds some."""
        with self._stream.entered():
            return bool(self._client.reset_prefix_cache())

    # --- workers ----------------------------------------------------------------------------------

    def call_workers(self, method: str | Callable[[Any], Any], *args: Any) -> list[Any]:
        """Call a method of every worker, or in this process a function of the worker, and return
        the results by rank."""
        with self._stream.entered():
            results: list[Any] = self._client.collective_rpc(method, args=args)
        return results

    def add_lora(self, adapter: Adapter, folder: str) -> None:
        """Load an adapter from a folder, which must exist for as long as the adapter is loaded.

        Each version gets a new integer id and a new name. vLLM keeps weights by the id and state by
        the name, so with the same name an adapter would use its predecessor's state.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"{adapter.name}@{adapter.version}", adapter.version, folder)
        with self._stream.entered():
            self._client.add_lora(request)
        self._lora_requests[adapter.version] = request

    def remove_lora(self, adapter: Adapter) -> None:
        with self._stream.entered():
            self._client.remove_lora(adapter.version)
        self._lora_requests.pop(adapter.version, None)

    # --- the end ----------------------------------------------------------------------------------

    def is_dead(self, error: BaseException) -> bool:
        """Whether vLLM cannot continue after ``error``: its process or one of its workers has
        ended."""
        from vllm.v1.engine.exceptions import EngineDeadError

        executor = getattr(self._llm.llm_engine, "model_executor", None)
        return isinstance(error, EngineDeadError) or bool(getattr(executor, "is_failed", False))

    def shutdown(self) -> None:
        """Stop the engine.

        If the engine core is in this process, vLLM's own shutdown would also destroy the process
        groups, which all models in the process share, and which must last until the last model
        ends. So the parts are stopped one by one, and vLLM's finalizer, which would do the same at
        exit, is disabled.
        """
        _forget_methods_of_tokenizers()
        if not self._in_process:
            self._client.shutdown()
            return
        if finalizer := getattr(self._client, "_finalizer", None):
            finalizer.detach()
        with self._stream.entered():
            for part in IN_PROCESS_PARTS:
                _require(self._client, part)()
            # This attribute tells a client in use from one that is shut down.
            del self._client.engine_core
            self._llm = self._client = self._running = None
            if not end_unused_process_groups():
                gc.collect()


def groups_of_layers(cache: Any, config: Any) -> list[tuple[int, int, bool]]:
    """The groups of layers that have blocks of their own. For each group: the tokens of a block (0
    if a block is not a part of a context), the most blocks that a request takes, and whether a
    request keeps all of its blocks.

    Args:
        cache: vLLM's ``KVCacheConfig``.
        config: vLLM's ``VllmConfig``.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return [
        (
            0 if isinstance(spec, MambaSpec) else spec.block_size,
            -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes),
            type(spec) in (FullAttentionSpec, MLAAttentionSpec),
        )
        for spec in specs
    ]


def footprint_of(groups: Sequence[tuple[int, int, bool]], block_size: int) -> Callable[[int], int]:
    """A function that gives the tokens that a context of a given length takes in the KV cache, in
    whole blocks of every group of layers, including the drawn token. Results are cached, since
    every request needs one."""

    @lru_cache(maxsize=1 << 16)
    def footprint(length: int) -> int:
        blocks = (min(length // size + 1, most) if size else most for size, most, _ in groups)
        return sum(blocks) * block_size

    return footprint


def ids_by_position(params: type) -> bool:
    """Whether a request can choose other tokens at each position of its prompt. The one list that
    vLLM 0.31 takes is for all positions: the model runner cannot use ids of each position for a
    prompt that it computes in several steps.

    Args:
        params: vLLM's class of sampling parameters.
    """
    return "ndarray" in str(getattr(params, "__annotations__", {}).get(SCORED_IDS))


def _of_chosen_tokens(found: Any) -> torch.Tensor | None:
    """The log-probabilities of a prompt's own tokens. The other columns belong to likelier ones."""
    return None if found is None else getattr(found, "logprobs", found)[:, 0]


def _forget_methods_of_tokenizers() -> None:
    """Let a closed model's tokenizers be freed. vLLM remembers which options a chat template's
    method takes, by the method itself, which holds the copies that vLLM makes of a tokenizer for
    its threads."""
    from vllm.utils import func_utils

    if known := getattr(func_utils, "_supports_kw", None):
        known.cache_clear()


def _require(owner: Any, path: str) -> Any:
    if absent_names(owner, path):
        raise _unsupported(f"{type(owner).__name__} has no {path}")
    return attrgetter(path)(owner)


@contextlib.contextmanager
def engine_core_here() -> Iterator[bool]:
    """Inside the block, in which a model is loaded, the engine core stays in this process, unless
    the user's environment says otherwise.

    vLLM takes this choice only from the environment, and keeps what it read when the first model
    was loaded. This variable, and the one that a worker on a CPU sets for its process group, are
    restored at the end. Yields whether the engine core will be in this process.
    """
    import vllm.envs

    vllm.envs.disable_envs_cache()
    names = (PROCESS_SWITCH, GROUP_NAME)
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ[PROCESS_SWITCH] = before.get(PROCESS_SWITCH) or "0"
    try:
        yield not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def process_groups() -> Iterator[None]:
    """Inside the block, in which a model is loaded, all process groups that it needs exist. After a
    failure, groups that no model needs are destroyed.

    vLLM makes them with the first model of a process, and keeps them in globals. They hold a
    thread, a socket and a file. The group for experts is missing if the first model has no experts.
    """
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        world = parallel_state.get_world_group()
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [[rank] for rank in range(world.world_size)],
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            group_name="ep",
        )
    makes_them, loaded = not torch.distributed.is_initialized(), False
    try:
        yield
        loaded = True
    finally:
        if makes_them and parallel_state._WORLD is not None:
            parallel_state._WORLD.made_by_genlm = True
        if not loaded:
            end_unused_process_groups()


def end_unused_process_groups() -> bool:
    """Destroy the process groups that this plugin's models have made, if no vLLM model is left in
    the process. Returns whether they were destroyed."""
    from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
    from vllm.v1.engine.core_client import InprocClient

    # vLLM froze all objects after loading. Unless they are unfrozen, its cycles are never
    # collected, and its clients are not listed.
    gc.unfreeze()
    if not getattr(parallel_state._WORLD, "made_by_genlm", False):
        return False
    if any(
        type(each) is InprocClient and hasattr(each, "engine_core") for each in gc.get_objects()
    ):
        return False
    cleanup_dist_env_and_memory()
    return True
