"""Faulty models: for every clause of the suite at least one that breaks it.

Most faults sit in the engine, as a plugin's would; those of what the core does (futures, caches,
refusals) in a subclass of :class:`~genlm.core.AsyncLM`.
"""

from . import rows, state, callers, adapters, sampling, space, company, alone  # noqa: F401, I001  (each registers its own)
from .registry import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
