"""One sequential Monte Carlo in the forms that a program may have: all give the same particles."""

from __future__ import annotations

import asyncio
import random

import torch

from genlm.core import resampling, together

#: The tokens that may be drawn: any byte tokenizer has them. The last one ends a particle.
ALLOWED = torch.arange(3, 256, 9)
PROMPT = [7, 8]
END = 255


def tokens_and_gains(rows, uniforms):
    """For each row, the token that a random number selects among the allowed ones, and the
    logarithm of their mass."""
    mass = rows[:, ALLOWED].double().exp().cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64)[:, None] * mass[:, -1:]
    drawn = ALLOWED[torch.searchsorted(mass, points, right=True)[:, 0]]
    return drawn, mass[:, -1].log()


@together
def drawn_together(rows, uniforms):
    drawn, gains = tokens_and_gains(rows, uniforms)
    return [*zip(drawn.tolist(), gains.tolist(), strict=True)]


class Coroutines:
    """Particles that are lists, each with a coroutine for its requests."""

    def __init__(self, lm, n, lora_name=None):
        self.lm, self.n, self.lora_name = lm, n, lora_name
        self.texts, self.over = [() for _ in range(n)], [False] * n

    async def step(self, uniforms):
        return await asyncio.gather(*map(self.extend, range(self.n), uniforms))

    async def extend(self, at, uniform):
        if self.over[at]:
            return 0.0
        token, gain = await self.asked([*PROMPT, *self.texts[at]], uniform)
        if token == END:
            self.over[at] = True
        else:
            self.texts[at] += (token,)
        return gain

    def select(self, ancestors):
        self.texts = [self.texts[at] for at in ancestors]
        self.over = [self.over[at] for at in ancestors]


class ByRows(Coroutines):
    async def asked(self, ids, uniform):
        row = await self.lm.next_token_logprobs(ids, self.lora_name)
        drawn, gains = tokens_and_gains(row[None], [uniform])
        return int(drawn), float(gains)


class ByThen(Coroutines):
    async def asked(self, ids, uniform):
        then = drawn_together(uniform)
        return await self.lm.next_token_logprobs(ids, self.lora_name, then=then)


class InTensors:
    """A population whose rows come to the program."""

    def __init__(self, lm, n, lora_name=None):
        self.particles = lm.population(PROMPT, n, lora_name)

    @property
    def texts(self):
        return [*map(tuple, self.particles.continuations)]

    async def step(self, uniforms):
        over = self.particles.ended
        drawn, gains = tokens_and_gains(await self.particles.logprobs(), uniforms)
        self.particles.extend(drawn, ended=drawn == END)
        return torch.where(over, 0.0, gains).tolist()

    def select(self, ancestors):
        self.particles.select(ancestors)


class InParts(InTensors):
    async def step(self, uniforms):
        drawn = torch.zeros(len(uniforms), dtype=torch.long)
        gains = torch.zeros(len(uniforms), dtype=torch.float64)
        async for part, rows in self.particles.parts():
            drawn[part], gains[part] = tokens_and_gains(rows, uniforms[part])
        self.particles.extend(drawn, ended=drawn == END)
        return gains.tolist()


class InTensorsByThen(InTensors):
    async def step(self, uniforms):
        found = await self.particles.logprobs(then=map(drawn_together, uniforms))
        drawn, gains = zip(*found, strict=True)
        self.particles.extend(drawn, ended=torch.tensor(drawn) == END)
        return gains


FORMS = [ByRows, ByThen, InTensors, InParts, InTensorsByThen]


async def smc(form, lm, n=40, steps=8, lora_name=None, seed=0):
    """The texts of all particles, the log normalising constant, and how often they were
    resampled."""
    source, particles = random.Random(seed), form(lm, n, lora_name)
    weights, constant, times = [0.0] * n, 0.0, 0
    for _ in range(steps):
        gains = await particles.step([source.random() for _ in range(n)])
        weights = [weight + gain for weight, gain in zip(weights, gains, strict=True)]
        if resampling.effective_sample_size(weights) < 0.9 * n:
            constant += resampling.log_mean_weight(weights)
            particles.select(resampling.systematic(weights, source.random()).tolist())
            weights, times = [0.0] * n, times + 1
    return particles.texts, constant + resampling.log_mean_weight(weights), times
