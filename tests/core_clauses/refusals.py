"""Clauses on bad input: refused before the engine sees it, and the model still works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from genlm.conformance.compare import Violation, check
from genlm.conformance.subject import Subject
from genlm.core.errors import InvalidOptionError, InvalidQueryError, UnknownAdapterError

GARBAGE: dict[str, Any] = {
    "an empty context": [],
    "a negative id": [1, -1],
    "an id out of range": [1, 1 << 40],
    "a float": [1, 2.0],
    "a bool": [True],
    "a string for an id": ["a"],
    "text": "a",
    "None for an id": [None],
    "None": None,
    "a number": 7,
}


class RefusalClauses:
    """What cannot be asked is refused."""

    def test_bad_context_is_refused(self, live: Subject) -> None:
        """Empty, out of range, not ints: an ``InvalidQueryError``, whichever method is called."""
        lm = live.lm
        ways: list[Callable[[Any], object]] = [
            lambda bad: live.run(lm.next_token_logprobs(bad)),
            lambda bad: live.run(lm.batch_next_token_logprobs([live.contexts.stem[:2], bad])),
            lm.next_token_logprobs_sync,
            lm.next_token_logprobs_uncached,
            lm.cache_kv,
            lambda bad: live.sample(bad, 1),
            lambda bad: live.score(bad, [1]),
        ]
        asked = [(what, partial(ask, bad)) for what, bad in GARBAGE.items() for ask in ways]
        _check_refused(live, InvalidQueryError, asked)

    def test_too_long_context_is_refused(self, live: Subject) -> None:
        """More than ``max_context`` tokens, or no room to draw or to score: an
        ``InvalidQueryError``."""
        limit = live.lm.max_context
        if limit is None:
            pytest.skip("the model has no max_context: nothing is too long")
        longer = [live.contexts.tokens[0]] * (limit + 1)
        asked: dict[str, Callable[[], object]] = {
            f"a context of {limit + 1} tokens": lambda: live.ask(longer),
            f"2 tokens to draw after {limit}": lambda: live.sample(longer[:-1], 2),
            f"3 tokens to score after {limit - 1}": lambda: live.score(longer[:-2], longer[:3]),
        }
        _check_refused(live, InvalidQueryError, asked.items())

    def test_unknown_adapter_is_refused(self, live: Subject) -> None:
        """A name that no adapter has: an ``UnknownAdapterError``, in requests, ``set_lora`` and
        ``remove_lora``."""
        name, context = "no-such-adapter", live.contexts.stem[:2]
        asked: dict[str, Callable[[], object]] = {
            f"lora_name={name!r}": lambda: live.ask(context, name),
            f"set_lora({name!r})": lambda: live.lm.set_lora(name),
            f"remove_lora({name!r})": lambda: live.lm.remove_lora(name),
        }
        _check_refused(live, UnknownAdapterError, asked.items())

    def test_bad_sampling_option_is_refused(self, live: Subject) -> None:
        """Negative or non-numeric options: an ``InvalidOptionError``."""
        bad: list[dict[str, Any]] = [
            {"max_tokens": -1},
            {"max_tokens": 1.5},
            {"temperature": -0.1},
            {"temperature": float("nan")},
            {"seed": -1},
            {"top_k": 0},
            {"top_p": 0.0},
            {"top_p": 1.5},
            {"eos_token_ids": 3},
        ]

        def draw(options: dict[str, Any]) -> object:
            given = {"max_tokens": 1, "eos_token_ids": [], **options}
            return live.run(live.lm.sample(live.contexts.stem[:2], **given))

        asked = [(f"sample(..., {options})", partial(draw, options)) for options in bad]
        _check_refused(live, InvalidOptionError, asked)


def _check_refused(
    live: Subject, error: type[Exception], asked: Iterable[tuple[str, Callable[[], object]]]
) -> None:
    """Check that all calls are refused before the engine sees them, and that the model goes on."""
    for what, call in asked:
        live.gate.reset()
        try:
            result = call()
        except error as refusal:
            name = type(refusal).__name__
            check(isinstance(refusal, ValueError), f"{what}: {name} is not a ValueError")
            check(bool(str(refusal)), f"{what}: the error has no message")
        except Exception as other:
            raise Violation(
                f"{what}: {type(other).__name__} instead of {error.__name__}: {other}"
            ) from other
        else:
            raise Violation(f"{what} was answered: {result!r:.200}")
        seen = [query.token_ids for query in live.gate.seen]
        check(not seen, f"{what} was refused only after the engine had seen {seen}")
    live.check_row(live.contexts.stem[:2], how="after bad input")
