"""Every part of SGLang that this plugin uses, behind one small typed interface.

SGLang has no public way to drive its scheduler in this process. This file uses what
``run_scheduler_process`` and ``Scheduler.event_loop_normal`` use, in the releases that
:data:`genlm.sgl.plugin.VERSIONS` names. Comments say where these differ. Besides this file only
``construction.py``, ``attention.py``, ``repairs.py`` and ``weights.py`` may import ``sglang``.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from genlm.core.errors import BackendUnavailableError, EngineError, InvalidOptionError
from genlm.kit import randomness
from genlm.kit.nan_rows import is_looked_for
from genlm.sgl import attention
from genlm.sgl.construction import construct, release_globals
from genlm.sgl.imports import POLL_SECONDS, import_whole
from genlm.sgl.repairs import Limit, repair

#: Modules that are imported before a model is loaded.
MODULES = (
    "sglang.srt.distributed",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
    "sglang.srt.server_args",
)

#: Held while a model is loaded, because SGLang's globals belong to the process. An interrupted load
#: still cleans up in its own thread, and the next load must wait for that.
LOADING = threading.Lock()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    while not LOADING.acquire(timeout=POLL_SECONDS):
        pass
    try:
        yield
    finally:
        LOADING.release()


class Scheduler:
    """SGLang's scheduler, owned by one thread and driven step by step.

    A row is a request for no new token, of which SGLang only runs the prompt. If a batch has only
    such requests, SGLang samples nothing, and leaves the logits unchanged. If a batch also has a
    sample, SGLang's sampler overwrites the logits of the whole batch, so the rows are read just
    before it.

    Args:
        options: SGLang's server arguments.
        gpu_id: The number of the GPU; 0 on the CPU.
        settings: See :func:`genlm.kit.settings.settings_of`.

    Raises:
        BackendUnavailableError: this process already has an SGLang model or a process group.
        InvalidOptionError: SGLang has no such argument, or has no room for any prompt.
        EngineError: SGLang has not loaded all weights.
    """

    def __init__(self, options: Mapping[str, Any], gpu_id: int, settings: Any = None) -> None:
        import_whole(MODULES)
        with _alone():
            self._load(options, gpu_id, settings)

    def _load(self, options: Mapping[str, Any], gpu_id: int, settings: Any) -> None:
        from sglang.srt.distributed import model_parallel_is_initialized
        from sglang.srt.sampling.sampling_params import SamplingParams

        if model_parallel_is_initialized() or torch.distributed.is_initialized():
            raise BackendUnavailableError(
                "SGLang keeps its configuration and its process group in globals, so a process can "
                "hold one SGLang model and no torch.distributed group besides; close the other "
                "model first, or use another process"
            )
        try:
            with randomness.left_alone():
                self._scheduler = construct(options, gpu_id, settings)
            self._require_room()
        except BaseException:
            release_globals()
            raise
        # Early releases make the stream in their event loop.
        if not hasattr(self._scheduler, "schedule_stream"):
            self._scheduler.schedule_stream = self._scheduler.device_module.Stream(priority=0)
        self._no_draw = SamplingParams(max_new_tokens=0)
        self._no_draw.normalize(None)
        # The rows of the current step, if the step samples and some rows are wanted.
        self._rows_wanted = False
        self._rows: torch.Tensor | None = None
        #: The keys of the requests whose prompts are not computed yet.
        self.computing: set[str] = set()
        #: The keys of draws that had a row with NaN, or infinity, if this is looked for.
        self.broken_draws: set[str] = set()
        self._largest: torch.Tensor | None = None  # of the logits of each request of a batch
        #: Token ids from this one on are padding.
        self.width = self.vocab_size
        sampler = self._scheduler.tp_worker.model_runner.sampler
        sampler.register_forward_pre_hook(self._before_sampling)

    def _require_room(self) -> None:
        if self.longest_prompt < 1:
            raise InvalidOptionError(
                "SGLang, which keeps some tokens for itself, has no room for a prompt in a pool of "
                f"{self.pool_tokens} tokens and a context length of "
                f"{self._scheduler.model_config.context_len}; give larger engine options "
                "max_total_tokens and context_length"
            )

    # --- what was loaded --------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self._scheduler.tokenizer

    @property
    def config(self) -> Any:
        """The model's configuration, as transformers reads it."""
        return self._scheduler.model_config.hf_config

    @property
    def model(self) -> Any:
        """The ``torch.nn.Module`` that SGLang runs."""
        return self._scheduler.tp_worker.model_runner.model

    @property
    def dtype(self) -> Any:
        """The type in which the model computes."""
        return self._scheduler.model_config.dtype

    @property
    def looks_for_nan(self) -> bool:
        """See :func:`genlm.kit.nan_rows.is_looked_for`."""
        return is_looked_for(str(self._scheduler.device), str(self.dtype))

    @property
    def vocab_size(self) -> int:
        return int(self._scheduler.model_config.vocab_size)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end every sample, unless it is told to ignore them: those of the model
        and of the tokenizer."""
        stops = {*(self._scheduler.model_config.hf_eos_token_id or ()), self.tokenizer.eos_token_id}
        stops |= set(getattr(self.tokenizer, "additional_stop_token_ids", None) or ())
        return frozenset(stops - {None})

    @property
    def longest_prompt(self) -> int:
        """The longest prompt, in tokens, that the scheduler takes."""
        # SGLang admits no prompt that would leave less than a page of the pool.
        room = self.pool_tokens - self.page_size
        return min(int(self._scheduler.max_req_input_len), room) - 1

    @property
    def pool_tokens(self) -> int:
        """How many tokens the key/value pool holds."""
        return int(self._scheduler.max_total_num_tokens)

    @property
    def keeps_prompts(self) -> bool:
        """Whether other requests can find the state of a computed prompt."""
        return not self._scheduler.disable_radix_cache

    @property
    def page_size(self) -> int:
        """How many tokens a page has. Common prefixes are found page by page."""
        return int(self._scheduler.page_size)

    def repair(self, settings: Any) -> list[Limit]:
        """See :func:`genlm.sgl.repairs.repair`."""
        backend = self._scheduler.tp_worker.model_runner.attn_backend
        return repair(self.model, settings, attention.is_installed(backend))

    def hide_padding(self, width: int) -> None:
        """Keep token ids from ``width`` on from being drawn, and from having mass in rows and, if
        this SGLang computes a prompt's logits in the expected place, in scores."""
        self.width = width
        processor: Any = getattr(self.model, "logits_processor", None)
        if (own := getattr(processor, "_get_logits", None)) is not None:
            processor._get_logits = lambda *args, **how: self._without_padding(own(*args, **how))

    def _without_padding(self, logits: torch.Tensor) -> torch.Tensor:
        logits[..., self.width :] = -torch.inf
        return logits

    # --- the journey of a request -----------------------------------------------------------------

    def submit(
        self,
        key: str,
        token_ids: Sequence[int],
        *,
        adapter: str | None,
        namespace: str | None = None,
        draw: Mapping[str, Any] | None = None,
        scored_from: int | None = None,
    ) -> None:
        """Queue a prompt.

        Args:
            key: The name of the request. No key may be a prefix of another.
            adapter: The id of a loaded adapter. Each has its own part of the radix cache.
            namespace: Only requests of the same namespace share the radix cache.
            draw: SGLang's sampling parameters, for a sample.
            scored_from: For a score, the first token whose log-probability is wanted besides the
                row.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = self._no_draw
        if draw is not None:
            sampling = SamplingParams(**draw)
            sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=key,
            input_text="",
            input_ids=array("q", token_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=scored_from is not None,
            # The token before gives the first log-probability. SGLang computes all tokens from
            # there on.
            logprob_start_len=-1 if scored_from is None else scored_from - 1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            lora_id=adapter,
            extra_key=namespace,
        )
        self._scheduler.process_input_requests([request])
        self.computing.add(key)

    def step(self) -> dict[str, Any] | None:
        """Run the batch that the scheduler chooses; ``None`` if it can run nothing.

        Returns:
            The results of the finished requests, by key. The result of a score is its row and the
            other log-probabilities.
        """
        scheduler = self._scheduler
        with self._on_its_stream():
            last = scheduler.last_batch
            before = [*scheduler.running_batch.reqs, *(last.reqs if last else ())]
            batch = self._next_batch()
            given_up = self._given_up(before)
            if batch is None:
                return given_up or None
            self._rows_wanted = any(map(_wants_row, batch.reqs))
            self._rows = self._largest = None  # of a batch that failed
            with torch.inference_mode():
                result = scheduler.run_batch(batch)
            self._note_broken_draws(batch.reqs)
            rows, self._rows = self._rows, None
            if rows is None and self._rows_wanted:
                # The rows are taken before any other code sees the logits.
                rows = _log_probabilities(result.logits_output.next_token_logits)
            with torch.inference_mode():
                scheduler.process_batch_result(batch, result)
            scheduler.last_batch = batch
        if batch.forward_mode.is_extend():
            computed = [each for each in batch.reqs if each is not scheduler.chunked_req]
            self.computing.difference_update(str(each.rid) for each in computed)
        if rows is not None and rows.is_cuda:
            # This thread's own stream reads the rows, so SGLang must not reuse their memory before
            # that.
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return given_up | {
            str(request.rid): _result(request, None if rows is None else rows[i])
            for i, request in enumerate(batch.reqs)
            if request.finished()
        }

    def _given_up(self, before: Sequence[Any]) -> dict[str, Any]:
        """Errors, by key, for running requests that SGLang dropped when it chose a batch, because
        the pool was full and no other request could make room."""
        return {
            str(request.rid): EngineError(
                f"SGLang gave up a draw half way: its pool of {self.pool_tokens} tokens is full, "
                f"of which pinned prefixes hold {self.locked_tokens}; ask for fewer max_tokens, "
                "call clear_kv_cache(), or load the model with a larger engine option "
                "max_total_tokens"
            )
            for request in before
            if request.to_finish and request not in self._scheduler.running_batch.reqs
        }

    def abort(self, key: str) -> None:
        """Drop a request. A waiting request is dropped at once. The next step may still report a
        running one as finished."""
        from sglang.srt.managers.io_struct import AbortReq

        self.computing.discard(key)
        self.broken_draws.discard(key)
        with self._on_its_stream():
            self._scheduler.abort_request(AbortReq(rid=key))

    def _before_sampling(self, sampler: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        logits = self._without_padding(arguments[0].next_token_logits)
        if self._rows_wanted:
            self._rows = _log_probabilities(logits)
        if self.looks_for_nan:
            self._largest = logits.amax(dim=-1)  # NaN if one of them is
            if bool((broken := ~self._largest.isfinite()).any()):
                logits[broken] = 0.0  # otherwise the sampler would raise for the whole batch

    def _note_broken_draws(self, requests: Sequence[Any]) -> None:
        largest, self._largest = self._largest, None
        if largest is not None:
            finite = largest.isfinite().tolist()
            self.broken_draws |= {
                str(request.rid)
                for request, good in zip(requests, finite, strict=False)
                if not (good or _wants_row(request))
            }

    def refuse_next(self) -> tuple[str, int]:
        """Drop the request that the scheduler would have taken first.

        Returns:
            The key of the request, and how many tokens of the pool it needs, including those to be
            drawn.
        """
        request = self._scheduler.waiting_queue[0]
        self.abort(str(request.rid))
        return str(request.rid), len(
            request.origin_input_ids
        ) + request.sampling_params.max_new_tokens

    def drop_everything(self) -> None:
        """Forget all requests, also those that an exception left unfinished, and empty the caches.

        Raises:
            EngineError: the scheduler still holds something.
        """
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        self.computing.clear()
        self.broken_draws.clear()
        scheduler.waiting_queue.clear()
        scheduler.chunked_req = None
        scheduler._pending_chunked_abort_req = None
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.last_batch = None
        self.flush()

    def _next_batch(self) -> Any:
        """The next batch. By itself, the scheduler computes prompts as long as new ones arrive. So
        after each batch of prompts, the running samples get a turn."""
        if not self._is_the_turn_of_draws():
            return self._choice()
        with self._without_prompts():
            batch = self._choice()
        return batch or self._choice()

    def _is_the_turn_of_draws(self) -> bool:
        scheduler = self._scheduler
        last = scheduler.last_batch
        if last is None or not last.forward_mode.is_extend():
            return False
        if scheduler._pending_chunked_abort_req is not None:
            return False  # SGLang gives up a dropped prompt only if it sees the prompt
        return any(
            not request.finished() and request is not scheduler.chunked_req
            for request in (*scheduler.running_batch.reqs, *last.reqs)
        )

    @contextlib.contextmanager
    def _without_prompts(self) -> Iterator[None]:
        """Hide the waiting prompts, and the partly computed one, from the scheduler."""
        scheduler = self._scheduler
        waiting, half_computed = scheduler.waiting_queue, scheduler.chunked_req
        scheduler.waiting_queue, scheduler.chunked_req = [], None
        try:
            yield
        finally:
            # The requests that the scheduler has put back to make room for other samples come
            # first.
            scheduler.waiting_queue += waiting
            scheduler.chunked_req = half_computed

    def _choice(self) -> Any:
        scheduler = self._scheduler
        for _ in range(2):
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            # `scheduler.cur_batch_for_debug` stays None; otherwise the watchdog would act.
            if plan.batch_to_run is not None:
                return plan.batch_to_run
            scheduler.last_batch = None
            # In early releases this flag stays true after all requests have left: clear it and try
            # again.
            scheduler.running_batch.batch_is_full = False
        return None

    @contextlib.contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """Inside the block, work runs on SGLang's stream, as in SGLang's own loop. This stream
        first waits for the thread's own stream, which afterwards waits for it."""
        device, stream = self._scheduler.device_module, self._scheduler.schedule_stream
        own = device.current_stream()
        stream.wait_stream(own)
        try:
            with device.StreamContext(stream):
                yield
        finally:
            own.wait_stream(stream)

    # --- the radix cache --------------------------------------------------------------------------

    def flush(self) -> None:
        """Empty the radix cache and the KV pool. Locks are removed too."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        scheduler.last_batch = None
        if all(request.finished() for request in scheduler.running_batch.reqs):
            # Early releases keep finished requests until their next step.
            scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        # The device's memory is not emptied: the pool stays, and a useless garbage collection would
        # take a second.
        with self._on_its_stream():
            flushed = scheduler.flush_cache(empty_cache=False)
        if not flushed:
            raise EngineError(
                "SGLang did not flush its cache, because it holds requests; close the model and "
                "load it again"
            )

    def lock(self, token_ids: Sequence[int], adapter: str | None) -> Any:
        """Protect a cached prompt from eviction; returns what :meth:`unlock` needs."""
        with self._on_its_stream():
            node = self._match(token_ids, adapter).last_device_node
            return node, self._scheduler.tree_cache.inc_lock_ref(node).to_dec_params()

    def known(self, prompts: Sequence[tuple[Sequence[int], str | None]]) -> list[int]:
        """How many leading tokens of each prompt, with its adapter, are cached."""
        if not prompts:
            return []
        with self._on_its_stream():
            found = [self._match(*prompt) for prompt in prompts]
        # Early releases return where the tokens are, instead of how many.
        return [
            each.device_prefix_len
            if hasattr(each, "device_prefix_len")
            else len(each.device_indices)
            for each in found
        ]

    def _match(self, token_ids: Sequence[int], adapter: str | None) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(token_ids=array("q", token_ids), extra_key=adapter)
        return self._scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))

    def unlock(self, lock: Any) -> None:
        node, receipt = lock
        with self._on_its_stream():
            self._scheduler.tree_cache.dec_lock_ref(node, receipt)

    @property
    def locked_tokens(self) -> int:
        """How many tokens of the pool cannot be evicted."""
        return int(self._scheduler.tree_cache.protected_size())

    # --- adapters ---------------------------------------------------------------------------------

    def load_adapter(self, adapter: str, path: str, *, named: str) -> None:
        """Load a folder of plain LoRA under an id.

        Args:
            adapter: The id.
            path: The folder.
            named: The adapter's name in error messages.

        Raises:
            EngineError: SGLang rejects it. Nothing of it remains.
        """
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        scheduler = self._scheduler
        manager = scheduler.tp_worker.model_runner.lora_manager
        try:
            with self._on_its_stream():
                result = scheduler.load_lora_adapter(
                    LoadLoRAAdapterReqInput(lora_name=adapter, lora_path=path, lora_id=adapter)
                )
                if not result.success:
                    raise ValueError(result.error_message)
                # SGLang compares layers and shapes with the model's only when it first computes
                # with an adapter, so this happens now.
                manager.fetch_new_loras({adapter})
        except Exception as error:
            # After a failure, SGLang keeps the part of an adapter that it has loaded.
            for remains in (manager.configs, manager.loras, manager.lora_refs):
                remains.pop(adapter, None)
            raise EngineError(
                f"SGLang cannot load the adapter at {named}: {str(error).rstrip('.')}; give a "
                f"PEFT folder made for this model, of rank {manager.max_lora_rank} or less (engine "
                "option max_lora_rank)"
            ) from error

    def unload_adapter(self, adapter: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        with self._on_its_stream():
            result = self._scheduler.unload_lora_adapter(
                UnloadLoRAAdapterReqInput(lora_name=adapter, lora_id=adapter)
            )
        if not result.success:
            raise EngineError(f"SGLang cannot unload the adapter {adapter}: {result.error_message}")

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the weights, the pool and SGLang's globals, so that another model can be
        loaded."""
        self._scheduler.release_host_resources()
        del self._scheduler
        release_globals()
        gc.collect()  # the scheduler and its parts form reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _wants_row(request: Any) -> bool:
    return int(request.sampling_params.max_new_tokens) == 0


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Float32 log-probabilities, made outside inference mode, so that callers may write into
    them."""
    with torch.inference_mode(False):
        return torch.log_softmax(logits.float(), dim=-1)


def _result(request: Any, row: torch.Tensor | None) -> Any:
    """The result of a finished request: a row, ``[vocab_size]`` float32; the drawn ids, without the
    stop token; or an error."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if isinstance(request.finished_reason, FINISH_ABORT):  # SGLang has run another request instead
        return EngineError(f"SGLang aborted the request: {request.finished_reason.message}")
    if request.return_logprob and row is not None:
        return row, row.new_tensor(request.logprob.input_token_logprobs_val[1:])
    if _wants_row(request):
        return row
    drawn = list(request.output_ids)
    # The stop token is removed for any reason: early releases report "length" if the last allowed
    # token is a stop token.
    if drawn and drawn[-1] in (request.sampling_params.stop_token_ids or ()):
        drawn.pop()
    return drawn
