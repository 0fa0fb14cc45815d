"""The weights that SGLang loads: it leaves what it does not find in a checkpoint as it was in
memory, and passes over names that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from genlm.core.errors import EngineError
from genlm.kit.settings import in_transformers, settings_of

#: Ends of the names of parameters that checkpoints need not have: of quantised weights and caches.
OPTIONAL = ("scale", "scale_inv", "zero_point")


@contextmanager
def required(model_path: str) -> Iterator[None]:
    """While SGLang makes a model: refuse it if its weights were not all in the checkpoint.

    Raises:
        EngineError: some were not.
    """
    from sglang.srt.model_loader import loader

    original = loader._initialize_model

    def initialize(*args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        load = model.load_weights

        def load_all(*given: Any, **named: Any) -> Any:
            del model.load_weights  # further weights may be a part of them
            marked = list(_mark(model))
            result = load(*given, **named)
            absent = [one for one in marked if _is_absent(model, *one, model_path)]
            if absent:
                raise EngineError(
                    f"SGLang finds no weights of {type(model).__name__} for {absent[0][0]} "
                    f"({len(absent)} of {len(marked)}) in {model_path!r}, or they are NaN; it may "
                    "call them otherwise: load it with backend='hf'"
                )
            return result

        model.load_weights = load_all
        return model

    loader._initialize_model = initialize
    try:
        yield
    finally:
        loader._initialize_model = original


def _mark(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Write NaN into a part of every parameter that each of its rows has.

    Yields:
        Its name, that part, and what was there.
    """
    for name, parameter in model.named_parameters():
        plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if plain and parameter.numel() > 1 and not (parameter.is_meta or name.endswith(OPTIONAL)):
            place = parameter.data if parameter.ndim < 2 else parameter.data[..., 0]
            before = place.clone()
            place.fill_(torch.nan)
            yield name, place, before


def _is_absent(
    model: torch.nn.Module, name: str, place: torch.Tensor, before: torch.Tensor, model_path: str
) -> bool:
    """Whether a parameter was not loaded. A norm that SGLang has and transformers' model has not is
    put back as it was made."""
    if not bool(place.isnan().any()):
        return False
    constant = bool((before == before[0]).all()) and float(before[0]) != 0  # memory may be zeros
    if model.get_parameter(name).ndim > 1 or not constant or not bool(place.isnan().all()):
        return True
    empty = in_transformers(settings_of(model_path))
    if empty is None or name in dict(empty.named_parameters()):
        return True
    place.copy_(before)
    return False
