"""The requests that vLLM is working on: how they are handed over, advanced and dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from genlm.core.errors import EngineError
from genlm.core.types import Request
from genlm.vllm.cache_usage import CacheUsage
from genlm.vllm.internals import EngineCore
from genlm.vllm.request import Output, VllmRequest

# How many steps may compute no token, beyond those that the prompts in flight explain, before vLLM
# counts as standing still, and before the engine is given up.
STANDSTILL_STEPS, GIVE_UP_STEPS = 30, 1000


class RequestsInFlight:
    """All requests in flight on one engine core.

    Args:
        core: The engine core.
        usage: Counts the requests for as long as vLLM has them.
    """

    def __init__(self, core: EngineCore, usage: CacheUsage) -> None:
        self._core, self._usage = core, usage
        self._by_id: dict[str, VllmRequest] = {}
        self._idle_steps = 0
        self.tokens = 0  # the most tokens of the KV cache that all requests together may take

    def __len__(self) -> int:
        return len(self._by_id)

    def launch(self, request: VllmRequest, cache_salt: str | None, *, pinned: bool) -> None:
        """Hand a request to vLLM; see :meth:`EngineCore.add`."""
        self._enter(request)
        self._usage.add(request)
        self._core.add(request, cache_salt, pinned=pinned)

    def extend(self, request: VllmRequest, session: VllmRequest) -> None:
        """Let vLLM continue an idle session, whose context the request extends."""
        request.request_id, request.params = session.request_id, session.params
        self._enter(request)
        self._usage.extend(session, request)
        self._core.extend(request, request.prompt.context.since(session.length))

    def _enter(self, request: VllmRequest) -> None:
        self._by_id[request.request_id] = request
        self.tokens += request.tokens

    def advance(self) -> list[VllmRequest]:
        """Make one step of vLLM, and return the finished requests. vLLM keeps those that are
        resumable."""
        finished = []
        outputs = self._core.step()
        for output in outputs:
            request = self._by_id.get(output.request_id)
            if request is not None and request.take(output):
                finished.append(request)
                self._remove(request)
                if request.is_kept:
                    self._usage.complete(request)
                else:
                    self._usage.remove(request)
        self._watch(outputs)
        return finished

    def finish(self) -> list[VllmRequest]:
        """Step until nothing is in flight."""
        finished = []
        while self._by_id:
            finished += self.advance()
        return finished

    def drop(self, requests: Collection[Request]) -> list[VllmRequest]:
        """Forget some requests. The caller must tell vLLM to drop them. Requests not in flight are
        ignored."""
        dropped = [each for each in self._by_id.values() if each.request in requests]
        for each in dropped:
            self._remove(each)
            self._usage.remove(each)
        return dropped

    def clear(self) -> list[str]:
        """Forget all requests, and return the ids that vLLM must drop."""
        dropped = list(self._by_id)
        self._by_id.clear()
        self._usage.clear()
        self.tokens = self._idle_steps = 0
        return dropped

    def has_stood_still(self, steps: int = STANDSTILL_STEPS) -> bool:
        """Whether vLLM has made more than this many steps without computing anything."""
        return self._idle_steps > steps + self.tokens // self._core.longest_chunk

    def _remove(self, request: VllmRequest) -> None:
        del self._by_id[request.request_id]
        self.tokens -= request.tokens

    def _watch(self, outputs: Sequence[Output]) -> None:
        """Give up an engine that makes many steps without computing anything, so that it does not
        hang for ever.

        A step without results may be one of many that compute a long prompt.
        """
        self._idle_steps = 0 if outputs or not self._by_id else self._idle_steps + 1
        if self.has_stood_still(GIVE_UP_STEPS):
            raise EngineError(
                f"vLLM made {self._idle_steps} steps without computing anything for "
                f"{len(self._by_id)} requests; load with a larger kv_cache_memory_bytes or "
                "gpu_memory_utilization, or with live_sessions=False"
            )
