"""Copies of many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def copies_of(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each row, in memory of its own: whoever keeps one keeps no other alive. On a GPU a
    few kernels make all of them; one for each would take longer than a forward."""
    import torch

    own = [torch.empty_like(row) for row in rows]
    if own:
        torch._foreach_copy_(own, list(rows))
    return own
