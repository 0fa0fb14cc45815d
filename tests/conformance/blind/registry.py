"""The list of these faults."""

from __future__ import annotations

from ..mutants.registry import Registry

#: Faulty engines by name, each with the clause that is about its fault.
BLIND = Registry()
breaks = BLIND.breaks
