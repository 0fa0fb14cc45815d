"""An adapter as plain LoRA, for engines that apply nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files.config import CONFIG
from genlm.kit.adapter_files.folder import PREFIX, WEIGHTS, AdapterFolder


def write_plain(
    adapter: AdapterFolder, folder: Path, zeros: Mapping[str, tuple[int, int]] | None = None
) -> int:
    """Save an adapter as plain LoRA of one rank and scale 1, for engines that apply nothing else.

    B is multiplied by the scale, in float32. Matrices of less than the largest rank are filled up
    with zeros. Nothing else of the folder reaches the engine.

    Args:
        adapter: The adapter.
        folder: Where to save it.
        zeros: Further modules, which get matrices of zeros, with the features that they take and
            give. For engines that adapt several modules together.

    Returns:
        The rank.

    Raises:
        InvalidAdapterError: weights are infinite when multiplied by the scale.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    zeros = zeros or {}
    rank = max((module.rank for module in adapter.modules.values()), default=1)
    tensors = {}
    with safe_open(adapter.path / WEIGHTS, framework="pt") as saved:
        for module in adapter.modules.values():
            down, up = saved.get_tensor(module.down), saved.get_tensor(module.up)
            if module.scale != 1:
                up = up.float() * module.scale
                if not up.isfinite().all():
                    raise InvalidAdapterError(
                        f"LoRA adapter {adapter.path} has weights at {module.up} that its scale of "
                        f"{module.scale:g} takes beyond float32; train it again, or take an "
                        "earlier checkpoint of it"
                    )
            missing = rank - module.rank
            tensors[module.down] = torch.nn.functional.pad(down, (0, 0, 0, missing)).contiguous()
            tensors[module.up] = torch.nn.functional.pad(up, (0, missing)).contiguous()
    for name, (inputs, outputs) in zeros.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.zeros(rank, inputs, dtype=torch.float32)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.zeros(outputs, rank, dtype=torch.float32)
    names = {name.rpartition(".")[2] for name in (*adapter.modules, *zeros)}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(names),
        "bias": "none",
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    return rank
