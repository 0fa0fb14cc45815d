"""Clauses on the files of LoRA adapters: what the folder holds now, and what does not fit."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from genlm.core.conformance.compare import check
from genlm.core.conformance.subject import Subject


class AdapterFileClauses:
    """Folders that change, and folders that are wrong."""

    def test_same_path_with_other_weights(self, live: Subject) -> None:
        """An adapter that is removed and added again from the same folder has the weights that the
        folder holds now."""
        first, second, *_ = live.needs_adapters(2)
        folders = [live.adapters[first], live.adapters[second]]
        if not all(map(os.path.isdir, folders)):
            pytest.skip("the adapters are not folders")
        context = live.contexts.long(min(20, live.contexts.limit))
        rows = [live.cold(context, first), live.cold(context, second)]
        with tempfile.TemporaryDirectory() as scratch:
            same = os.path.join(scratch, "adapter")
            for folder, row in zip([*folders, folders[0]], [*rows, rows[0]], strict=True):
                shutil.rmtree(same, ignore_errors=True)
                shutil.copytree(folder, same)
                live.bind("moving", same)
                live.expect_row(
                    live.ask(context, "moving"), row, f"an adapter from a copy of {folder}"
                )
                live.remove("moving")

    def test_adapter_of_another_model(self, live: Subject) -> None:
        """An adapter whose matrices do not fit the model is refused, and every row is as before."""
        name, *_ = live.needs_adapters()
        context = live.contexts.stem[:4]
        live.cold(context), live.cold(context, name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = os.path.join(scratch, "wider")
            if not _write_wider(live.adapters[name], folder):
                pytest.skip("the adapter is not a folder with adapter_model.safetensors")
            try:
                live.bind("wider", folder)
            except Exception as error:
                check(bool(str(error)), f"{type(error).__name__} without a message")
            else:
                (outcome,) = live.gather([context], ["wider"])
                live.remove("wider")
                check(
                    False,
                    "an adapter of a model of twice the width was accepted, and gives "
                    f"{outcome!r:.80}",
                )
        for chosen in (None, name):
            live.check_row(context, chosen, how="after a wrong adapter")


def _write_wider(source: str, target: str) -> bool:
    """Copy an adapter with matrices of twice the width; returns whether there was one to copy."""
    weights = Path(source) / "adapter_model.safetensors"
    if not weights.is_file():
        return False
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    wider = {}
    for name, tensor in load_file(str(weights)).items():
        dimension = 1 if "lora_A" in name else 0
        wider[name] = torch.cat([tensor, tensor], dim=dimension).contiguous()
    save_file(wider, os.path.join(target, weights.name), metadata={"format": "pt"})
    return True
