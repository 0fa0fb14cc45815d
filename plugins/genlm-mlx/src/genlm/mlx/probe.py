"""The probe: finds out which store gives right rows, by comparing with rows computed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx.core as mx
from genlm.core import Query
from genlm.kit.kv.sharing import SharingCosts
from genlm.mlx.attention import hook
from genlm.mlx.blocks import Blocks
from genlm.mlx.runner import Key, Runner
from genlm.mlx.store import Store
from genlm.mlx.windows import narrowed
from mlx.utils import tree_flatten

#: The largest total variation between a batched row and the same row computed alone, for float32
#: weights and for less precise ones.
TOLERANCE, COARSE_TOLERANCE = 5e-4, 0.1

#: The number of sequences in a batch of the probe. It equals no number of heads, because masks and
#: states of a wrong shape might otherwise broadcast by accident.
BATCH_SIZES = (5, 7)

#: The most tokens of each sequence that the probe feeds at a time, so that sequences of unequal
#: length take several chunks.
CHUNK_TOKENS = 3

#: Costs of sharing that are so low that short contexts share.
SHARING_COSTS = SharingCosts(sharing=2, product=2, trunk=16)

#: The width of a repaired window during the probe, which is less than the length of its contexts.
WINDOW_TOKENS = 6

#: The errors that models raise for a cache for which they were not written.
CACHE_ERRORS = (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError)


def store_of(runner: Runner, max_bytes: int | None) -> Blocks | Store | None:
    """The best store with right rows: a table with shared prefixes, blocks of sequences of unequal
    length, blocks whose sequences are fed the same number of tokens, or ``None``."""
    if not all(hasattr(layer, "merge") for layer in runner.empty_cache()):
        return None
    if _can_share(runner):
        hooked = hook(runner.model)
        if _shares(runner):
            return Store(runner, max_bytes, on_close=hooked)
        hooked()
    for ragged in (True, False):
        if all(_batches(runner, count, ragged) for count in BATCH_SIZES):
            return Blocks(runner, max_bytes, ragged)
    return None


def _batches(runner: Runner, count: int, ragged: bool) -> bool:
    """Whether ``count`` sequences, of equal length or not, are right in one cache."""
    chunked = Runner(runner.model, runner.adapters, CHUNK_TOKENS * count)
    return _right(chunked, lambda: Blocks(chunked, 0, ragged), _unequal(count))


def _can_share(runner: Runner) -> bool:
    """Whether a model's caches hold nothing but keys and values of all positions."""
    caches = runner.empty_cache()
    # Some rotating caches keep the first tokens in the window.
    return all(
        type(layer) in (KVCache, RotatingKVCache) and not getattr(layer, "keep", 0)
        for layer in caches
    )


def _shares(runner: Runner) -> bool:
    """Whether attention over keys in several places agrees with the model's, which is hooked."""
    few, more = BATCH_SIZES
    batches = [*_unequal(few), *_behind_prompts(more)]
    return _right(runner, lambda: Store(runner, 0, SHARING_COSTS), batches)


def _unequal(count: int) -> list[list[Key]]:
    """Batches of prompts of unequal length: first the prompts, then extended by one token, then by
    several, then by several more together with their own beginnings."""
    prompts: list[Key] = [(0, *range(1 + at, 4 + at + 2 * at % 7)) for at in range(count)]
    grown = [(*key, 7) for key in prompts]
    further = [(*key, *range(2, 4 + at % 2)) for at, key in enumerate(grown)]
    longer = [(*key, *range(4, 6 + at % 3)) for at, key in enumerate(further)]
    return [prompts, grown, further, [*longer, *(key[:-1] for key in longer)]]


def _behind_prompts(count: int) -> list[list[Key]]:
    """``count`` contexts after two prompts, one a prefix of the other, and without a prompt."""
    prompt: Key = (0, *(3 + at % 5 for at in range(20)))
    prompts: list[Key] = [
        *((*prompt, *range(1, 2 + at)) for at in range(count // 2)),
        *((*prompt, *prompt[:0:-1], 1 + at) for at in range(count // 2)),
        (0, 9, 2),
    ]
    return [prompts, [(*key, 7) for key in prompts]]


def _right(
    runner: Runner, make: Callable[[], Blocks | Store], batches: Sequence[Sequence[Key]]
) -> bool:
    """Whether a store's rows of consecutive batches agree with rows computed alone."""
    with narrowed(runner.model, WINDOW_TOKENS):  # so narrow that short contexts exceed it
        try:
            store = make()
        except CACHE_ERRORS:
            return False
        try:
            return all(_agree(runner, store, keys) for keys in batches)
        finally:
            # Its parts refer to each other, and would stay until a garbage collection.
            store.clear()


def _agree(runner: Runner, store: Blocks | Store, keys: Sequence[Key]) -> bool:
    try:
        batched = _probabilities(store.logits([Query(key[1:]) for key in keys]))
    except CACHE_ERRORS:
        return False
    alone = _probabilities(mx.concatenate([runner.cold(key) for key in keys]))
    variation = np.abs(batched - alone).sum(axis=-1).max() / 2
    return bool(variation <= _tolerance(runner))


def _probabilities(logits: mx.array) -> Any:
    """Probabilities, computed by NumPy in double precision, because MLX's sum over a large
    vocabulary is inexact on the CPU."""
    exact = np.array(logits).astype(np.float64)
    odds = np.exp(exact - exact.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def _tolerance(runner: Runner) -> float:
    dtypes = {array.dtype for _, array in tree_flatten(runner.model.parameters())}
    return TOLERANCE if dtypes == {mx.float32} else COARSE_TOLERANCE
