"""Arguments that a method does not take: the error says what to use instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidOptionError

P = ParamSpec("P")
R = TypeVar("R")

_LENGTH = "max_tokens is the most tokens to draw"
_ON_TOP = "is for what is built on top of a model; docs/how-to/on-top.md says with what"
_ADAPTER = "lora_name is the name of an adapter that add_new_lora(path, name) has loaded"
_MANY = "lm.sample_particles(ids, n, max_tokens) draws n, each with its log-probabilities"

#: Arguments of other tools, and what to use here.
ELSEWHERE = {
    "adapter": _ADAPTER,
    "adapter_name": _ADAPTER,
    "best_of": _MANY,
    "do_sample": "temperature=0 takes the most likely token every time",
    "frequency_penalty": f"a penalty {_ON_TOP}",
    "logprobs": _MANY,
    "lora": _ADAPTER,
    "lora_request": _ADAPTER,
    "max_length": _LENGTH,
    "max_new_tokens": _LENGTH,
    "n": _MANY,
    "num_beams": f"beam search {_ON_TOP}",
    "num_return_sequences": _MANY,
    "presence_penalty": f"a penalty {_ON_TOP}",
    "repetition_penalty": f"a penalty {_ON_TOP}",
    "stop": f"a stop string {_ON_TOP}; eos_token_ids ends a draw at tokens",
    "stop_strings": f"a stop string {_ON_TOP}; eos_token_ids ends a draw at tokens",
    "stop_token_ids": "eos_token_ids are the tokens that end a draw",
    "stream": "`async for token_id in lm.stream(ids, max_tokens)` gives them as they are drawn",
    "temperature": "a row has temperature t as (row / t).log_softmax(-1)",
}


def known_keywords(more: type | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method refuse arguments that it does not take with :class:`InvalidOptionError`, where
    Python has a bare ``TypeError``. A coroutine's are refused when it is called.

    Args:
        more: A ``TypedDict`` of the keywords that its ``**options`` take.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        parameters = inspect.signature(function).parameters.values()
        positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        most = len(positional)
        # Without self.
        known = list(dict.fromkeys([*positional, *by_name, *getattr(more, "__annotations__", ())]))[
            1:
        ]

        @functools.wraps(function)
        def refusing(*args: P.args, **options: P.kwargs) -> R:
            if options:
                refuse_others(name, options, known)
            if len(args) > most:
                more_by_name = known[most - 1 :]  # what may have been meant, in this order
                hint = f"; write {more_by_name[0]}={safe_repr(args[most])}" if more_by_name else ""
                raise InvalidOptionError(
                    f"{name} takes {', '.join(known[: most - 1])} by position; "
                    f"got {len(args) - most} more{hint}"
                )
            return function(*args, **options)

        return refusing

    return decorate


def refuse_others(method: str, given: Iterable[str], known: list[str]) -> None:
    """Raises: InvalidOptionError: a name is not among the known ones."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = ELSEWHERE.get(name) or (f"did you mean {near[0]}?" if near else "")
            message = f"{method} has no argument {name}{hint and f': {hint}'}"
            raise InvalidOptionError(f"{message}; it has {', '.join(known)}")
