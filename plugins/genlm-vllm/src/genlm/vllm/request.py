"""One request in vLLM, and the result of a step for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attrs import define, field

from genlm.core.types import Query, Request, SampleRequest


class Output(NamedTuple):
    """The result of one step for one request.

    Attributes:
        request_id: The request.
        token_ids: The tokens drawn in this step; empty while a prompt is still being computed.
        finished: Why vLLM ended the request; as text ``"stop"``, ``"length"``, ``"error"``, ...;
            ``None`` if it did not.
        prompt_logprobs: ``[n]`` float32, the log-probabilities of the prompt's last tokens given
            those before them, at least of all tokens that were computed for this request after the
            first. Present only if the request wants them, in the step that completes its prompt.
    """

    request_id: str
    token_ids: list[int]
    finished: Any
    prompt_logprobs: torch.Tensor | None = None


@define(eq=False)
class VllmRequest:
    """One request in vLLM: in flight, or answered and held for more tokens, as a live session.

    Attributes:
        request: As the core admitted it.
        prompt: The tokens that vLLM computes: the context and, for a score, the continuation
            without its last token.
        tokens: The most tokens that the request takes in the KV cache, including those that it may
            still draw.
        shareable: How many leading tokens vLLM may take over from other requests.
        resumable: Whether vLLM keeps the finished request for more tokens.
        request_id: The request's id in vLLM, under which its row is captured. It gets one when it
            is handed over: a new one, or that of the session that it continues.
        length: The length of the prompt, in tokens.
        params: vLLM's sampling parameters.
        drawn: The tokens drawn so far.
        failure: Why vLLM ended the request without drawing anything.
        prompt_logprobs: The log-probabilities of the prompt's last tokens, if the request wants
            them and its prompt is computed.
    """

    request: Request
    prompt: Query
    tokens: int
    shareable: int
    resumable: bool = False
    request_id: str = ""
    length: int = field(init=False)
    params: Any = field(init=False, default=None)
    drawn: list[int] = field(init=False, factory=list)
    failure: str | None = field(init=False, default=None)
    prompt_logprobs: torch.Tensor | None = field(init=False, default=None)

    @length.default
    def _length(self) -> int:
        return self.prompt.length

    @property
    def wants_row(self) -> bool:
        return not isinstance(self.request, SampleRequest)

    @property
    def is_kept(self) -> bool:
        """Whether vLLM keeps the request, now that it is finished."""
        return self.resumable and self.failure is None

    def take(self, output: Output) -> bool:
        """Note the result of a step. ``True`` when the request is finished."""
        self.drawn += output.token_ids
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finished is not None and not self.drawn:
            self.failure = str(output.finished)
        return output.finished is not None or (self.resumable and bool(self.drawn))
