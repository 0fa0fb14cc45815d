"""Requests that vLLM has not begun. Of requests with a common prefix, one begins a step earlier.

A request finds the full blocks that other requests have, or that the same step computes. A fork
also finds the part of a block that others had before the step. So requests that begin in the same
step would each compute the shared part of the block in which they diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genlm.kit.new_requests import MIN_TOKENS_TO_WAIT, Leaders
from genlm.kit.prefixes import key_of

#: A key of ``SamplingParams.extra_args``. Its value is the most leading tokens that the request may
#: reuse from other requests. The log-probabilities of later tokens are wanted, so these tokens must
#: be computed.
READS_KEY = "genlm_reads"


class NewRequests:
    """The new requests of one scheduler.

    Args:
        scheduler: vLLM's scheduler.
        block_size: Tokens in a block. A request that waits saves fewer tokens than this.
        known: How many leading tokens of a request need not be computed if it begins now. Its
            second argument is how many tokens another request shares.
        least_saved: Requests wait only if this saves at least so many tokens in all.
    """

    def __init__(
        self, scheduler: Any, block_size: int, known: Callable[[Any, int], int], least_saved: int
    ) -> None:
        self._scheduler, self._known = scheduler, known
        self._size, self._least_saved = block_size, least_saved
        self._leaders: Leaders[Any] = Leaders(least_saved)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside the block, requests that should wait are not in vLLM's queue."""
        queue = self._scheduler.waiting
        asked = [*queue]
        held = self._held(asked)
        if not held:
            yield
            return
        queue.remove_requests(held)
        try:
            yield
        finally:
            left, before = [*queue], {*asked}
            staying = {*left, *held}
            # Requests that vLLM has preempted.
            order = [each for each in left if each not in before]
            order += [each for each in asked if each in staying]
            queue.remove_requests(left)
            queue.prepend_requests(reversed(order))

    def _held(self, asked: list[Any]) -> list[Any]:
        """The requests that should wait. If there are any, also the requests behind them to which
        vLLM would give their places."""
        places = self._scheduler.max_num_running_reqs - len(self._scheduler.running)
        if min(places, len(asked)) * (self._size - 1) < self._least_saved:
            return []
        some = [each for each in asked[:places] if _is_new(each) and not self._is_fork(each)]
        if len(some) * (self._size - 1) < self._least_saved:
            return []
        new = {each: _key(each) for each in some}
        begun = {each: _key(each) for each in self._scheduler.requests.values() if _leads(each)}
        wait = self._leaders.waiting(begun, new, self._known)
        return [each for at, each in enumerate(asked) if each in wait or (wait and at >= places)]

    def _is_fork(self, request: Any) -> bool:
        """Whether other requests have all but a few of the request's tokens, as is usual."""
        before = readable(request)
        known = self._known(request, before)
        return known % self._size > 0 and before - known < MIN_TOKENS_TO_WAIT


def readable(request: Any) -> int:
    """The most leading tokens that a request may take over from others."""
    most: int = wishes_of(request).get(READS_KEY, request.num_tokens - 1)
    return most


def wishes_of(request: Any) -> dict[str, Any]:
    """The arguments for the plugin that a request's sampling parameters have."""
    return getattr(request.sampling_params, "extra_args", None) or {}


def is_text(request: Any) -> bool:
    """Whether a request's prompt consists only of token ids."""
    return not request.mm_features and request.prompt_embeds is None


def _is_new(request: Any) -> bool:
    """Whether a request has not begun, and can share the blocks of others."""
    reads = not request.skip_reading_prefix_cache
    return reads and not request.num_computed_tokens and _shares(request)


def _leads(request: Any) -> bool:
    """Whether a request has begun, and has so many tokens left to compute that others may wait for
    it."""
    computed: int = request.num_computed_tokens
    return computed > 0 and request.num_tokens - computed >= MIN_TOKENS_TO_WAIT and _shares(request)


def _shares(request: Any) -> bool:
    return not request.cache_salt and is_text(request)


def _key(request: Any) -> bytes:
    adapter, shared = request.lora_request, request.all_token_ids[: readable(request) + 1]
    return key_of(adapter.lora_int_id if adapter else 0, shared)
