"""``genlm sample``: draws continuations, and prints them as they are drawn."""

from __future__ import annotations

import argparse
import asyncio
import codecs
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TextIO

from genlm.core.checks import integer
from genlm.core.cli.model import Commands, add_model, add_prompt, loaded, prompt_ids
from genlm.core.lm import AsyncLM
from genlm.core.runtime.askers import all_of
from genlm.core.sampling import checked_params, seed_of


def add_to(commands: Commands) -> None:
    sample = commands.add_parser("sample", help="continue a text, printed as it is drawn")
    add_model(sample)
    add_prompt(sample)
    sample.add_argument("-n", type=int, default=1, help="how many continuations; default 1")
    sample.add_argument("--max-tokens", type=int, default=100, help="default 100")
    sample.add_argument("--temperature", type=float, default=1.0, help="default 1; 0 is greedy")
    sample.add_argument("--top-k", type=int)
    sample.add_argument("--top-p", type=float)
    sample.add_argument("--min-p", type=float)
    sample.add_argument("--seed", type=int, help="fixes the result")
    sample.set_defaults(run=sample_texts)


def sample_texts(options: argparse.Namespace) -> int:
    """Draw and print."""
    n = integer("-n", options.n, least=1)
    how = {
        name: getattr(options, name) for name in ("temperature", "seed", "top_k", "top_p", "min_p")
    }
    checked_params(options.max_tokens, [], **how)  # checked before the model is loaded
    with loaded(options, options.backend) as (lm, out):
        ids = prompt_ids(lm, options)
        asyncio.run(print_samples(lm, ids, n, options.max_tokens, how, out))
    return 0


async def print_samples(
    lm: AsyncLM, ids: Sequence[int], n: int, max_tokens: int, how: Mapping[str, Any], out: TextIO
) -> None:
    """Print ``n`` continuations one below the other. All are drawn at the same time, so a later
    one is there when its turn comes."""
    texts: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in range(n)]

    async def draw(index: int) -> None:
        try:
            own = {**how, "seed": seed_of(how["seed"], index)}
            async for piece in pieces(lm, ids, max_tokens, own):
                texts[index].put_nowait(piece)
        finally:
            texts[index].put_nowait(None)

    async def show() -> None:
        for index, text in enumerate(texts):
            if n > 1:
                print(f"--- {index + 1} of {n} ---", file=out)
            while (piece := await text.get()) is not None:
                print(piece, end="", file=out, flush=True)
            print(file=out, flush=True)

    await all_of([show(), *map(draw, range(n))])


async def pieces(
    lm: AsyncLM, ids: Sequence[int], max_tokens: int, how: Mapping[str, Any]
) -> AsyncIterator[str]:
    """The text of one continuation, token by token. A character of several tokens comes with the
    last of them; special tokens are not text."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    async for token_id in lm.stream(ids, max_tokens, **how):
        token = lm.byte_vocab[token_id]
        if not token.is_special:
            yield decoder.decode(token.byte_string)
    yield decoder.decode(b"", final=True)
