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

#: The name of an adapter on the replicas: a fleet may serve several programs, which all count
#: their adapters from 1.
AdapterKey = str


@frozen
class Ask:
    """One context.

    Attributes:
        ids: The token ids, as the bytes of an array of 64-bit integers.
        adapter: The adapter's key; ``None`` is the base model.
        cold: Past every cache.
    """

    ids: bytes
    adapter: AdapterKey | None
    cold: bool = False

    def token_ids(self) -> list[int]:
        return unpacked(self.ids)


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


def ask(query: Query, program: str) -> Ask:
    """A query as it travels."""
    return Ask(packed(query.token_ids), adapter_key(query, program), query.cold)


def adapter_key(query: Query, program: str) -> AdapterKey | None:
    return None if query.adapter is None else f"{program}:{query.adapter.version}"


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
