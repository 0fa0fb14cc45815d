"""An engine with ``genlm_step`` that a test drives through its hooks, as the core does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genlm.conformance.programs import call
from genlm.core.types import Query, Request, SampleRequest, ScoreRequest


class Driven:
    """An engine, with its own attributes, and what all that is asked of it says."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self, *newcomers: Request, dropped: Sequence[Request] = ()) -> dict[Request, Any]:
        """One step: what was answered."""
        kinds: dict[type, list[Any]] = {Query: [], SampleRequest: [], ScoreRequest: []}
        for request in newcomers:
            kinds[type(request)].append(request)
        queries, samples, scores = kinds.values()
        asked = {"queries": queries, "samples": samples, "scores": scores}
        answers = call(self.engine, "genlm_step", **asked, dropped=list(dropped))
        return {answer.request: answer.result for answer in answers}

    def ask(self, *requests: Request) -> list[Any]:
        """What the engine says of each request, admitted together."""
        answers = self.step(*requests)
        while len(answers) < len(set(requests)):
            answers |= self.step()
        return [answers[request] for request in requests]
