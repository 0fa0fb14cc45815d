"""The shapes of the modules of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genlm.core.logs import get_logger

if TYPE_CHECKING:
    import torch

log = get_logger()


def shapes_in_transformers(config: Any) -> dict[str, tuple[int, int]] | None:
    """What :func:`module_shapes` gives for the model that transformers makes of a configuration;
    made without weights.

    ``None`` where transformers has no such model of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        log.warning(
            "adapter.unchecked",
            consequence="an adapter of another model may not be noticed",
            reason=f"{type(error).__name__}: {error}",
        )
        return None
    return module_shapes(model)


def module_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """How many features each linear layer and embedding of a model takes and gives, by its name."""
    names = (("in_features", "out_features"), ("num_embeddings", "embedding_dim"), ("nx", "nf"))
    return {
        name: (size[0], size[1])
        for name, module in model.named_modules()
        for size in [[getattr(module, each, None) for each in pair] for pair in names]
        if isinstance(size[0], int) and isinstance(size[1], int)
    }
