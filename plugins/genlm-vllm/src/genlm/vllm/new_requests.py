"""Requests that vLLM has not begun: of those that begin alike, one goes a step earlier.

A request finds the full blocks that others have or that the same step computes; a fork finds also
what others had of a block before the step. So of those that begin together, each would compute for
itself what they share of the block in which they part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genlm.kit.new_requests import MIN_TOKENS_TO_WAIT, Leaders
from genlm.kit.prefixes import key_of

#: In ``SamplingParams.extra_args``, int: take over no more first tokens than this: of those behind,
#: log-probabilities are wanted.
READS_KEY = "genlm_reads"


class NewRequests:
    """Those of one scheduler.

    Args:
        scheduler: vLLM's.
        block_size: Tokens in a block: who waits computes fewer less.
        known: How many first tokens of a request need not be computed if it begins now, of so many
            that another request shares.
        least_saved: They wait if this saves so many tokens in all.
    """

    def __init__(
        self, scheduler: Any, block_size: int, known: Callable[[Any, int], int], least_saved: int
    ) -> None:
        self._scheduler, self._known = scheduler, known
        self._size, self._least_saved = block_size, least_saved
        self._leaders: Leaders[Any] = Leaders(least_saved)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Meanwhile those that should wait are not in vLLM's queue."""
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
            order = [each for each in left if each not in before]  # which were preempted
            order += [each for each in asked if each in staying]
            queue.remove_requests(left)
            queue.prepend_requests(reversed(order))

    def _held(self, asked: list[Any]) -> list[Any]:
        """Those that should wait; and if there are any, those behind them to whom vLLM would give
        their places."""
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
        """Whether others have all but a few of its tokens: most requests are such."""
        before = readable(request)
        known = self._known(request, before)
        return known % self._size > 0 and before - known < MIN_TOKENS_TO_WAIT


def readable(request: Any) -> int:
    """How many of its first tokens a request need not compute, whatever others have."""
    wishes = getattr(request.sampling_params, "extra_args", None) or {}
    most: int = wishes.get(READS_KEY, request.num_tokens - 1)
    return most


def is_text(request: Any) -> bool:
    """Whether a request's prompt is nothing but token ids."""
    return not request.mm_features and request.prompt_embeds is None


def _is_new(request: Any) -> bool:
    """Whether it finds what others have, when it begins."""
    reads = not request.skip_reading_prefix_cache
    return reads and not request.num_computed_tokens and _shares(request)


def _leads(request: Any) -> bool:
    """Whether it has begun, and has much to compute."""
    computed: int = request.num_computed_tokens
    return computed > 0 and request.num_tokens - computed >= MIN_TOKENS_TO_WAIT and _shares(request)


def _shares(request: Any) -> bool:
    return not request.cache_salt and is_text(request)


def _key(request: Any) -> bytes:
    adapter, shared = request.lora_request, request.all_token_ids[: readable(request) + 1]
    return key_of(adapter.lora_int_id if adapter else 0, shared)
