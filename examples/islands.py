"""The sequential Monte Carlo of smc.py, but the program goes to the model: each island is a Ray
actor with its own model and a share of the particles. Weights and token ids travel, rows do not.

On the same seed the result is that of smc.py, for any number of islands: random numbers are drawn
here, in the same order, and particles are resampled here, all of them together. An island keeps
nothing between two calls, so a call is repeated when a worker is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import ray
from smc import (  # type: ignore[import-not-found]  # beside it
    MODELS,
    Particle,
    allowed_tokens,
    effective_size,
    extend,
    log_mean_weight,
    report_particles,
    resample,
)

from genlm.core import Token, load_model_by_name
from genlm.core.reductions import draw_among


class Island:
    """A model, and the part of the program that runs with it."""

    def __init__(
        self, model: str, backend: str, options: dict[str, Any], prompt: str, avoid: str
    ) -> None:
        self.lm = load_model_by_name(model, backend, options)
        self.prompt = self.lm.encode(prompt)
        self.draw = draw_among(allowed_tokens(self.lm, avoid))

    async def advance(
        self, particles: list[Particle], uniforms: list[list[float]]
    ) -> list[Particle]:
        """The particles, with one more token for each of their random numbers."""
        await asyncio.gather(*map(self.walk, particles, uniforms))
        return particles

    async def walk(self, particle: Particle, uniforms: list[float]) -> None:
        for uniform in uniforms:
            if not particle.finished:
                await extend(particle, self.lm, self.prompt, self.draw(uniform))

    def byte_vocab(self) -> list[Token]:
        return self.lm.byte_vocab

    def requests(self) -> int:
        """How many tokens were drawn here since the worker started."""
        return self.lm.stats.requests


def settle(
    n: int, *island: Any, num_cpus: float = 1, num_gpus: float = 0
) -> list[ray.actor.ActorHandle]:
    """Start ``n`` islands. Ray restarts a lost one, and repeats its call."""
    actor = ray.remote(Island).options(
        num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1
    )
    return [actor.remote(*island) for _ in range(n)]


def await_start(islands: list[ray.actor.ActorHandle], patience: float) -> None:
    """Wait until the models are loaded; those for which the cluster has no room never will be."""
    starting = [island.requests.remote() for island in islands]
    for seconds in (min(20, patience), patience):
        ready, waiting = ray.wait(starting, num_returns=len(starting), timeout=seconds)
        if not waiting:
            ray.get(ready)  # raises the error of an island's model
            return
        said = f"{len(ready)} of {len(islands)} islands are ready"
        print(f"{said}; the cluster has {ray.available_resources()} free", file=sys.stderr)
    raise SystemExit("take fewer --islands, give each fewer --cpus or --gpus, or more --patience")


def smc(
    islands: list[ray.actor.ActorHandle], n: int, max_tokens: int, every: int, rng: random.Random
) -> tuple[list[Particle], float]:
    """Run ``n`` particles; return them and the estimate of the log normalising constant. Weights
    are looked at every ``every`` tokens."""
    particles = [Particle() for _ in range(n)]
    log_constant = 0.0
    for begin in range(0, max_tokens, every):
        advance(islands, particles, min(every, max_tokens - begin), rng)
        if effective_size(particles) < n / 2:
            log_constant += log_mean_weight(particles)
            particles = resample(particles, rng.random())
    return particles, log_constant + log_mean_weight(particles)


def advance(
    islands: list[ray.actor.ActorHandle], particles: list[Particle], steps: int, rng: random.Random
) -> None:
    """Give all islands the same number of unfinished particles. Neighbours stay together: after
    resampling they are copies, which share key/value state."""
    moving = [index for index, particle in enumerate(particles) if not particle.finished]
    uniforms = {index: [rng.random() for _ in range(steps)] for index in moving}
    bounds = [len(moving) * i // len(islands) for i in range(len(islands) + 1)]
    shares = [moving[a:b] for a, b in itertools.pairwise(bounds)]
    calls = [
        island.advance.remote([particles[i] for i in share], [uniforms[i] for i in share])
        for island, share in zip(islands, shares, strict=True)
    ]
    for share, moved in zip(shares, ray.get(calls), strict=True):
        for index, particle in zip(share, moved, strict=True):
            particles[index] = particle


def connect(address: str | None) -> None:
    """Join a cluster, or start one here; its workers find the modules of this folder."""
    # Ray gives its workers a low priority, with which they hardly run on shared processors.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address or os.environ.get("RAY_ADDRESS") or "local",
        runtime_env={"working_dir": str(Path(__file__).parent)},
        include_dashboard=None if address else False,
        logging_level="ERROR",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="hf", help="the backend of each island")
    parser.add_argument("--model", help="a folder or a hub name, on every node")
    parser.add_argument("--options", type=json.loads, default={}, help="of the backend, as JSON")
    parser.add_argument("--address", help="a running cluster; without it one is started here")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="for each island")
    parser.add_argument("--gpus", type=float, default=0, help="for each island")
    parser.add_argument("--patience", type=float, default=300, help="seconds for models to load")
    parser.add_argument("--prompt", default="The best thing about a walk in the hills is")
    parser.add_argument("--avoid", default="e", metavar="LETTERS")
    parser.add_argument("--particles", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=25)
    parser.add_argument("--every", type=int, default=1, help="tokens between looks at the weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    connect(options.address)
    model = options.model or MODELS.get(options.backend, options.backend)
    island = (model, options.backend, options.options, options.prompt, options.avoid)
    islands = settle(options.islands, *island, num_cpus=options.cpus, num_gpus=options.gpus)
    await_start(islands, options.patience)
    rng = random.Random(options.seed)
    start = time.perf_counter()
    result = smc(islands, options.particles, options.max_tokens, options.every, rng)
    seconds = time.perf_counter() - start
    report_particles(ray.get(islands[0].byte_vocab.remote()), *result)
    requests = ray.get([island.requests.remote() for island in islands])
    print(
        f"{sum(requests)} requests on {len(islands)} islands, {min(requests)} to {max(requests)} "
        f"each; {sum(requests) / seconds:.0f} tokens per second"
    )


if __name__ == "__main__":
    main()
