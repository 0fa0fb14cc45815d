"""What a model's caches can do, found out by comparing with rows computed alone."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx
from genlm.mlx.pool import Pool
from genlm.mlx.runner import Key, Runner
from mlx.utils import tree_flatten

#: The most total variation between a batched row and the same row alone, for float32 weights and
#: for coarser ones.
TOLERANCE, COARSE_TOLERANCE = 1e-4, 0.1

#: Rows in a batch of the probe. Masks and states of the wrong shape may broadcast by accident where
#: the batch is as large as some number of heads: no number equals both.
BATCHES = (5, 7)


class CacheSupport(Enum):
    """How rows can share a batch cache: not at all, if fed equally many tokens, or freely."""

    NONE = 0
    EQUAL = 1
    RAGGED = 2


def probe(runner: Runner) -> CacheSupport:
    """Try batches of rows of unequal length, and extend them."""
    if not all(hasattr(layer, "merge") for layer in runner.empty_cache()):
        return CacheSupport.NONE
    for support in (CacheSupport.RAGGED, CacheSupport.EQUAL):
        ragged = support is CacheSupport.RAGGED
        if all(_right(runner, rows, ragged) for rows in BATCHES):
            return support
    return CacheSupport.NONE


def _right(runner: Runner, rows: int, ragged: bool) -> bool:
    """Whether so many rows of unequal length are right together: as prompts, then with one token
    more, then with several."""
    prompts: list[Key] = [(0, *range(1 + row, 4 + row + row % 3)) for row in range(rows)]
    grown = [(*key, 7) for key in prompts]
    further = [(*key, *range(2, 4 + row % 2)) for row, key in enumerate(grown)]
    pool = Pool(runner, max_bytes=0, ragged=ragged)
    for keys in (prompts, grown, further):
        try:
            batched = mx.softmax(pool.logits(keys), axis=-1)
        except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError):
            return False  # models raise whatever comes of a cache they were not written for
        alone = mx.softmax(mx.concatenate([runner.cold(key) for key in keys]), axis=-1)
        variation = mx.max(mx.sum(mx.abs(batched - alone), axis=-1)).item() / 2
        if not variation <= _tolerance(runner):
            return False
    return True


def _tolerance(runner: Runner) -> float:
    dtypes = {array.dtype for _, array in tree_flatten(runner.model.parameters())}
    return TOLERANCE if dtypes == {mx.float32} else COARSE_TOLERANCE
