"""Islands at work: when each advanced its particles, and when weights were looked at."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from attrs import define

from genlm.core.reductions import draw_among
from tools.pictures.svg import MARGIN, Picture
from tools.pictures.timeline import axis

ISLANDS = 4
PARTICLES = 32
TOKENS = 12
EVERY = 4
LABELS = 92
WIDTH = 760
LANE = 34


@define
class Work:
    """A share of particles on an island, in milliseconds since the run began."""

    island: int
    begin: float
    end: float
    particles: int


def picture() -> Picture:
    """Four islands of the example, over mocks that take 20 ms for a batch."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import islands as example  # type: ignore[import-not-found]
    import ray

    class Timed(example.Island):  # type: ignore[misc]
        def __init__(self, *island: Any) -> None:
            super().__init__(*island)
            allowed = example.allowed_tokens(self.lm, "e")[:-1]  # without the end-of-sequence token
            self.draw = draw_among(allowed)

        async def advance(self, particles: Any, uniforms: Any) -> Any:
            began = time.time()
            moved = await super().advance(particles, uniforms)
            self.spans = [*getattr(self, "spans", []), (began, time.time(), len(particles))]
            return moved

        def worked(self) -> list[tuple[float, float, int]]:
            return self.spans

    example.Island = Timed
    example.connect(None)
    try:
        options = ("mock", "mock", {"delay": 0.02}, "Once", "e")
        workers = example.settle(ISLANDS, *options, num_cpus=0.1)
        example.await_start(workers, 300)
        # The first call of an island takes longer, so it is left out of the picture.
        example.smc(workers, PARTICLES, EVERY, EVERY, random.Random(1))
        began = time.time()
        example.smc(workers, PARTICLES, TOKENS, EVERY, random.Random(0))
        spans = ray.get([worker.worked.remote() for worker in workers])
    finally:
        ray.shutdown()
    work = [
        Work(island, (begin - began) * 1e3, (end - began) * 1e3, particles)
        for island, done in enumerate(spans)
        for begin, end, particles in done
        if begin >= began
    ]
    return drawn(work)


def drawn(work: list[Work]) -> Picture:
    end = max(one.end for one in work)
    below = MARGIN + 8 + LANE * ISLANDS
    shown = Picture(
        f"{ISLANDS} islands advance their particles at the same time, {EVERY} tokens at once. Then "
        "the program looks at all weights, resamples all particles together, and shares them out.",
        WIDTH,
        below + 96,
    )
    scale = (WIDTH - LABELS - 2 * MARGIN) / end

    def x(at: float) -> float:
        return LABELS + MARGIN + at * scale

    rounds = looks(work)
    for island in range(ISLANDS):
        y = MARGIN + LANE * island
        shown.text(LABELS + MARGIN - 10, y + 19, f"island {island + 1}", anchor="end")
    for one in work:
        y = MARGIN + LANE * one.island
        wide = (one.end - one.begin) * scale
        shown.box(x(one.begin), y + 3, wide, LANE - 8, "engine", rx=3)
        words = f"{one.particles} particles, {EVERY} tokens"
        shown.text(x(one.begin) + wide / 2, y + 20, words, anchor="middle", fill="#ffffff", size=11)
    shown.text(LABELS + MARGIN - 10, below + 16, "the program", anchor="end", bold=True)
    for begin, until in rounds:
        shown.box(x(begin), below, (until - begin) * scale, 24, "other", "weights", rx=2)
    shown.text(x(0), below + 82, "red: the program has all particles: it looks at the weights, "
               "resamples all, and shares them out again", size=11)  # fmt: skip
    axis(shown, x, end, below + 34)
    return shown


def looks(work: list[Work]) -> list[tuple[float, float]]:
    """The times in which no island works."""
    free, at = [], 0.0
    for one in sorted(work, key=lambda one: one.begin):
        if one.begin > at:
            free.append((at, one.begin))
        at = max(at, one.end)
    return free
