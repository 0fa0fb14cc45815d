"""The sampler of these engines: temperature, top_k, top_p, and one uniform number a token."""

from __future__ import annotations

import numpy as np

from .hashing import WIDTH


class Sampler:
    """Draws the tokens of one request."""

    def __init__(self, how):
        self.how = how
        self.random = np.random.Generator(np.random.PCG64(self.seed()))

    def seed(self):
        return self.how.seed

    @property
    def is_greedy(self):
        return self.how.temperature < 1e-5

    def draw(self, row):
        row = np.asarray(row, dtype=np.float64)
        if self.is_greedy:
            return int(row.argmax())
        mass = np.cumsum(self.filtered(self.tempered(row)))
        return int(np.searchsorted(mass, self.random.random() * mass[-1], side="right"))

    def tempered(self, row):
        p = np.exp((row - row.max()) / self.how.temperature)
        return p / p.sum()

    def filtered(self, p):
        return self.top_p(self.top_k(p))

    def top_k(self, p):
        k = self.how.top_k
        return p if k is None or k >= len(p) else only(p, likeliest(p)[:k])

    def top_p(self, p):
        if self.how.top_p is None:
            return p
        order = likeliest(p)
        count = int(np.searchsorted(np.cumsum(p[order]), self.how.top_p - 1e-12)) + 1
        return only(p, order[:count])


def likeliest(p):
    return np.argsort(-p, kind="stable")


def only(p, kept):
    """The distribution over the kept tokens alone."""
    found = np.zeros_like(p)
    found[kept] = p[kept]
    return found / found.sum()


def drawn(sampler, most, stops, row_after):
    """A continuation, of a function that gives the row after some tokens."""
    ids = []
    while len(ids) < most:
        token = sampler.draw(row_after(tuple(ids))[:WIDTH])
        if token in stops:
            break
        ids.append(token)
    return ids
