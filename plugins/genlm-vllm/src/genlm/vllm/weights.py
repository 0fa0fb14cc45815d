"""Checks the weights that vLLM loads. vLLM ignores names that its classes do not have, and may read
other files than transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from genlm.core.checks import describe_error
from genlm.core.errors import UnsupportedError
from genlm.kit.loads import Load, files_of_transformers, watch_load
from genlm.kit.replacing import replaced

#: The attribute of a loaded model that :func:`load_of` reads.
LOAD = "genlm_load"


@contextmanager
def watched() -> Iterator[None]:
    """Inside the block, vLLM loads a model in this process, see :func:`watch`."""
    end = watch()
    try:
        yield
    finally:
        end()


def watch() -> Callable[[], None]:
    """Let vLLM's loaders read the files that transformers reads, and note what models do with the
    weights that the loaders give them. Calling the result ends this."""
    from vllm.model_executor import model_loader

    make, ending = model_loader.utils.initialize_model, ExitStack()
    if hasattr(make, LOAD):  # a forked process inherits its parent's
        return ending.close

    making: list[Any] = []

    def make_watched(vllm_config: Any, *args: Any, **named: Any) -> Any:
        making.append(vllm_config)
        try:
            model = make(vllm_config, *args, **named)
        finally:
            making.pop()
        if making:  # the model is a part of another one, whose load is watched as a whole
            return model
        quantised = vllm_config.quant_config is not None
        needed = {*_plain_parameters(model)} if quantised else None
        ending.callback(watch_load(model, _note, needed=needed, partly=False))
        return model

    setattr(make_watched, LOAD, True)
    ending.enter_context(replaced("vllm.", "initialize_model", make, make_watched))
    loaders = model_loader.DefaultModelLoader, model_loader.RunaiModelStreamerLoader
    ending.enter_context(files_of_transformers(*loaders))
    return ending.close


def _plain_parameters(model: torch.nn.Module) -> Iterator[str]:
    """The names of the weights and biases of a quantised model's layers that are not quantised.
    Quantised parameters may be padded, or made by vLLM itself, so that checkpoints lack a part of
    them."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
        for own, _ in module.named_parameters(recurse=False):
            if plain or (isinstance(module, LinearBase) and own == "bias"):
                yield f"{name}.{own}"


def _note(model: Any, load: Load) -> None:
    setattr(model, LOAD, load)


def load_of(model: Any) -> Load | None:
    """The outcome of loading a model's checkpoint; ``None`` if the loader has written the weights
    without the model's ``load_weights``, or has made them up."""
    found: Load | None = getattr(model, LOAD, None)
    return found


def explain_repacked_weights(model: Any) -> None:
    """Let a model explain why vLLM cannot load other weights into it: on a CPU, vLLM has repacked
    the loaded ones."""
    own: Any = weakref.WeakMethod(model.load_weights)  # otherwise a model would keep itself alive

    def load_weights(*args: Any, **named: Any) -> Any:
        try:
            return own()(*args, **named)
        # The cause is a size, or the loader no longer exists.
        except (AssertionError, AttributeError) as error:
            raise UnsupportedError(
                "vLLM has packed the weights of this model into a layout of its own, and cannot "
                f"load new weights into it ({describe_error(error)}); some weights may have "
                "changed, so close the model. Then save the weights to a folder and load the "
                "folder, or load the model with backend='hf'"
            ) from error

    model.load_weights = load_weights
