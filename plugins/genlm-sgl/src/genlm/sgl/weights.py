"""Checks the weights that SGLang loads. SGLang leaves weights that a checkpoint lacks
uninitialised, ignores names that it does not know, and may read other files than transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from genlm.core.errors import EngineError
from genlm.kit.checkpoints import read_by_transformers, require_all_read
from genlm.kit.loads import Reading
from genlm.kit.settings import in_transformers

#: The ends of the names of parameters that checkpoints may lack: those of quantised weights and
#: caches.
OPTIONAL = ("scale", "scale_inv", "zero_point")

#: The values of ``load_format`` for folders that transformers can read too.
FORMATS = ("auto", "safetensors")


@contextmanager
def required(model_path: str, settings: Any) -> Iterator[None]:
    """Inside the block, a model that SGLang constructs is rejected if some of its weights are not
    in the checkpoint, or if transformers would read more of the checkpoint.

    Args:
        model_path: The folder or hub name.
        settings: See :func:`genlm.kit.settings.settings_of`.

    Raises:
        EngineError: weights are missing, or SGLang does not read all of them.
    """
    from sglang.srt.model_loader import loader

    original, prepare = loader._initialize_model, loader.DefaultModelLoader._prepare_weights
    folders: list[Path] = []

    def prepare_as_transformers(self: Any, *args: Any, **named: Any) -> tuple[str, list[str], bool]:
        folder, files, safe = prepare(self, *args, **named)
        folders.append(Path(folder))
        if self.load_config.load_format in FORMATS:
            files = read_by_transformers(folder, files)
            safe = files[0].endswith(".safetensors")
        return folder, files, safe

    def initialize(*args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        load = model.load_weights

        def load_all(weights: Any, *given: Any, **named: Any) -> Any:
            del model.load_weights  # further calls may load only some of the weights
            marked, reading = list(_mark(model)), Reading()
            with reading.watched():
                result = load(reading.of(weights), *given, **named)
            absent = [one for one in marked if _is_absent(model, *one, settings)]
            if absent:
                raise EngineError(
                    f"SGLang finds no weights of {type(model).__name__} for {absent[0][0]} "
                    f"({len(absent)} of {len(marked)}) in {model_path!r}, or they are NaN; it may "
                    "call them otherwise: load it with backend='hf'"
                )
            folder = folders[0] if folders else None
            left_out = {**reading.unread(model), **_bias_of_head(model)}
            require_all_read(left_out, model_path, folder, settings, "SGLang")
            return result

        model.load_weights = load_all
        return model

    loader._initialize_model = initialize
    loader.DefaultModelLoader._prepare_weights = prepare_as_transformers
    try:
        yield
    finally:
        loader._initialize_model = original
        loader.DefaultModelLoader._prepare_weights = prepare


def _mark(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Write NaN into one column of every parameter, so that a row that is not loaded shows.

    Yields:
        The name of the parameter, the column, and its previous contents.
    """
    for name, parameter in model.named_parameters():
        plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if plain and parameter.numel() > 1 and not (parameter.is_meta or name.endswith(OPTIONAL)):
            place = parameter.data if parameter.ndim < 2 else parameter.data[..., 0]
            before = place.clone()
            place.fill_(torch.nan)
            yield name, place, before


def _is_absent(
    model: torch.nn.Module, name: str, place: torch.Tensor, before: torch.Tensor, settings: Any
) -> bool:
    """Whether a parameter was not loaded. A norm that only SGLang's model has is no loss: it gets
    its initial value back."""
    if not bool(place.isnan().any()):
        return False
    # Uninitialised memory may be zeros.
    constant = bool((before == before[0]).all()) and float(before[0]) != 0
    if model.get_parameter(name).ndim > 1 or not constant or not bool(place.isnan().all()):
        return True
    empty = in_transformers(settings)
    if empty is None or name in dict(empty.named_parameters()):
        return True
    place.copy_(before)
    return False


def _bias_of_head(model: Any) -> dict[str, tuple[int, ...]]:
    """The bias of an output layer, which SGLang loads but ignores when it computes logits."""
    bias = getattr(getattr(model, "lm_head", None), "bias", None)
    if isinstance(bias, torch.Tensor) and bool(bias.count_nonzero()):
        return {"lm_head.bias": tuple(bias.shape)}
    return {}
