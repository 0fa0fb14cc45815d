"""Requests that vLLM is working on: handed over, advanced step by step, and dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import define, field

from genlm.core.errors import EngineError
from genlm.core.types import Query, Request, SampleRequest
from genlm.vllm.internals import EngineCore, Output

# Steps without any computed token, beyond those that the prompts in flight explain, before the
# engine is given up.
PATIENCE = 1000


@define(eq=False)
class VllmRequest:
    """One request in vLLM: in flight, or answered and held for more tokens, as a live session.

    Attributes:
        request: As the core admitted it.
        prompt: What vLLM computes: the context, and for a score also the continuation without its
            last token.
        request_id: Its id in vLLM; its row is captured under it.
        tokens: The most tokens that it takes in the key/value cache, with those that it may still
            draw.
        resumable: Whether vLLM keeps it when it is finished, for more tokens.
        params: vLLM's sampling parameters.
        drawn: The tokens drawn so far.
        failure: Why vLLM ended it without drawing anything.
        prompt_logprobs: Those of its prompt's tokens from the second on, if it wants them and its
            prompt is computed.
    """

    request: Request
    prompt: Query
    request_id: str
    tokens: int
    resumable: bool = False
    params: Any = field(init=False, default=None)
    drawn: list[int] = field(init=False, factory=list)
    failure: str | None = field(init=False, default=None)
    prompt_logprobs: torch.Tensor | None = field(init=False, default=None)

    @property
    def wants_row(self) -> bool:
        return not isinstance(self.request, SampleRequest)

    def take(self, output: Output) -> bool:
        """Note the result of a step. ``True`` when the request is finished."""
        self.drawn += output.token_ids
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finished is not None and not self.drawn:
            self.failure = output.finished
        return output.finished is not None or (self.resumable and bool(self.drawn))


class RequestsInFlight:
    """All requests in flight on one engine core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._by_id: dict[str, VllmRequest] = {}
        self._idle_steps = 0
        self.tokens = 0  # the most that all take in the key/value cache

    def __len__(self) -> int:
        return len(self._by_id)

    def launch(
        self,
        request: VllmRequest,
        params: Any,
        cache_salt: str | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        """Hand a request to vLLM.

        Args:
            request: The request.
            params: vLLM's sampling parameters.
            cache_salt: Only requests with the same salt share key/value state.
            pinned: Whether it will be held, but never extended.
        """
        self._enter(request, params)
        self._core.add(
            request.request_id,
            request.prompt.token_ids,
            params,
            request.prompt.adapter,
            resumable=request.resumable,
            cache_salt=cache_salt,
            pinned=pinned,
        )

    def extend(self, request: VllmRequest, session: VllmRequest) -> None:
        """Let vLLM go on with an idle session, whose context the request extends."""
        new = request.prompt.context.since(session.prompt.length)
        request.request_id = session.request_id
        self._enter(request, session.params)
        self._core.extend(session.request_id, new, session.params, session.prompt.adapter)

    def _enter(self, request: VllmRequest, params: Any) -> None:
        request.params = params
        self._by_id[request.request_id] = request
        self.tokens += request.tokens

    def advance(self) -> list[VllmRequest]:
        """One step of vLLM. Returns the requests that it finished."""
        over = []
        outputs = self._core.step()
        for output in outputs:
            request = self._by_id.get(output.request_id)
            if request is not None and request.take(output):
                over.append(request)
                self._remove(request)
        self._watch(outputs)
        return over

    def finish(self) -> list[VllmRequest]:
        """Step until nothing is in flight."""
        over = []
        while self._by_id:
            over += self.advance()
        return over

    def drop(self, requests: Collection[Request]) -> list[VllmRequest]:
        """Forget some; vLLM must be told to drop them. Requests not in flight are ignored."""
        dropped = [each for each in self._by_id.values() if each.request in requests]
        for each in dropped:
            self._remove(each)
        return dropped

    def clear(self) -> list[str]:
        """Forget all; the request ids that vLLM must drop."""
        dropped = list(self._by_id)
        self._by_id.clear()
        self.tokens = self._idle_steps = 0
        return dropped

    def _remove(self, request: VllmRequest) -> None:
        del self._by_id[request.request_id]
        self.tokens -= request.tokens

    def _watch(self, outputs: Sequence[Output]) -> None:
        """Avoid a hang: give up an engine that makes steps without computing anything.

        A step without results may be one of many that compute a long prompt.
        """
        self._idle_steps = 0 if outputs or not self._by_id else self._idle_steps + 1
        if self._idle_steps > PATIENCE + self.tokens // self._core.longest_chunk:
            raise EngineError(
                f"vLLM made {self._idle_steps} steps without computing anything for "
                f"{len(self._by_id)} requests; load with a larger kv_cache_memory_bytes or "
                "gpu_memory_utilization, or with live_sessions=False"
            )
