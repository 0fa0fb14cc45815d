"""Forks that cost the same as extensions: a new request takes over a live request's partly filled
block.

vLLM's prefix cache shares only full blocks, so a fork of a live session would compute up to a block
of tokens again. But vLLM can copy a block on write: if the hit that
``KVCacheManager.get_computed_blocks`` reports ends inside its last block, the cache manager gives
the request its own block, and the workers copy the shared one into it before the forward pass. vLLM
reports such hits only for models with Mamba layers. Here they are reported for live requests.

vLLM imports this module by name, in the process of its engine core. All names of vLLM that it uses
are checked when a model is loaded; without them, or if they do not suffice, forks are off.
"""

from __future__ import annotations

import bisect
import collections
import copy
import inspect
from collections.abc import Hashable
from typing import Any, cast

from genlm.core.logs import get_logger
from genlm.kit.new_requests import tokens_per_forward
from genlm.vllm.new_requests import NewRequests, is_text, readable, wishes_of

log = get_logger()

SCHEDULER_NAMES = (
    "schedule", "requests", "running", "max_num_running_reqs", "waiting.remove_requests",
    "waiting.prepend_requests", "connector", "hash_block_size", "vllm_config.attention_config",
    "kv_cache_config.kv_cache_groups", "kv_cache_manager.enable_caching",
    "kv_cache_manager.get_computed_blocks", "kv_cache_manager.take_kv_cache_block_copies",
    "kv_cache_manager.coordinator.single_type_managers",
)  # fmt: skip
BLOCKS_NAMES = ("block_size", "req_to_blocks", "_has_partial_local_hit", "_apply_cow")
REQUEST_NAMES = (
    "request_id", "all_token_ids", "num_tokens", "num_computed_tokens", "block_hashes",
    "lora_request", "cache_salt", "mm_features", "prompt_embeds", "skip_reading_prefix_cache",
    "sampling_params",
)  # fmt: skip
SIGNATURES = (["request"], ["request", "max_cache_hit_length"])  # of vLLM up to 0.32, and of 0.33

#: A key of ``SamplingParams.extra_args``. Its value is the id of a request that is likely to have
#: all tokens that a fork may take over, so that no other is looked for.
SOURCE_KEY = "genlm_source"

#: The attribute of a scheduler that holds its forks.
MARK = "genlm_forks"

#: For each beginning of full blocks, the tokens of the next block and the ids of requests that have
#: them, sorted by tokens.
Sources = dict[Hashable, list[tuple[list[int], str]]]


def forking_scheduler(vllm_config: Any, **parts: Any) -> Any:
    """The value of vLLM's option ``scheduler_cls``: makes the scheduler that vLLM would choose
    itself, with forks if possible."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    scheduler = config.get_scheduler_cls()(vllm_config=vllm_config, **parts)
    if missing := _missing_names(scheduler):
        log.warning("vllm.forks_off", reason=f"this vLLM has no {', '.join(missing)}")
    elif reason := _unsuited(scheduler):
        log.info("vllm.forks_off", reason=reason)
    else:
        setattr(scheduler, MARK, Forks(scheduler))
    return scheduler


class Forks:
    """Wraps two methods of a scheduler.

    The source of a fork may be any request that holds blocks: an idle session, a request that
    continues in the same step (it writes after the copy, and beyond the copied part), a partly
    computed prompt.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        (self._blocks,) = manager.coordinator.single_type_managers
        self._requests: dict[str, Any] = scheduler.requests
        self._size: int = self._blocks.block_size
        # For the current step: the admitted requests; and the sources, by the number of full blocks
        # that they share.
        self._admitted: set[str] = set()
        self._sources: dict[int, Sources] = {}
        self._new_requests = NewRequests(scheduler, self._size, self._known, _tokens_per_forward())
        self._find, manager.get_computed_blocks = manager.get_computed_blocks, self._computed_blocks
        self._plan, scheduler.schedule = scheduler.schedule, self._schedule

    def _schedule(self, *args: Any, **options: Any) -> Any:
        self._admitted.clear()
        self._sources.clear()
        with self._new_requests.held_back():
            self._sources.clear()  # vLLM may preempt some sources before it admits requests
            return self._plan(*args, **options)

    def _known(self, request: Any, shared: int) -> int:
        """How many tokens a new request need not compute if it shares ``shared`` tokens with
        another one. vLLM finds full blocks, even if this step computes them."""
        return self._best_source(request, shared // self._size * self._size)[1]

    def _computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int]:
        """The computed blocks of a request, the number of tokens in them, and vLLM's third value.

        vLLM calls this for each request before it admits it. ``max_cache_hit_length`` is the most
        tokens that may be taken over; only 0.33 may give it.
        """
        limit = [] if max_cache_hit_length is None else [max_cache_hit_length]
        blocks, known, boundary = self._find(request, *limit)
        if known > (most := readable(request)):
            known = most // self._size * self._size
            blocks = type(blocks)((blocks.blocks[0][: known // self._size],))
        # A request admitted in this step is not a source yet. Copies are made before the forward
        # pass, but such a request may count tokens as computed that another request only computes
        # in this step, because vLLM enters blocks in its prefix cache when it schedules them.
        self._admitted.add(request.request_id)
        if limit or request.skip_reading_prefix_cache or not is_text(request):
            return blocks, known, boundary
        source, shared = self._best_source(request, known)
        if source is None:
            return blocks, known, boundary
        partial = self._blocks.req_to_blocks[source][known // self._size]
        return type(blocks)(([*blocks.blocks[0], partial],)), shared, boundary

    def _best_source(self, request: Any, known: int) -> tuple[str | None, int]:
        """The live request that shares the most tokens beyond the ``known`` ones, which are full
        blocks; and how many tokens it shares, including these."""
        full = known // self._size
        # A further full block would have been found, or must not be taken over.
        ours = request.all_token_ids[known : min(readable(request), known + self._size - 1)]
        if not ours:
            return None, known
        if (named := self._named_source(request, full, ours)) is not None:
            return named, known + len(ours)
        if full not in self._sources:
            self._sources[full] = self._sources_behind(full)
        sources = self._sources[full].get(_beginning(request, full), [])
        # In a sorted list, the sequences with the longest common prefix are neighbours.
        at = bisect.bisect(sources, (ours,))
        near = [
            (_agreeing(ours, tokens), source) for tokens, source in sources[max(at - 1, 0) : at + 1]
        ]
        shared, source = max(near, default=(0, ""))
        return (source, known + shared) if shared else (None, known)

    def _named_source(self, request: Any, full: int, ours: list[int]) -> str | None:
        """The source that a request names, if it has computed ``ours`` behind the same ``full``
        blocks."""
        named: str = wishes_of(request).get(SOURCE_KEY, "")
        source = self._requests.get(named)
        if source is None or named in self._admitted:
            return None
        known = full * self._size
        theirs = source.all_token_ids[known : min(source.num_computed_tokens, known + len(ours))]
        agrees = theirs == ours and _beginning(source, full) == _beginning(request, full)
        return named if agrees else None

    def _sources_behind(self, full: int) -> Sources:
        """The tokens that each live request has computed in the block after ``full`` blocks.

        During a step this does not change: vLLM preempts before it admits.
        """
        known, sources = full * self._size, collections.defaultdict(list)
        for source in self._requests.values():
            # Tokens that an asynchronous scheduler has computed but does not know yet are left out.
            end = min(source.num_computed_tokens, known + self._size)
            computed = source.all_token_ids[known:end]
            if computed and source.request_id not in self._admitted and is_text(source):
                sources[_beginning(source, full)].append((computed, source.request_id))
        for each in sources.values():
            each.sort()
        return sources


def _tokens_per_forward() -> int:
    from vllm.platforms import current_platform

    return tokens_per_forward(current_platform.device_type)


def _beginning(request: Any, full: int) -> Hashable:
    """A value that is equal for two requests if they have the same first ``full`` blocks, adapter
    and cache salt."""
    if full:  # hashes are chained, so they cover adapter and salt too
        return cast(Hashable, request.block_hashes[full - 1])
    adapter = request.lora_request
    return adapter and adapter.lora_name, request.cache_salt


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """The length of the common prefix."""
    most = range(min(len(ours), len(theirs)))
    return bisect.bisect_left(most, True, key=lambda at: ours[: at + 1] != theirs[: at + 1])


def _missing_names(scheduler: Any) -> list[str]:
    """The names that forks need and this vLLM lacks."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    if missing := absent_names(scheduler, *SCHEDULER_NAMES):
        return missing
    manager = scheduler.kv_cache_manager
    missing = absent_names(Request("", [0], SamplingParams(max_tokens=1), None), *REQUEST_NAMES)
    missing += absent_names(manager.coordinator.single_type_managers[0], *BLOCKS_NAMES)
    missing += absent_names(SchedulerOutput, "kv_cache_block_copies")
    if list(inspect.signature(manager.get_computed_blocks).parameters) not in SIGNATURES:
        missing.append("get_computed_blocks(request)")
    return missing


def absent_names(owner: Any, *paths: str) -> list[str]:
    """The dotted names that an object of vLLM lacks."""
    absent = object()
    return [path for path in paths if _found(owner, path, absent) is absent]


def _found(owner: Any, path: str, absent: object) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, absent)
    return owner


def _unsuited(scheduler: Any) -> str | None:
    """Why a model cannot have forks; ``None`` if it can."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if not scheduler.kv_cache_manager.enable_caching:
        return "prefix caching is off"
    if scheduler.connector is not None:
        return "a KV connector fills blocks too"
    # vLLM copies the n-th part of a cache's memory, which is a block only if blocks are the first
    # dimension. They are for all of vLLM's own attention on these platforms, but not for ROCM_ATTN
    # of 0.28.
    chosen = scheduler.vllm_config.attention_config.backend
    if not (current_platform.is_cuda() or current_platform.is_cpu()) or (
        chosen is not None and chosen.name == "CUSTOM"
    ):
        return "the layout of the KV cache is not known"
    # With a window or Mamba layers, the source may have dropped state that a fork from an earlier
    # position needs.
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, MLAAttentionSpec):
        return "not all layers have full attention"
    (spec,), (blocks,) = specs, scheduler.kv_cache_manager.coordinator.single_type_managers
    if spec.sliding_window or spec.attention_chunk_size or getattr(spec, "non_causal", False):
        return "not all layers have full, causal attention"
    if not spec.block_size == blocks.block_size == scheduler.hash_block_size:
        return "blocks are spread over several workers"
    return None
