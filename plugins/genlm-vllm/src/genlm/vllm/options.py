"""The options of the backend: what is rejected before vLLM sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import fields, frozen

from genlm.core import checks
from genlm.core.errors import InvalidOptionError
from genlm.core.options import refuse_unknown, unknown_argument

_SPECULATIVE = "a speculative step draws several tokens and captures no row for each"

#: For each option: the values that change nothing, and why others are rejected.
REFUSED: Mapping[str, tuple[Sequence[Any], str]] = {
    "speculative_config": ([None], _SPECULATIVE),
    "spec_method": ([None], _SPECULATIVE),
    "model": ([], "the model's name comes first: load_model_by_name(name, 'vllm', ...)"),
    "data_parallel_size": ([None, 1], "one model is one engine; load the model once per replica"),
    "enable_batch_sharded_sampling": (
        [None, False],
        "each worker would have the rows of a part of the batch alone; leave it out",
    ),
}


@frozen
class Options:
    """The user's options, which :meth:`genlm.vllm.AsyncVirtualLM.from_name` describes."""

    engine_opts: Mapping[str, Any]
    live_sessions: bool | int

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Options:
        """Check the options of a user.

        Raises:
            InvalidOptionError: an option is unknown or of the wrong kind.
        """
        refuse_unknown(
            "vllm",
            options,
            [attribute.name for attribute in fields(cls)],
            {"hf_opts": "it is an option of hf; for vllm, give engine_opts"},
            "an argument of vLLM goes in engine_opts",
        )
        engine_opts, live = options.get("engine_opts") or {}, options.get("live_sessions", True)
        if not isinstance(engine_opts, Mapping):
            raise InvalidOptionError(
                f"engine_opts must be a dict of vLLM's options; got {checks.safe_repr(engine_opts)}"
            )
        if not isinstance(live, bool):
            live = checks.integer("live_sessions", live, least=0)
        return cls(dict(engine_opts), live)


def check_engine_opts(engine_opts: Mapping[str, Any]) -> None:
    """Reject options that vLLM does not have, and options that do not work with rows.

    Raises:
        InvalidOptionError: names the option, and says what to do.
    """
    from vllm import EngineArgs

    known = {option.name for option in dataclasses.fields(EngineArgs)} - {"model"}
    for name, value in engine_opts.items():
        harmless, reason = REFUSED.get(name, ([value], ""))
        if value not in harmless:
            raise InvalidOptionError(
                f"engine_opts[{name!r}] = {value!r} is not supported: {reason}"
            )
        if name not in known:
            raise unknown_argument("vLLM", "option", name, known)
