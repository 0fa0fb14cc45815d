"""The form in which requests, results and errors are sent between the program and a replica.

A ``Query`` is not sent itself, since it contains its ``Context``, whose hashes mean nothing in
another process.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from genlm.core import EngineError, SamplingParams
from genlm.core.types import Request, SampleRequest, ScoreRequest, TokenIds, query_of
from genlm.ray.functions import Reduced, are_plain

#: The optional hooks, which the fleet has if the replicas' engine has them.
HOOKS = ("genlm_cache_prefix", "genlm_clear_kv_cache", "genlm_add_lora", "genlm_remove_lora")

#: A function to apply to a row: the function's key, its code if the replica may lack it, and the
#: caller's arguments.
Reduce = tuple[str, bytes | None, Sequence[Any]]

#: One request: its ids in parts, the key of its adapter, whether it bypasses every cache, how to
#: draw, the ids to score, and the function of the row. A request for a row has none of the last
#: three. Parts that several contexts of a call share travel once, because pickle recognises them.
Ask = tuple[
    tuple[TokenIds, ...], str | None, bool, SamplingParams | None, TokenIds | None, Reduce | None
]

#: The results of a call in transit: plain results unchanged; otherwise all tensors joined into one,
#: the length of each, and the other results by position.
Sent = tuple[tuple[Any, ...], np.ndarray[Any, Any] | None, list[int], dict[int, Any]]

#: A program on a replica, from one opening to the next: the program, and which opening it is.
Token = tuple[str, int]


class Gone(Exception):
    """A replica is lost to the program, and computes nothing more for it."""

    def __init__(self, why: str, computing: bool = True, ended: bool = False) -> None:
        super().__init__(why)
        self.computing = computing  # the request that it was computing may have killed it
        self.ended = ended  # a program ended the fleet on purpose


class Busy(Exception):
    """Another program is trying suspects on the replica; ask again later."""


@frozen
class Unanswered:
    """Stands in place of a result: the replica ends through no fault of this request, which must be
    sent elsewhere."""


@frozen
class Description:
    """A replica's description of its engine, once it is loaded."""

    hooks: frozenset[str]
    tokenizer: Any
    vocab_size: int
    max_context: int | None
    eos_token_ids: Sequence[int] = ()
    lacking: Mapping[str, str] = {}


def ask(request: Request, program: str, reduced: Reduce | None = None) -> Ask:
    """A request as it travels; ``reduced``: what is to be made of the row."""
    query = query_of(request)
    key = None if query.adapter is None else adapter_key(query.adapter.version, program)
    if reduced is not None:
        return query.context.parts(), key, query.cold, None, None, reduced
    params = request.params if isinstance(request, SampleRequest) else None
    scored = request.continuation if isinstance(request, ScoreRequest) else None
    return query.context.parts(), key, query.cold, params, scored, None


def ids_of(asked: Ask) -> TokenIds:
    """The ids of a request that has arrived."""
    return tuple(itertools.chain(*asked[0]))


def adapter_key(version: int, program: str) -> str:
    """The name of an adapter on the replicas, where several programs count theirs from 1."""
    return f"{program}:{version}"


def absolute(path: str) -> str:
    """The absolute path of a local folder, since replicas run in other folders. Names of models
    stay as they are."""
    return os.path.abspath(path) if os.path.isdir(str(path)) else path


def sent(results: Sequence[Any]) -> Sent:
    """Rows, scores, drawn ids, results of functions and errors as they travel: tensors one behind
    the other, so that Ray has one thing to carry."""
    if are_plain(results):
        return (*results,), None, [], {}
    tensors = {at: each for at, each in enumerate(results) if isinstance(each, torch.Tensor)}
    joined = torch.cat([*tensors.values()]).cpu().numpy() if tensors else None
    others = {
        at: portable(each) if isinstance(each, BaseException) else each
        for at, each in enumerate(results)
        if at not in tensors
    }
    return (), joined, [len(tensors.get(at, ())) for at in range(len(results))], others


def received(arrived: Sent) -> Sequence[Any]:
    """The results that :func:`sent` packed. Other processes read the memory of their tensors, so
    nothing may be written into them: the core makes its callers' own copies, the only ones in this
    process."""
    plain, joined, lengths, others = arrived
    if plain:
        return plain
    rows = torch.empty(0) if joined is None else torch.from_numpy(np.asarray(Lent(joined)))
    results: list[Any] = [*rows.split_with_sizes(lengths)]
    for at, other in others.items():
        results[at] = other.result() if isinstance(other, Reduced) else other
    return results


class Lent:
    """A read-only array without the read-only mark, for which PyTorch would log a warning."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the memory alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def portable(error: BaseException) -> Exception:
    """An error in a form that can be sent: the error itself if it survives pickling, otherwise an
    error with its text."""
    try:
        if isinstance(error, Exception):
            pickle.loads(pickle.dumps(error))
            return error
    except Exception:  # an exception class may fail in any way
        pass
    return EngineError(f"{type(error).__name__} in a replica: {error}")
