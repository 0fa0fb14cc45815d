"""A block: rows of key/value state that lie in one batch cache and move together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from genlm.mlx.runner import Cache, Key, Runner

#: Tokens by which a cache grows when it is full. With mlx-lm's 256, the cache of short contexts
#: would be mostly empty.
GROWTH = 32


class RowBlock:
    """Rows of a batch cache, and what they hold. Uses only the public methods of mlx-lm's batch
    caches.

    A method that makes blocks from blocks consumes them, layer by layer, so that old and new never
    both take full memory.

    Attributes:
        keys: For each row, the adapter's version and the tokens whose state the cache holds.
        targets: What each row will be when it is computed.
        cache: One batch cache per layer.
        logits: ``[rows, vocab_size]`` float32, of the next token of each row; ``None`` while the
            block is being built.
        costly: For each row, whether its state took a long prefill that no other state in the store
            could replace.
        living: The rows that the store can find. Others have moved to another block.
        used: When it was last used, in the store's ticks.
        pinned: Whether it stays until the store is cleared.
    """

    def __init__(self, keys: Sequence[Key], cache: Cache) -> None:
        self.keys = list(keys)
        self.targets = self.keys
        self.cache = cache
        self.logits: Any = None
        self.costly = [False] * len(self.keys)
        self.living: set[int] = set()
        self.used = 0
        self.pinned = False

    @classmethod
    def empty(cls, runner: Runner, versions: Sequence[int]) -> RowBlock:
        """Rows without tokens."""
        cache = [_merged([layer] * len(versions)) for layer in runner.empty_cache()]
        return cls([(version,) for version in versions], cache)

    @property
    def missing(self) -> list[Key]:
        """What each row lacks, without its last token."""
        pairs = zip(self.keys, self.targets, strict=True)
        return [target[len(key) : -1] for key, target in pairs]

    @property
    def length(self) -> int:
        """Tokens in the longest row: the width of all rows."""
        return max(map(len, self.keys)) - 1

    @property
    def nbytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self.cache) + (
            0 if self.logits is None else int(self.logits.nbytes)
        )

    @property
    def trimmable(self) -> bool:
        """Whether tokens can be removed from the end of a row."""
        return all(layer.is_trimmable() for layer in self.cache)

    @property
    def stays_trimmable(self) -> bool:
        """Whether that is so however long the rows become: no window wraps."""
        return self.trimmable and not any(map(_rotates, self.cache))

    def towards(self, targets: Sequence[Key]) -> RowBlock:
        """This block, to be computed up to these contexts."""
        self.targets = list(targets)
        return self

    def split(self, parts: Sequence[Sequence[int]]) -> list[RowBlock]:
        """One block for each of the given lists of rows; a row may occur more than once."""
        if len(parts) == 1 and list(parts[0]) == list(range(len(self.keys))):
            return [self]
        blocks = [self._with(part) for part in parts]
        while self.cache:
            layer = self.cache.pop(0)
            for part, block in zip(parts, blocks, strict=True):
                # Copies handles: arrays stay shared until they are written to.
                block.cache.append(copy.deepcopy(layer))
                block.cache[-1].filter(mx.array(part, mx.int32))
            del layer
            mx.eval([block.cache[-1].state for block in blocks], [block.logits for block in blocks])
        return blocks

    def copied(self, rows: Sequence[int]) -> RowBlock:
        """A new block of the given rows; a row may occur more than once. This block stays."""
        cache = copy.deepcopy(self.cache)  # copies handles: arrays stay shared until written to
        for layer in cache:
            layer.filter(mx.array(rows, mx.int32))
            mx.eval(layer.state)
        return RowBlock([self.keys[row] for row in rows], cache)

    def trimmed(self, row: int, length: int) -> RowBlock:
        """A new block of the first ``length`` tokens of one row. This block stays."""
        cache = []
        for layer in self.cache:
            single = layer.extract(row)
            single.trim(len(self.keys[row]) - 1 - length)
            cache.append(_merged([single]))
        mx.eval([layer.state for layer in cache])
        return RowBlock([self.keys[row][: length + 1]], cache)

    def joined(self, others: Sequence[RowBlock]) -> RowBlock:
        """The rows of this block, then those of the others."""
        for other in others:
            self.keys = self.keys + other.keys
            self.targets = self.targets + other.targets
            self.costly += other.costly
            for layer in self.cache:
                layer.extend(other.cache.pop(0))
                mx.eval(layer.state)
        return self

    def feed(self, runner: Runner, tokens: Sequence[Key]) -> None:
        """Append ``tokens[i]``, one or more, to row ``i``."""
        if max(map(len, tokens)) > 1:
            self.settle()
        runner.feed(self.cache, [key[0] for key in self.keys], tokens)
        self.keys = [key + more for key, more in zip(self.keys, tokens, strict=True)]

    def step(self, runner: Runner) -> None:
        """Append the last token of each target, and compute the logits of the next."""
        versions = [target[0] for target in self.targets]
        self.logits = runner.step(self.cache, versions, [target[-1] for target in self.targets])
        self.keys = self.targets

    def _with(self, rows: Sequence[int]) -> RowBlock:
        block = RowBlock([self.keys[row] for row in rows], [])
        block.targets = [self.targets[row] for row in rows]
        block.costly = [self.costly[row] for row in rows]
        block.logits = None if self.logits is None else self.logits[mx.array(rows, mx.int32)]
        return block

    def settle(self) -> None:
        """Lay out rotating rows again, oldest token first.

        mlx-lm 0.32.2 masks several new tokens wrongly if a rotating cache has taken single tokens
        and a row is padded on the left. Split and merged again, the cache is as after a prefill,
        and masked correctly.
        """
        if not self.cache or not any(_rotates(layer) for layer in self.cache):
            return
        for i, layer in enumerate(self.cache):
            if not layer.empty():
                singles = [layer.extract(row) for row in range(len(self.keys))]
                self.cache[i] = _merged(singles)
                mx.eval(self.cache[i].state)


def _merged(singles: Sequence[Any]) -> Any:
    """The batch cache of single rows of one layer."""
    merged = singles[0].merge(singles)
    for layer in getattr(merged, "caches", (merged,)):
        if hasattr(layer, "step"):
            layer.step = GROWTH
    return merged


def _rotates(layer: Any) -> bool:
    return hasattr(layer, "max_size") or any(map(_rotates, getattr(layer, "caches", ())))
