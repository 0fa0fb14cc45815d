"""The exact probability of the next bytes, compared with that of the next token.

A model can write the same bytes with many sequences of tokens. The mass under a prefix in the byte
trie counts only the next token; ``next_bytes_logprob`` counts all sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import math

from genlm.core import AsyncLM, load_model_by_name
from genlm.core.next_bytes import next_bytes_logprob
from genlm.core.trie import TokenCharacterTrie

MODELS = {"hf": "HuggingFaceTB/SmolLM2-135M-Instruct"}


async def compare(lm: AsyncLM, prompt: str, texts: list[str]) -> list[tuple[float, float]]:
    """For each text, the probability that the next token begins with it, and that the text after
    the prompt does."""
    ids = lm.tokenizer.encode(prompt)
    trie = TokenCharacterTrie(lm.byte_vocab)
    row = await lm.next_token_logprobs(ids)
    exact = await asyncio.gather(
        *(next_bytes_logprob(lm, ids, text.encode(), trie=trie) for text in texts)
    )
    return [
        (trie.mass(row, text.encode()), math.exp(logprob))
        for text, logprob in zip(texts, exact, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", nargs="*", default=[" the", " Paris", " Par", " a cit", " the c"])
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--backend", default="hf", help="a backend that `genlm backends` lists")
    parser.add_argument("--model", help="a folder or a hub name")
    options = parser.parse_args()

    model = options.model or MODELS.get(options.backend, options.backend)
    with load_model_by_name(model, backend=options.backend) as lm:
        found = asyncio.run(compare(lm, options.prompt, options.texts))
        print("next token  next bytes")
        for text, (token, exact) in zip(options.texts, found, strict=True):
            print(f"{token:10.6f}  {exact:10.6f}  {text!r}")
        print(f"{lm.stats.rows} rows in {lm.stats.batches} batches")


if __name__ == "__main__":
    main()
