"""Faulty engines: for every clause of the suite at least one that breaks it.

Those with a thread's address, and some others, were written from bugs that real engines had, or
from the hooks alone, before the suite was looked at. Sizes are those of real engines: blocks of 16
tokens, chunks of 256, graphs for 128 rows.
"""

from . import (  # noqa: F401  (each adds its own)
    adapters,
    capacity,
    contention,
    lifetime,
    process,
    rows,
    sampling,
    state,
)
from .registry import MUTANTS

__all__ = ["MUTANTS"]
