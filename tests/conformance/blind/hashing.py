"""Rows from hashes. With a number of a pipe to read and of one to write, as a program, it answers
numbered contexts until the pipe closes; so it imports nothing of PyTorch's."""

from __future__ import annotations

import hashlib
import signal
import sys
from multiprocessing.connection import Connection

import numpy as np

MASK = (1 << 64) - 1
WIDTH = 258


def mix(state, token):
    """The state after one more token."""
    state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    state ^= state >> 29
    state = state * 0x94D049BB133111EB & MASK
    return state ^ (state >> 32)


def hashed(start, tokens):
    for token in tokens:
        start = mix(start, token)
    return start


def numbers_of(state):
    """``[WIDTH]`` float32 log-probabilities that only this state has."""
    logits = 2.0 * np.random.Generator(np.random.PCG64(state)).standard_normal(WIDTH)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def weights_of(adapter):
    """The start state under an adapter, computed from its file."""
    with open(adapter.path, "rb") as file:
        return int.from_bytes(hashlib.blake2b(file.read(), digest_size=8).digest(), "little")


def serve(read, write):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, answers = Connection(read, writable=False), Connection(write, readable=False)
    try:
        while (message := asked.recv()) is not None:
            number, tokens = message
            answers.send((number, numbers_of(hashed(31, tokens))))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
