"""How many positions a model has, and what its rotary embedding remembers of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from genlm.kit.settings import rope_reach

#: The names under which configurations give the number of positions.
POSITION_SETTINGS = ("max_position_embeddings", "max_target_positions", "max_seq_len")


def longest_context(model: Any) -> int | None:
    """The most tokens that a model has positions for; ``None`` if its positions are not limited."""
    config = model.config.get_text_config(decoder=True)
    named = [getattr(config, name, None) for name in POSITION_SETTINGS]
    counts = [count for count in named if isinstance(count, int) and count > 0]
    if not counts:
        return None
    longest = min(counts)
    for name, table in model.named_modules():
        # RoBERTa's positions begin after the id of the padding token, so the table has that many
        # fewer.
        padding = getattr(table, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            longest = min(longest, table.num_embeddings - padding - 1)
    return rope_reach(config, longest, "dynamic", "linear", "yarn")


def rope_scalings(config: Any, *types: str) -> list[dict[str, Any]]:
    """The parameters of a configuration's rotary embeddings of some types."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return [scaling for scaling in nested if scaling.get("rope_type") in types]


class DynamicRope:
    """The rotary embeddings of type ``dynamic`` of a model.

    transformers keeps using the frequencies of the longest context so far, also for shorter
    contexts, until a context needs no scaling.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._modules = [
            (module, kind)
            for module in model.modules()
            for kind, rope_type in _rope_types(module)
            if rope_type == "dynamic"
        ]

    def forget(self) -> None:
        """Forget earlier contexts, so that the next forward depends on its own tokens alone."""
        for module, kind in self._modules:
            frequencies = module.get_buffer("inv_freq" if kind is None else f"{kind}_inv_freq")
            start = torch.zeros(1, 1, dtype=torch.long, device=frequencies.device)
            module(frequencies, start, **({} if kind is None else {"layer_type": kind}))


def _rope_types(module: Any) -> Iterator[tuple[str | None, str]]:
    """The type of a module's rotary embedding, for each type of layer that has its own."""
    found = getattr(module, "rope_type", None)
    if isinstance(found, str):
        yield None, found
    elif isinstance(found, dict):
        yield from found.items()
