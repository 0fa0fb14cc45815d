"""Asks an engine as the core does: through its hooks, with every argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm.core import Adapter, Query


def rows_of(engine: Any, queries: Sequence[Query]) -> torch.Tensor:
    """The rows of some queries that come together, after as many steps as they take."""
    rows: dict[Query, torch.Tensor] = {}
    new = list(dict.fromkeys(queries))
    while len(rows) < len(set(queries)):
        answers = engine.genlm_step(new, dropped=(), width=engine.vocab_size)
        rows.update((one.request, one.result) for one in answers)
        new = []
    return torch.stack([rows[query] for query in queries])


def add_lora(engine: Any, adapter: Adapter) -> Any:
    """Read an adapter's folder, and load its weights."""
    return engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
