"""What travels between the program and a replica: ids as bytes, adapters by key, rows as one array.

A ``Query`` would bring along its ``Context``, whose hashes mean nothing in another process.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from genlm.core import EngineError, Query, SamplingParams
from genlm.core.types import Request, SampleRequest, ScoreRequest, query_of

#: The name of an adapter on the replicas: a fleet may serve several programs, which all count
#: their adapters from 1.
AdapterKey = str

#: A program on a replica, from one opening to the next: the program, and which opening it is.
Token = tuple[str, int]


class SessionLost(Exception):
    """The replica does not know the session: it has started again, it is about to end, or it has
    not heard from the program for too long. It computes nothing for it."""


class Busy(Exception):
    """Another program tries suspects on the replica: ask again later."""


class FleetEnded(Exception):
    """Somebody has ended the fleet on purpose."""


@frozen
class Ask:
    """One request; a row, if it has neither ``params`` nor a ``continuation``.

    Attributes:
        ids: The token ids, as the bytes of an array of 64-bit integers.
        adapter: The adapter's key; ``None`` is the base model.
        cold: Past every cache.
        params: How to draw.
        continuation: What to score, as bytes like ``ids``.
    """

    ids: bytes
    adapter: AdapterKey | None
    cold: bool = False
    params: SamplingParams | None = None
    continuation: bytes | None = None


@frozen
class Description:
    """What a replica says of its engine when it has loaded it."""

    hooks: frozenset[str]
    tokenizer: Any
    vocab_size: int
    max_context: int | None


def packed(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def unpacked(ids: bytes) -> list[int]:
    numbers = array("q")
    numbers.frombytes(ids)
    return numbers.tolist()


def ask(request: Request, program: str) -> Ask:
    """A request as it travels."""
    query: Query = query_of(request)
    key = None if query.adapter is None else adapter_key(query.adapter.version, program)
    params = request.params if isinstance(request, SampleRequest) else None
    scored = packed(request.continuation) if isinstance(request, ScoreRequest) else None
    return Ask(packed(query.token_ids), key, query.cold, params, scored)


def adapter_key(version: int, program: str) -> AdapterKey:
    return f"{program}:{version}"


def arguments_of(params: SamplingParams) -> dict[str, Any]:
    """The arguments of ``AsyncLM.sample`` that mean the same."""
    arguments = asdict(params)
    return {"eos_token_ids": sorted(arguments.pop("stop_token_ids")), **arguments}


def portable(error: BaseException) -> Exception:
    """An error as it can travel: itself if it survives pickling, else its text."""
    try:
        if isinstance(error, Exception):
            pickle.loads(pickle.dumps(error))
            return error
    except Exception:  # an exception class may refuse in any way
        pass
    return EngineError(f"{type(error).__name__} in a replica: {error}")
