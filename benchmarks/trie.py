"""The trie: build it, and sum or maximise weights over all of its nodes

The vocabulary is SmolLM2's, and for larger sizes joins of its tokens besides. Weights are float32
rows as a model gives them. genlm-backend has two implementations of the trie: at each point stands
the one that is faster there. Its sums are float32 where that is the parallel one; ours are float64
throughout.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

BATCHES = (1, 8, 32, 128)
SIZES = (49_152, 151_665, 262_145)
OPERATIONS = ("sum", "max")


def ours(bench: Bench) -> None:
    from genlm.core.tokenization import Token, decode_vocab
    from genlm.core.trie import TokenCharacterTrie

    measure(bench, decode_vocab, Token, [TokenCharacterTrie])


def theirs(bench: Bench) -> None:
    from genlm.backend.tokenization import Token, decode_vocab
    from genlm.backend.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

    measure(bench, decode_vocab, Token, [TokenCharacterTrie, ParallelTokenCharacterTrie])


def measure(bench: Bench, decode_vocab: Any, token: Any, kinds: list[Any]) -> None:
    """Both sides do the same; only the libraries differ."""
    import torch
    from transformers import AutoTokenizer

    words = [bytes(word) for word in decode_vocab(AutoTokenizer.from_pretrained(bench.model))[0]]
    for size in SIZES[:1] if bench.quick else SIZES:
        vocabulary = [token(i, word) for i, word in enumerate(enlarged(words, size))]
        tries = build(bench, vocabulary, kinds)
        if size == SIZES[-1]:
            return  # only building the trie is measured
        rows = torch.softmax(
            torch.randn(max(BATCHES), size, generator=torch.Generator().manual_seed(0)) * 3, dim=1
        )
        if size == SIZES[0]:
            best(bench, "first call", reductions(tries, "sum", rows[:1]), x=1, repeat=1)
        for operation in OPERATIONS:
            for batch in BATCHES:
                calls = reductions(tries, operation, rows[:batch])
                case, repeat = f"{operation} over {size:,} tokens, rows", 30 if batch < 128 else 7
                best(bench, case, calls, x=batch, repeat=repeat)


def enlarged(words: list[bytes], size: int) -> list[bytes]:
    """The words, enlarged to ``size`` by joins of two of them, which are the same on every side."""
    generator = random.Random(0)
    short = [word for word in words if 0 < len(word) < 7]
    found = dict.fromkeys(words)
    while len(found) < size:
        found.setdefault(generator.choice(short) + generator.choice(short))
    return list(found)[:size]


def build(bench: Bench, vocabulary: list[Any], kinds: list[Any]) -> list[Any]:
    """Time the quickest kind's construction; return one trie of each kind."""
    tries = [kind(vocabulary) for kind in kinds[1:]]
    built = []
    case = f"build over {len(vocabulary):,} tokens"
    bench.time(case, lambda: built.append(kinds[0](vocabulary)), unit="s", repeat=3)
    return [built[-1], *tries]


def reductions(tries: list[Any], operation: str, rows: Any) -> list[Callable[[], object]]:
    """One call for each trie."""
    if len(rows) == 1:
        return [partial(getattr(trie, f"weight_{operation}"), rows[0]) for trie in tries]
    return [partial(getattr(trie, f"batch_weight_{operation}"), rows) for trie in tries]


def best(bench: Bench, case: str, calls: list[Callable[[], object]], x: float, repeat: int) -> None:
    """Record the times of the fastest call."""
    repeat = min(repeat, 3) if bench.quick else repeat
    quickest = min((times(call, repeat) for call in calls), key=statistics.median)
    bench.record(case, quickest, unit="ms", x=x)


def times(call: Callable[[], object], repeat: int) -> list[float]:
    """Milliseconds of ``repeat`` calls, after one that is not counted unless it is the only one."""
    if repeat > 1:
        call()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e3)
    return found


if __name__ == "__main__":
    main(ours=ours, theirs=theirs)
