"""Notices that modules or tensors were replaced, which a recorded step would miss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch


class ModelWatch:
    """Notices that tensors or modules of a model were replaced. Writes into a tensor need not be
    noticed, since a replay reads the new values.

    Args:
        modules: All modules of the model.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        # These are listed once, and empty ones are left out, because they are walked before each
        # step.
        self._own = [vars(one) for one in modules]
        parts = [part for one in modules for part in (one._parameters, one._buffers)]
        self._tensors = [part for part in parts if part]
        self._children = [one._modules for one in modules if one._modules]
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Whether a tensor, module or forward was replaced since the last call."""
        (parts, addresses), (seen, before) = self._look(), self._seen
        if len(parts) == len(seen) and all(map(is_, parts, seen)) and addresses == before:
            return False
        self._seen = parts, addresses
        return True

    def _look(self) -> tuple[list[Any], list[int]]:
        """The modules, their tensors and the forwards that are set on them; and the tensors'
        addresses."""
        tensors = [one for one in _values(self._tensors) if one is not None]
        forwards = [own.get("forward") for own in self._own]
        return [*tensors, *_values(self._children), *forwards], [one.data_ptr() for one in tensors]


def _values(parts: Sequence[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(part.values() for part in parts)
