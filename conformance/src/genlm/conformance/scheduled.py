"""The requests of a schedule: rows, samples and scores that differ in everything, and what each of
them gives alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from genlm.conformance.agreement import MovedDraw, may_follow, steady
from genlm.conformance.compare import ROUNDING_ATOL, Violation, answered, brief, check, with_adapter
from genlm.conformance.driver import Outcome
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: The name of an adapter that is rebound in the course of a schedule.
REBOUND_ADAPTER = "moving"

#: Lengths of prompts, lengths of drawn and scored continuations, and options of samples. The
#: lengths of these three tuples have no common divisor, so all combinations come up.
PROMPT_TOKENS = (3, 40, 15, 130, 31, 300, 8)
CONTINUATION_TOKENS = (5, 2, 3, 4, 12, 1, 20, 17, 8)
DRAW_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.0},
)

#: The most tokens of long rows at a low effort. A crowd of them is still more than a chunk.
QUICK_ROW_TOKENS = 513

#: How many different requests of each kind there are.
REQUESTS_OF_KIND = {"rows": 120, "long rows": 18, "draws": 27, "growing draws": 5, "scores": 12}

#: How many different requests there are at a low effort.
QUICK_REQUESTS_OF_KIND = {**REQUESTS_OF_KIND, "draws": 14}


@frozen
class ScheduledRow:
    """A request for one row."""

    prompt: TokenIds
    adapter: str | None = None

    def __str__(self) -> str:
        return f"row of {len(self.prompt)} tokens{with_adapter(self.adapter)}"

    def ask(self, live: Subject) -> Any:
        return live.lm.next_token_logprobs(self.prompt, lora_name=self.adapter)

    def alone(self, live: Subject, owner: str | None) -> ScheduledRow:
        live.cold(self.prompt, owner)
        return self

    def compare(self, live: Subject, outcome: Outcome, owner: str | None) -> None:
        cold = live.cold(self.prompt, owner)
        live.expect.same(outcome, cold, f"the row of {brief(self.prompt)}")


@frozen
class ScheduledScore:
    """A request for the scores of a continuation."""

    prompt: TokenIds
    tokens: TokenIds
    adapter: str | None = None

    def __str__(self) -> str:
        after = f"after {len(self.prompt)}{with_adapter(self.adapter)}"
        return f"score of {len(self.tokens)} tokens {after}"

    def ask(self, live: Subject) -> Any:
        return live.lm.sequence_logprobs(self.prompt, self.tokens, lora_name=self.adapter)

    def alone(self, live: Subject, owner: str | None) -> ScheduledScore:
        for place in self._places:
            live.cold(self.prompt + self.tokens[:place], owner)
        return self

    def compare(self, live: Subject, outcome: Outcome, owner: str | None) -> None:
        live.expect.scores(outcome, self.prompt, self.tokens, owner, places=self._places, how="")

    @property
    def _places(self) -> list[int]:
        last = len(self.tokens) - 1
        return sorted({0, last // 2, last})


@frozen
class ScheduledDraw:
    """A request for a continuation.

    Attributes:
        stop: Which of the tokens that it draws alone is a stop token; ``None`` for none.
        stops: The stop tokens, known once it was asked alone.
        expected: What it gives alone, known then.
    """

    prompt: TokenIds
    most: int
    options: Mapping[str, Any] = field(hash=False)
    adapter: str | None = None
    stop: int | None = None
    stops: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        stops = f", stop tokens {list(self.stops)}" if self.stops else ""
        after = f"after {len(self.prompt)}{with_adapter(self.adapter)}"
        return f"draw of {self.most} tokens {after}{options}{stops}"

    def ask(self, live: Subject) -> Any:
        return live.lm.sample(
            self.prompt, self.most, self.stops, lora_name=self.adapter, **self.options
        )

    def alone(self, live: Subject, owner: str | None) -> ScheduledDraw:
        free = evolve(self, adapter=owner, stop=None)
        key = (self.prompt, self.most, tuple(self.options.items()), live.model.path_of(owner))
        drawn: tuple[int, ...] = live.noted(key, lambda: tuple(live.run(free.ask(live))))
        check(len(drawn) == self.most, f"a {free}, asked alone, gives {len(drawn)} tokens")
        if self.stop is None or self.stop >= len(drawn):
            return evolve(self, expected=drawn)
        never = [token for token in live.contexts.plain[:40] if token not in drawn][:2]
        stop = drawn[self.stop]
        return evolve(self, stops=(*never, stop), expected=drawn[: drawn.index(stop)])

    def compare(self, live: Subject, outcome: Outcome, owner: str | None) -> None:
        drawn = tuple(answered(outcome, "no tokens were drawn"))
        if drawn == self.expected:
            return
        message = f"it draws {list(drawn)}; alone it draws {list(self.expected)}"
        pairs = zip(drawn, self.expected, strict=False)
        shorter = min(len(drawn), len(self.expected))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        # At the first difference from the sample alone, this token was drawn, or else a stop token,
        # which is not part of the answer.
        parted = (drawn[place],) if place < len(drawn) else self.stops
        right_length = len(drawn) <= self.most and (place < shorter or self.stops)
        before = self.prompt + drawn[:place]
        if not right_length or not may_follow(live, before, parted, self.options, owner):
            raise Violation(message)
        # At temperature 0, either of two equally likely tokens may be drawn; the rest then differs.
        if self.options.get("temperature") != 0.0:
            raise MovedDraw(message)


ScheduledRequest = ScheduledRow | ScheduledScore | ScheduledDraw


def requests_of(live: Subject, kind: str, salt: int = 0) -> list[ScheduledRequest]:
    """Different requests of one kind.

    Args:
        live: The model.
        kind: One of :data:`REQUESTS_OF_KIND`.
        salt: Chooses the seeds of samples.
    """
    names = live.loras
    adapters = [None, *names[:2], *([REBOUND_ADAPTER] if len(names) > 1 else [])]
    numbers = range(live.scaled(REQUESTS_OF_KIND[kind], QUICK_REQUESTS_OF_KIND[kind]))
    made = [_make(live, kind, i, adapters[i % len(adapters)], 1000 * salt) for i in numbers]
    return list(dict.fromkeys(made))


def growing_tokens(i: int) -> int:
    """How many tokens the growing sample with number ``i`` has."""
    return 20 + 2 * i


def _make(live: Subject, kind: str, i: int, adapter: str | None, salt: int) -> ScheduledRequest:
    """The request of a kind with number ``i``."""
    contexts, limit, longest = live.contexts, live.contexts.limit, live.longest
    if kind == "rows":
        many = contexts.many(REQUESTS_OF_KIND["rows"])
        return ScheduledRow(many[i % len(many)], adapter if i % 3 == 0 else None)
    if kind == "long rows":
        most = longest if live.effort >= 1 else min(longest, QUICK_ROW_TOKENS)
        length = max(1, most - (0, 1, most // 3, most // 2)[i // 3 % 4])
        # Variants repeat after 15, so the last contexts are prefixes of the first ones.
        return ScheduledRow(contexts.long(length, i % 15), adapter)
    if kind == "growing draws":
        most = min(growing_tokens(i), limit - 8)
        options = _seeded(live, {"temperature": 1.5}, salt + 100 + i)
        return ScheduledDraw(contexts.long(3 + i % 5, i), most, options, adapter)
    prompt = PROMPT_TOKENS[i % len(PROMPT_TOKENS)]
    most = CONTINUATION_TOKENS[i % len(CONTINUATION_TOKENS)]
    room = min(limit, max(longest, 64))  # The most tokens that the model takes and can bear.
    if kind == "scores":
        text = contexts.long(min(prompt + (most + 1, 300)[i % 4 == 3], room), i)
        prompt = min(prompt, len(text) // 2)
        return ScheduledScore(text[:prompt], text[prompt:], adapter)
    prompt = min(prompt, room - most)
    options = _seeded(live, DRAW_OPTIONS[i % len(DRAW_OPTIONS)], salt + i)
    return ScheduledDraw(
        contexts.long(prompt, i), most, options, adapter, (None, 2, None, 1, 9)[i % 5]
    )


def _seeded(live: Subject, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    # Only greedy samples repeat if rounding may change a sample, or if the engine has no seeds.
    if live.expect.atol > ROUNDING_ATOL or "seeds" in live.suite.excused:
        return {"temperature": 0.0}
    if options.get("temperature") == 0.0:
        return dict(options)
    return {**steady(live), **options, "seed": seed}
