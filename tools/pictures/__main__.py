"""Draw the pictures of the pages into ``docs/assets``, by name or all:

    python -m tools.pictures [NAME ...]

``batching`` and ``islands`` run the mock, ``tracing`` and ``prefixes`` run SmolLM2 on hf
(``GENLM_TEST_MODEL`` is its folder), ``islands`` needs Ray, and ``request`` runs nothing. Times are
those of the machine that draws.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from genlm.core import AsyncLM, load_model_by_name
from tools.pictures import islands, prefixes, request
from tools.pictures.svg import Picture
from tools.pictures.timeline import Recorded, lanes, stacked

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT = "The best thing about a walk in the hills is"


def real_model() -> AsyncLM:
    """SmolLM2 on hf, from the folder that the tests use."""
    return load_model_by_name(os.environ.get("GENLM_TEST_MODEL", MODEL), "hf")


def example() -> Any:
    """The module of ``examples/smc.py``."""
    sys.path.insert(0, str(ROOT / "examples"))
    import smc  # type: ignore[import-not-found]

    return smc


def traced(lm: AsyncLM, program: Callable[[], Any]) -> Recorded:
    """The trace of a program."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with lm.trace(trace):
            asyncio.run(program())
        return Recorded.read(trace)


def batching() -> Picture:
    """Five coroutines, of which two begin late, over a mock that takes 20 ms for a batch."""

    async def walk(n: int) -> None:
        await asyncio.sleep({4: 0.008, 5: 0.015}.get(n, 0))
        for step in range(3):
            await lm.next_token_logprobs([n] * (10 * n + step))

    async def program() -> None:
        await asyncio.gather(*map(walk, range(1, 6)))

    with load_model_by_name("mock", "mock", delay=0.02) as lm:
        lm.next_token_logprobs_sync([0])  # the first batch takes longer
        recorded = traced(lm, program)
    of = {n: [one for one in recorded.requests if one.tokens // 10 == n] for n in range(1, 6)}
    return lanes(
        "Three coroutines ask together, and their requests leave as one batch. Two others ask "
        "while the engine computes; their requests wait, and leave together as the next batch.",
        recorded,
        [(f"coroutine {n}", spans) for n, spans in of.items()],
        26,
    )


def tracing() -> Picture:
    """The first tokens of the demo, on the real model."""
    smc = example()
    with real_model() as lm:
        prompt = lm.encode(PROMPT)
        allowed = smc.allowed_tokens(lm, "e")
        lm.next_token_logprobs_sync(prompt[:-1])

        async def program() -> None:
            await smc.smc(lm, prompt, allowed, 16, 6, random.Random(0))

        recorded = traced(lm, program)
    return lanes(
        "Six tokens of sixteen particles: each step is one batch of the requests that differ.",
        recorded,
        [("requests" if n == 0 else "", lane) for n, lane in enumerate(stacked(recorded.requests))],
        9,
    )


def prefix_tree() -> Picture:
    smc = example()
    with real_model() as lm:
        return prefixes.picture(lm, smc, PROMPT)


PICTURES: dict[str, Callable[[], Picture]] = {
    "batching": batching,
    "tracing": tracing,
    "prefixes": prefix_tree,
    "request": request.picture,
    "islands": islands.picture,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    for name in parser.parse_args().names or PICTURES:
        print(PICTURES[name]().write(ASSETS / f"{name}.svg"))


if __name__ == "__main__":
    main()
