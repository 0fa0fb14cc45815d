"""Faulty models: for every clause of the suite at least one that breaks it.

The faults sit in the engine, as a plugin's would.
"""

from . import rows, state, adapters, sampling, space, company, alone  # noqa: F401, I001  (each registers its own)
from .registry import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
