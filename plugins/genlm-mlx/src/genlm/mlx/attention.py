"""Attention over keys and values in several places, merged exactly.

Merging needs the sum of the softmax, which MLX's fused kernel does not return. So attention to a
shared prefix is computed by two products instead.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from inspect import signature
from types import ModuleType
from typing import Any

from attrs import frozen

import mlx.core as mx

#: The name under which mlx-lm's model files call attention.
NAME = "scaled_dot_product_attention"

#: Protects the hooks: models may be opened and closed on several threads, and the garbage collector
#: may free a model on any thread.
CHANGES = threading.RLock()

#: The arguments that hooked attention accepts besides queries, keys and values.
UNDERSTOOD = {"cache", "scale", "mask", "sinks"}


@frozen(eq=False)
class Partial:
    """Attention over some positions, before the division by the sum of the softmax.

    Attributes:
        total: The sum of values, each times ``exp(logit - largest)``: ``[..., dim]``.
        weight: The sum of these factors: ``[..., 1]`` float32.
        largest: The largest logit: ``[..., 1]`` float32.
    """

    total: mx.array
    weight: mx.array
    largest: mx.array

    @classmethod
    def of(cls, queries: mx.array, keys: mx.array, values: mx.array, mask: Any = None) -> Partial:
        """Attention of scaled queries; the mask is added to the logits."""
        logits = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)
        if mask is not None:
            logits = logits + mask
        largest = logits.max(axis=-1, keepdims=True)
        factors = mx.exp(logits - largest)
        total = (factors.astype(values.dtype) @ values).astype(mx.float32)
        return cls(total, factors.sum(axis=-1, keepdims=True), largest)

    def map(self, move: Callable[[mx.array], mx.array]) -> Partial:
        """The same attention, with its tensors in another layout."""
        return Partial(move(self.total), move(self.weight), move(self.largest))

    def merged(self, other: Partial, tokens: mx.array | None) -> Partial:
        """This attention, merged with that over further positions: of all tokens, or of ``tokens``
        only."""
        if tokens is None:
            return self._with(other)
        both = self.map(lambda part: part[tokens])._with(other)
        for mine, more in (
            (self.total, both.total),
            (self.weight, both.weight),
            (self.largest, both.largest),
        ):
            mine[tokens] = more
        return self

    def sunk(self, sinks: mx.array | None) -> Partial:
        """This attention with sinks: a further logit for each head, which has no value."""
        if sinks is None:
            return self
        return self._with(Partial(mx.array(0.0), mx.array(1.0), sinks[:, None].astype(mx.float32)))

    def _with(self, other: Partial) -> Partial:
        largest = mx.maximum(self.largest, other.largest)
        mine, others = mx.exp(self.largest - largest), mx.exp(other.largest - largest)
        return Partial(
            self.total * mine + other.total * others,
            self.weight * mine + other.weight * others,
            largest,
        )

    @property
    def output(self) -> mx.array:
        return self.total / self.weight


class Attention:
    """Replaces a module's attention function while models are hooked. It also accepts keys that
    have a method ``attend(queries, scale, sinks)``. All other calls go to the original function.

    Args:
        plain: The original function.

    Attributes:
        users: How many open models need the replacement.
    """

    def __init__(self, plain: Callable[..., mx.array]) -> None:
        functools.update_wrapper(self, plain)
        self.plain = plain
        self.users = 0
        self._names = [*signature(plain).parameters][3:]

    def __call__(
        self, queries: mx.array, keys: Any, values: Any, *args: Any, **others: Any
    ) -> mx.array:
        if not hasattr(keys, "attend"):
            return self.plain(queries, keys, values, *args, **others)
        given = {**dict(zip(self._names, args, strict=False)), **others}
        if values is not keys or not {"scale"} <= set(given) <= UNDERSTOOD:
            raise NotImplementedError("this attention needs more than keys and values")
        found: mx.array = keys.attend(queries, given["scale"], given.get("sinks"))
        return found


def hook(model: Any) -> Callable[[], Any]:
    """Let a model's attention accept keys that have a method ``attend``. This replaces functions of
    mlx-lm's modules, which all models of a family share.

    Returns:
        A function that undoes the replacement. A module is restored once no hooked model needs it
        any more. Freeing the model undoes it too.
    """
    found = (sys.modules.get(type(module).__module__) for _, module in model.named_modules())
    sources = {source for source in found if source is not None and hasattr(source, NAME)}
    with CHANGES:
        for source in sources:
            attention = getattr(source, NAME)
            if not isinstance(attention, Attention):
                attention = Attention(attention)
                setattr(source, NAME, attention)
            attention.users += 1
    undo = weakref.finalize(model, _unhook, sources)
    undo.atexit = False
    return undo


def _unhook(sources: Iterable[ModuleType]) -> None:
    with CHANGES:
        for source in sources:
            attention = getattr(source, NAME)
            if isinstance(attention, Attention):  # otherwise the program has replaced it meanwhile
                attention.users -= 1
                if not attention.users:
                    setattr(source, NAME, attention.plain)
