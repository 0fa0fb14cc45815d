"""Tokenizers that several threads may call."""

from __future__ import annotations

import copyreg
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

#: The method by which a tokenizer that stores the options of a call is recognised: transformers'
#: fast tokenizers have it.
KEEPS_OPTIONS = "set_truncation_and_padding"

#: The methods in which such a tokenizer stores the options in itself, and then encodes.
ENCODING = ("_encode_plus", "_batch_encode_plus")


def take_turns(tokenizer: Any) -> None:
    """Make a tokenizer right in several threads, whoever calls it.

    transformers' fast tokenizers write the options of a call (truncation, padding, whether special
    tokens are split) into the tokenizer, and encode after that. So a call got the options of
    another thread's, in silence. From now on one thread at a time is between the two. The tokenizer
    stays the same object, so this holds for a program's own ``lm.tokenizer(text)`` too; pickles and
    deep copies of it are of its former class.
    """
    kind = type(tokenizer)
    methods = [name for name in ENCODING if hasattr(kind, name)]
    if not hasattr(kind, KEEPS_OPTIONS) or not methods or hasattr(kind, "_turns"):
        return
    own: dict[str, Any] = {name: _in_turn(getattr(kind, name)) for name in methods}
    own.update(__doc__=kind.__doc__, __module__=kind.__module__, __qualname__=kind.__qualname__)
    own.update(_turns=Turns(), __reduce_ex__=_reduce_as(kind))
    tokenizer.__class__ = type(kind.__name__, (kind,), own)


class Turns:
    """A lock that is new in a forked child, where the parent's may never be released."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()

    @property
    def lock(self) -> threading.RLock:
        """This process's lock."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def encode(self: Any, *args: Any, **options: Any) -> Any:
        with self._turns.lock:
            return method(self, *args, **options)

    return encode


def _reduce_as(kind: Any) -> Callable[..., Any]:
    def reduce(self: Any, protocol: Any) -> Any:
        plain = object.__new__(kind)
        plain.__dict__.update(self.__dict__)
        make, args, *state = plain.__reduce_ex__(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle can only make objects of their present class; this function makes objects of
            # any class
            make, args = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]
        return make, args, *state

    return reduce
