"""Functions of rows, sent from the program to the replicas that have the rows."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from attrs import define, field, frozen

import ray
from genlm.core import EngineError, InvalidInputError
from genlm.core.checks import describe_error, safe_repr
from genlm.core.together import Then, together
from genlm.core.types import ReductionRequest
from genlm.ray.hangs import Caller, Hangs

#: The most functions that a replica keeps. A program that makes a new function in every step would
#: fill the replica's memory. A dropped function is sent again when it is used.
KEPT_FUNCTIONS = 1000

#: Types whose values can always be pickled.
PLAIN = (float, int, str, bytes, bool, type(None))

#: The types of containers whose elements are checked, and how deeply nested they may be.
CONTAINERS, MAX_DEPTH = frozenset({tuple, list}), 4


@frozen
class Code:
    """A function in the form in which it is sent."""

    key: str  # a hash of the bytes, by which replicas know the function
    pickled: bytes


class Functions:
    """The functions that a program has used. Each is pickled once, when it is first used, so what
    it refers to may not change afterwards."""

    def __init__(self) -> None:
        self._codes: WeakKeyDictionary[together[Any], Code] = WeakKeyDictionary()

    def code(self, function: together[Any]) -> Code:
        """The pickled form of a function."""
        return self._codes[function]

    def refused(self, requests: Iterable[ReductionRequest]) -> dict[ReductionRequest, Exception]:
        """Pickle the functions of some requests, and return the requests that cannot be sent, each
        with its error."""
        refused: dict[ReductionRequest, Exception] = {}
        # Functions, and arguments that several callers share, by identity.
        checked: dict[int, Exception | None] = {}
        for request in requests:
            function = request.then.function
            if id(function) not in checked:
                checked[id(function)] = self._pickle(function)
            error = checked[id(function)]
            for given in request.then.given:
                if error is None and not isinstance(given, PLAIN):
                    if id(given) not in checked:
                        checked[id(given)] = unpicklable("the argument", given)
                    error = checked[id(given)]
            if error is not None:
                refused[request] = InvalidInputError(str(error))
        return refused

    def _pickle(self, function: together[Any]) -> Exception | None:
        if function in self._codes:
            return None
        try:
            pickled = ray.cloudpickle.dumps(function)
        except Exception as error:
            return cannot_travel("the function", function, error)
        self._codes[function] = Code(hashlib.sha256(pickled).hexdigest(), pickled)
        return None


def unpicklable(what: str, value: Any) -> Exception | None:
    try:
        ray.cloudpickle.dumps(value)
    except Exception as error:
        return cannot_travel(what, value, error)
    return None


def are_plain(values: Sequence[Any]) -> bool:
    """Whether these are plain values, or tuples and lists of such ones: pickling cannot fail."""
    left = values
    for _ in range(MAX_DEPTH):
        nested = {*map(type, left)}.difference(PLAIN)
        if not nested:
            return True
        if not nested <= CONTAINERS:
            return False
        left = [*chain.from_iterable(each for each in left if type(each) in CONTAINERS)]
    return False


def cannot_travel(what: str, value: Any, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{what} {safe_repr(value)} cannot be sent to a replica: {describe_error(error)}; give "
        "what can be pickled, or ask for rows, without then"
    )


@define
class KnownFunctions:
    """The functions that a replica has.

    Args:
        hangs: Is told when a function runs.
    """

    _hangs: Hangs
    _known: OrderedDict[str, together[Any] | Exception] = field(factory=OrderedDict)

    def learn(self, key: str, pickled: bytes | None) -> None:
        """Load a function that was sent, or note that a known function is used.

        Raises:
            Lacking: the function was never sent, or was dropped.
        """
        if key in self._known:
            self._known.move_to_end(key)
        elif pickled is None:
            raise Lacking(key)
        else:
            try:
                self._known[key] = self._hangs.watched(ray.cloudpickle.loads(pickled))
            except Exception as error:
                self._known[key] = InvalidInputError(
                    f"a function of rows cannot be loaded in a replica: {describe_error(error)}; "
                    "define it in the program's main module, or put its module on every node"
                )
            while len(self._known) > KEPT_FUNCTIONS:
                self._known.popitem(last=False)

    def then(self, key: str, caller: Caller, given: Sequence[Any]) -> Then[Any] | Exception:
        """A function together with the arguments of one caller, or why it could not be loaded."""
        function = self._known[key]
        if isinstance(function, Exception):
            return InvalidInputError(str(function))
        return function(caller, *given)


class Lacking(Exception):
    """A replica lacks a function, which must be sent again."""


@frozen
class Reduced:
    """The result of a function for one row. It is pickled separately, so that a result that cannot
    be pickled fails only for its own caller."""

    pickled: bytes

    @classmethod
    def each(cls, results: Sequence[Any]) -> Sequence[Any]:
        """The results of functions as they travel, or the errors in their places."""
        return results if are_plain(results) else [*map(cls.of, results)]

    @classmethod
    def of(cls, result: Any) -> Reduced | Exception:
        """A result, or the error if it cannot be pickled; an error stays what it is."""
        if isinstance(result, Exception):
            return result
        try:
            return cls(pickle.dumps(result))
        except Exception:  # unpickling may import a class that only the replica has
            pass
        try:
            return cls(ray.cloudpickle.dumps(result))
        except Exception as error:
            return EngineError(
                f"the result {safe_repr(result)} cannot be sent back by a replica: "
                f"{describe_error(error)}; return what can be pickled"
            )

    def result(self) -> Any:
        """The result, or the error in its place."""
        try:
            return pickle.loads(self.pickled)
        except Exception as error:
            return EngineError(
                f"the result of a replica cannot be read here: {describe_error(error)}; return "
                "what this program can import"
            )
