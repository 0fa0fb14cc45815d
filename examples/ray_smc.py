"""The sequential Monte Carlo of smc.py over two replicas of the model. The program is the same.

On one machine both replicas share its cores, so this shows that it works, not that it is faster.
With ``--address`` the replicas are placed on a running Ray cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from smc import MODELS, allowed_tokens, report, smc  # type: ignore[import-not-found]  # beside it

from genlm.core import load_model_by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="hf", help="the backend of each replica")
    parser.add_argument("--model", help="a folder or a hub name, on every node")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--address", help="a running cluster; without it one is started here")
    parser.add_argument("--particles", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=25)
    options = parser.parse_args()

    model = options.model or MODELS.get(options.backend, options.backend)
    fleet = {
        "backend": options.backend,
        "replicas": options.replicas,
        "address": options.address,
    }
    with load_model_by_name(model, backend="ray", llm_opts=fleet) as lm:
        prompt = lm.tokenizer.encode("The best thing about a walk in the hills is")
        allowed = allowed_tokens(lm, avoid="e")
        start = time.perf_counter()
        result = asyncio.run(
            smc(lm, prompt, allowed, options.particles, options.max_tokens, random.Random(0))
        )
        report(lm, *result, time.perf_counter() - start)


if __name__ == "__main__":
    main()
