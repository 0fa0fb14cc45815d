"""Checks the weights that SGLang loads. SGLang leaves weights that a checkpoint lacks
uninitialised, ignores names that it does not know, and may read other files than transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from genlm.core.logs import get_logger
from genlm.kit.checkpoints import require_all_read
from genlm.kit.loads import (
    Load,
    files_of_transformers,
    require_all_written,
    watch_load,
)
from genlm.kit.replacing import replaced

log = get_logger()


@contextmanager
def required(model_path: str, settings: Any, load_format: str = "auto") -> Iterator[None]:
    """Inside the block, a model that SGLang constructs is rejected if some of its weights are not
    in the checkpoint, or if transformers would read more of the checkpoint.

    Args:
        model_path: The folder or hub name.
        settings: See :func:`genlm.kit.settings.settings_of`.
        load_format: SGLang's option.

    Raises:
        EngineError: weights are missing, or SGLang does not read all of them.
    """
    from sglang.srt.model_loader import loader

    make = loader._initialize_model
    names = ("DefaultModelLoader", "RunaiModelStreamerLoader")
    kinds = [getattr(loader, name) for name in names if hasattr(loader, name)]
    ending = ExitStack()
    loads: list[Load] = []

    def require(model: Any, load: Load) -> None:
        loads.append(load)
        require_all_written(load.unwritten, model_path, type(model).__name__, "SGLang")
        folder = folders[0] if folders else None
        left_out = {**load.unread, **_bias_of_head(model)}
        require_all_read(left_out, model_path, folder, settings, "SGLang")

    def make_watched(*args: Any, **named: Any) -> Any:
        model = make(*args, **named)
        if hasattr(model, "load_weights"):
            ending.callback(watch_load(model, require, settings))
        return model

    folders = ending.enter_context(files_of_transformers(*kinds))
    with ending, replaced("sglang.", "_initialize_model", make, make_watched):
        yield
    if load_format == "gguf" or not (loads or load_format == "dummy"):
        log.warning("weights.unwatched", model=model_path, load_format=load_format)


def _bias_of_head(model: Any) -> dict[str, tuple[int, ...]]:
    """The bias of an output layer, which SGLang loads but ignores when it computes logits."""
    bias = getattr(getattr(model, "lm_head", None), "bias", None)
    if isinstance(bias, torch.Tensor) and bool(bias.count_nonzero()):
        return {"lm_head.bias": tuple(bias.shape)}
    return {}
