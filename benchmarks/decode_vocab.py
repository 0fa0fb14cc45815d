"""Read a tokenizer's vocabulary as bytes

SmolLM2's vocabulary as it is, and enlarged to 128,000 tokens by added ones of the model's own kind.
"""

from __future__ import annotations

from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"


def ours(bench: Bench) -> None:
    from genlm.core.tokenization import decode_vocab

    measure(bench, decode_vocab)


def theirs(bench: Bench) -> None:
    from genlm.backend.tokenization import decode_vocab

    measure(bench, decode_vocab)


def measure(bench: Bench, decode_vocab: Any) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    bench.time("decode_vocab", lambda: decode_vocab(tokenizer), x=len(tokenizer), repeat=7)
    large = PreTrainedTokenizerFast(tokenizer_object=enlarged(tokenizer.backend_tokenizer, 128_000))
    bench.time("decode_vocab", lambda: decode_vocab(large), x=len(large), repeat=7)


def enlarged(backend: Any, size: int) -> Any:
    """The tokenizer with more pieces in its model, which are joins of its own pieces."""
    import json
    import random

    from tokenizers import Tokenizer

    definition = json.loads(backend.to_str())
    vocabulary = definition["model"]["vocab"]
    pieces, generator = list(vocabulary), random.Random(0)
    while len(vocabulary) < size:
        vocabulary.setdefault(generator.choice(pieces) + generator.choice(pieces), len(vocabulary))
    return Tokenizer.from_str(json.dumps(definition))


if __name__ == "__main__":
    main(ours=ours, theirs=theirs)
