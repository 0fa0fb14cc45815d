"""The options of the backend: what is refused before vLLM sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attrs import fields, frozen

from genlm.core import checks
from genlm.core.errors import InvalidOptionError
from genlm.core.options import refuse_unknown, unknown_argument

REFUSED = {
    "speculative_config": "a speculative step draws several tokens and captures no row for each",
    "spec_method": "a speculative step draws several tokens and captures no row for each",
    "data_parallel_size": "one model is one engine; load the model once per replica",
}


@frozen
class Options:
    """What the user chose.

    Attributes:
        engine_opts: Options of ``vllm.LLM``.
        live_sessions: ``False`` makes every request independent; a number is the most sessions held
            idle; ``True`` is half of ``max_num_seqs``.
    """

    engine_opts: Mapping[str, Any]
    live_sessions: bool | int

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Options:
        """Check the options of a user.

        Raises:
            InvalidOptionError: an option is unknown or of the wrong kind.
        """
        refuse_unknown("vllm", options, [attribute.name for attribute in fields(cls)])
        engine_opts, live = options.get("engine_opts") or {}, options.get("live_sessions", True)
        if not isinstance(engine_opts, Mapping):
            raise InvalidOptionError(
                f"engine_opts must be a dict of vLLM's options; got {checks.shown(engine_opts)}"
            )
        if not isinstance(live, bool):
            live = checks.integer("live_sessions", live, least=0)
        return cls(dict(engine_opts), live)


def check_engine_opts(engine_opts: Mapping[str, Any]) -> None:
    """Refuse what vLLM does not have, and what rows cannot be had with.

    Raises:
        InvalidOptionError: it names the option, and what to do.
    """
    from vllm import EngineArgs

    known = {option.name for option in dataclasses.fields(EngineArgs)} - {"model"}
    for name, value in engine_opts.items():
        if name not in known:
            raise unknown_argument("vLLM", "option", name, known)
        if name in REFUSED and value not in (None, 1):
            raise InvalidOptionError(
                f"engine_opts[{name!r}] = {value!r} is not supported: {REFUSED[name]}"
            )
