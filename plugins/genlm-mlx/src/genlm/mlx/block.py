"""A block: sequences whose state lies in one batch cache and moves together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from attrs import frozen

import mlx.core as mx
from genlm.mlx.runner import Cache, Key, Runner

#: A full cache grows by this many tokens. With mlx-lm's 256, the cache of short contexts would be
#: mostly empty.
GROWTH_TOKENS = 32


@frozen
class Target:
    """A sequence as it will be when it is computed.

    Attributes:
        key: Its key.
        rows: The logits to read on the way: for each, the sequence that wants them (-1 for none),
            and the element of the key after which they come.
    """

    key: Key
    rows: Sequence[tuple[int, int]]

    @property
    def first(self) -> int:
        """The first element of the key after which logits are read. The sequence must start before
        it."""
        return min(at for _, at in self.rows)

    @classmethod
    def of(cls, key: Key) -> Target:
        """A target whose logits no sequence wants."""
        return cls(key, [(-1, len(key) - 1)])


class Block:
    """The sequences of a batch cache. This class uses only the public methods of mlx-lm's batch
    caches.

    A method that makes new blocks consumes the old ones layer by layer, so that old and new blocks
    never both take full memory.

    Attributes:
        keys: For each sequence, the adapter's version and the tokens whose state the cache holds.
        targets: What is to be computed of each sequence.
        cache: One batch cache per layer.
        logits: ``[len(keys), vocab_size]`` float32, of the next token of each sequence; ``None``
            while the block is being built.
        since: For each sequence, how many tokens were added since the last state that stays in the
            store.
        living: The indices of the sequences that the store can find. The others have moved to
            another block.
        used: When the block was last used, in the store's ticks.
        pinned: Whether the block stays until the store is cleared.
    """

    def __init__(self, keys: Sequence[Key], cache: Cache) -> None:
        self.keys = list(keys)
        self.targets: list[Target] = []
        self.cache = cache
        self.logits: Any = None
        self.since = [0] * len(self.keys)
        self.living: set[int] = set()
        self.used = 0
        self.pinned = False

    @classmethod
    def empty(cls, runner: Runner, versions: Sequence[int]) -> Block:
        """Sequences without tokens."""
        cache = [_merged([layer] * len(versions)) for layer in runner.empty_cache()]
        return cls([(version,) for version in versions], cache)

    @property
    def missing(self) -> list[Key]:
        """For each sequence, the tokens to compute before the first token whose logits are read."""
        pairs = zip(self.keys, self.targets, strict=True)
        return [target.key[len(key) : target.first] for key, target in pairs]

    @property
    def length(self) -> int:
        """The number of tokens in the longest sequence, to which all are padded."""
        return max(map(len, self.keys)) - 1

    @property
    def nbytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self.cache) + (
            0 if self.logits is None else int(self.logits.nbytes)
        )

    @property
    def trimmable(self) -> bool:
        """Whether tokens can be removed from the end of a sequence."""
        return all(layer.is_trimmable() for layer in self.cache)

    @property
    def stays_trimmable(self) -> bool:
        """Whether sequences stay trimmable however long they become, because no window wraps."""
        return self.trimmable and not any(map(_rotates, self.cache))

    def towards(self, targets: Sequence[Target]) -> Block:
        """Set the targets, and return this block."""
        self.targets = list(targets)
        return self

    def split(self, parts: Sequence[Sequence[int]]) -> list[Block]:
        """A block for each of the given lists of sequences. A sequence may occur more than once."""
        if len(parts) == 1 and list(parts[0]) == list(range(len(self.keys))):
            return [self]
        blocks = [self._with(part) for part in parts]
        while self.cache:
            layer = self.cache.pop(0)
            for part, block in zip(parts, blocks, strict=True):
                # deepcopy copies handles: arrays stay shared until they are written to.
                block.cache.append(copy.deepcopy(layer))
                block.cache[-1].filter(mx.array(part, mx.int32))
            del layer
            mx.eval([block.cache[-1].state for block in blocks], [block.logits for block in blocks])
        return blocks

    def copied(self, numbers: Sequence[int]) -> Block:
        """A new block of the given sequences. A sequence may occur more than once. This block
        stays."""
        # Deepcopy copies handles: arrays stay shared until they are written to.
        cache = copy.deepcopy(self.cache)
        for layer in cache:
            layer.filter(mx.array(numbers, mx.int32))
            mx.eval(layer.state)
        block = self._with(numbers)
        block.cache = cache
        return block

    def trimmed(self, number: int, length: int) -> Block:
        """A new block of the first ``length`` tokens of one sequence. This block stays."""
        cache = []
        for layer in self.cache:
            single = layer.extract(number)
            single.trim(len(self.keys[number]) - 1 - length)
            cache.append(_merged([single]))
        mx.eval([layer.state for layer in cache])
        return Block([self.keys[number][: length + 1]], cache)

    def joined(self, others: Sequence[Block]) -> Block:
        """This block, extended by the sequences of the others."""
        for other in others:
            self.keys = self.keys + other.keys
            self.targets = self.targets + other.targets
            self.since = self.since + other.since
            for layer in self.cache:
                layer.extend(other.cache.pop(0))
                mx.eval(layer.state)
        return self

    def feed(self, runner: Runner, tokens: Sequence[Key]) -> None:
        """Append ``tokens[i]``, one or more, to sequence ``i``."""
        if max(map(len, tokens)) > 1:
            self.settle()
        runner.feed(self.cache, [key[0] for key in self.keys], tokens)
        self._reach([key + more for key, more in zip(self.keys, tokens, strict=True)])

    def finish(self, runner: Runner) -> tuple[list[int], mx.array]:
        """Append the rest of each target. Returns the sequence that wants each row on the way, and
        the logits."""
        pairs = list(zip(self.keys, self.targets, strict=True))
        tokens = [target.key[len(key) :] for key, target in pairs]
        versions = [key[0] for key in self.keys]
        if all(len(some) == 1 for some in tokens):
            rows = self.logits = runner.step(self.cache, versions, [last for (last,) in tokens])
        else:
            self.settle()
            wanted = [
                (number, at - len(key))
                for number, (key, target) in enumerate(pairs)
                for _, at in target.rows
            ]
            rows = runner.read(self.cache, versions, tokens, wanted)
            found = {place: at for at, place in enumerate(wanted)}
            last = [found[number, len(some) - 1] for number, some in enumerate(tokens)]
            self.logits = rows[mx.array(last, mx.int32)]
        owners = [owner for target in self.targets for owner, _ in target.rows]
        self._reach([target.key for target in self.targets])
        self.targets = []
        return owners, rows

    def _reach(self, keys: Sequence[Key]) -> None:
        """Note that tokens have been appended."""
        self.since = [
            since + len(new) - len(key)
            for since, key, new in zip(self.since, self.keys, keys, strict=True)
        ]
        self.keys = list(keys)

    def _with(self, numbers: Sequence[int]) -> Block:
        block = Block([self.keys[number] for number in numbers], [])
        block.targets = [self.targets[number] for number in numbers] if self.targets else []
        block.since = [self.since[number] for number in numbers]
        block.logits = None if self.logits is None else self.logits[mx.array(numbers, mx.int32)]
        return block

    def settle(self) -> None:
        """Lay out rotating caches again, oldest token first.

        mlx-lm 0.32.2 masks several new tokens wrongly if a rotating cache has taken single tokens
        and a sequence is padded on the left. Split and merged again, the cache is as after a
        prefill, and masked correctly.
        """
        if not self.cache or not any(_rotates(layer) for layer in self.cache):
            return
        for i, layer in enumerate(self.cache):
            if not layer.empty():
                singles = [layer.extract(number) for number in range(len(self.keys))]
                self.cache[i] = _merged(singles)
                mx.eval(self.cache[i].state)


def _merged(singles: Sequence[Any]) -> Any:
    """The batch cache of the caches of single sequences, of one layer."""
    merged = singles[0].merge(singles)
    for layer in getattr(merged, "caches", (merged,)):
        if hasattr(layer, "step"):
            layer.step = GROWTH_TOKENS
    return merged


def _rotates(layer: Any) -> bool:
    return hasattr(layer, "max_size") or any(map(_rotates, getattr(layer, "caches", ())))
