"""The shapes of the modules of a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from genlm.core.checks import describe_error
from genlm.core.logs import get_logger

if TYPE_CHECKING:
    import torch

    from genlm.kit.adapter_files.folder import AdapterFolder

log = get_logger()


def shapes_in_transformers(config: Any) -> dict[str, tuple[int, int]] | None:
    """The result of :func:`module_shapes` for the model that transformers makes of a configuration,
    without weights; ``None`` if transformers has no such model.
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
            reason=describe_error(error)[:200],
        )
        return None
    return module_shapes(model)


def presumed_shapes(folder: AdapterFolder, config: Any) -> dict[str, tuple[int, int]]:
    """The modules of a model that transformers does not know, as far as an adapter's file shows
    them: those that it adapts. If these are in the first layers of one stack, the same modules of
    all its layers are presumed.

    Args:
        folder: The adapter.
        config: The model's configuration in transformers.
    """
    count = getattr(getattr(config, "text_config", config), "num_hidden_layers", 0)
    shapes = {}
    stacks: dict[str, dict[int, list[tuple[str, tuple[int, int]]]]] = {}
    for name, module in folder.modules.items():
        name = name.replace(".base_layer", "")
        shapes[name] = module.inputs, module.outputs
        if match := re.fullmatch(r"(.*?\.)(\d+)(\..*)", name):
            before, number, after = match.groups()
            stacks.setdefault(before, {}).setdefault(int(number), []).append((after, shapes[name]))
    if len(stacks) == 1:
        ((before, layers),) = stacks.items()
        if sorted(layers) == [*range(len(layers))]:
            shapes |= {
                f"{before}{number}{after}": shape
                for number in range(len(layers), count)
                for after, shape in layers[0]
            }
    return shapes


def module_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """How many features each linear layer and embedding of a model takes and gives, by its name."""
    names = (("in_features", "out_features"), ("num_embeddings", "embedding_dim"), ("nx", "nf"))
    return {
        name: (size[0], size[1])
        for name, module in model.named_modules()
        for size in [[getattr(module, each, None) for each in pair] for pair in names]
        if isinstance(size[0], int) and isinstance(size[1], int)
    }
