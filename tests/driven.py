"""An engine with ``genlm_step`` that a test drives through its hooks, as the core does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm.conformance.agreement import expect_frequencies, single_tokens
from genlm.conformance.programs import call
from genlm.core.types import Query, Request, SampleRequest, SamplingParams, ScoreRequest


class Driven:
    """An engine driven without a core; its attributes are those of the engine.

    Args:
        engine: The engine.
        width: How many token ids are not padding, if not all of them.
    """

    def __init__(self, engine: Any, width: int | None = None) -> None:
        self.engine, self.width = engine, width or engine.vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self, *new_requests: Request, dropped: Sequence[Request] = ()) -> dict[Request, Any]:
        """Make one step, and return its answers."""
        kinds: dict[type, list[Any]] = {Query: [], SampleRequest: [], ScoreRequest: []}
        for request in new_requests:
            kinds[type(request)].append(request)
        queries, samples, scores = kinds.values()
        asked = {"queries": queries, "samples": samples, "scores": scores, "width": self.width}
        answers = call(self.engine, "genlm_step", **asked, dropped=list(dropped))
        return {answer.request: answer.result for answer in answers}

    def ask(self, *requests: Request) -> list[Any]:
        """The engine's result for each request. All are admitted together."""
        answers, different = self.step(*requests), len({*requests})
        while len(answers) < different:
            answers |= self.step()
        return [answers[request] for request in requests]

    def check_frequencies(self, query: Query, **cut: Any) -> None:
        """Its own samples of a token come at the frequencies of the row, without padding."""
        params = SamplingParams(max_tokens=1, **cut)
        (row,) = self.ask(query)
        mass = (row[: self.width].double() / params.temperature).softmax(0)
        kept = mass.argsort(descending=True)[: params.top_k]
        kept = kept[: int((mass[kept].cumsum(0) < (params.top_p or 1)).sum()) + 1]
        left = torch.zeros_like(mass).index_copy(0, kept, mass[kept] / mass[kept].sum())
        drawn = self.ask(*(SampleRequest(query, params) for _ in range(2000)))
        expect_frequencies(f"draws with {cut}", drawn, single_tokens(left))
