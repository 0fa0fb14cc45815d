"""What a model's caches can do, found out by comparing with rows computed alone."""

from __future__ import annotations

from enum import Enum

import mlx.core as mx
from genlm.mlx.pool import Pool
from genlm.mlx.prefix_index import Key
from genlm.mlx.runner import Runner
from mlx.utils import tree_flatten

#: The most total variation between a batched row and the same row alone, for float32 weights and
#: for coarser ones.
TOLERANCE, COARSE_TOLERANCE = 1e-4, 0.1

PROMPTS: tuple[Key, ...] = ((0, 1, 2, 3, 4, 5), (0, 5, 3))


class CacheSupport(Enum):
    """How rows can share a batch cache: not at all, if fed equally many tokens, or freely."""

    NONE = 0
    EQUAL = 1
    RAGGED = 2


def probe(runner: Runner) -> CacheSupport:
    """Try rows of unequal length in one batch, and one more token for each."""
    if not all(hasattr(layer, "merge") for layer in runner.empty_cache()):
        return CacheSupport.NONE
    extended = [(*key, 7) for key in PROMPTS]
    alone = mx.softmax(mx.concatenate([runner.cold(key) for key in extended]), axis=-1)
    for support in (CacheSupport.RAGGED, CacheSupport.EQUAL):
        pool = Pool(runner, max_bytes=0, ragged=support is CacheSupport.RAGGED)
        try:
            pool.logits(PROMPTS)
            batched = mx.softmax(pool.logits(extended), axis=-1)
        except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError):
            continue  # models raise whatever comes of a cache they were not written for
        if mx.max(mx.sum(mx.abs(batched - alone), axis=-1)).item() / 2 <= _tolerance(runner):
            return support
    return CacheSupport.NONE


def _tolerance(runner: Runner) -> float:
    dtypes = {array.dtype for _, array in tree_flatten(runner.model.parameters())}
    return TOLERANCE if dtypes == {mx.float32} else COARSE_TOLERANCE
