"""``genlm sample``: draws continuations, and prints them as they are drawn."""

from __future__ import annotations

import argparse
import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from typing import TextIO

from attrs import evolve

from genlm.core.checks import integer
from genlm.core.cli.arguments import Commands
from genlm.core.cli.model import add_model, add_prompt, loaded, prompt_ids
from genlm.core.continuations import all_of
from genlm.core.lm import AsyncLM
from genlm.core.sampling import TokenDrawer, checked_params, seed_of
from genlm.core.types import SamplingParams


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
    checked_params(options.max_tokens, [], **how)  # before the model is loaded
    with loaded(options, options.backend) as (lm, out):
        params = checked_params(options.max_tokens, lm.eos_token_ids, **how)
        asyncio.run(print_samples(lm, prompt_ids(lm, options), params, n, out))
    return 0


async def print_samples(
    lm: AsyncLM, ids: Sequence[int], params: SamplingParams, n: int, out: TextIO
) -> None:
    """Print ``n`` continuations one below the other. All are drawn at the same time, so a later
    one is there when its turn comes."""
    texts: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in range(n)]

    async def draw(index: int) -> None:
        try:
            async for piece in pieces(lm, ids, params, seed_of(params.seed, index)):
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
    lm: AsyncLM, ids: Sequence[int], params: SamplingParams, seed: int | None
) -> AsyncIterator[str]:
    """The text of one continuation, token by token. A character of several tokens comes with the
    last of them; special tokens are not text."""
    drawer, context = TokenDrawer(evolve(params, seed=seed)), lm.context(ids)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for _ in range(params.max_tokens):
        token_id = drawer.draw(await lm.next_token_logprobs(context))
        if token_id in params.stop_token_ids:
            break
        context = context.extend(token_id)
        token = lm.byte_vocab[token_id]
        if not token.is_special:
            yield decoder.decode(token.byte_string)
    yield decoder.decode(b"", final=True)
