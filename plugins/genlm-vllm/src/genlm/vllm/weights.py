"""Checks the weights that vLLM loads. vLLM ignores names that its classes do not have, and may read
other files than transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genlm.core.checks import describe_error
from genlm.core.errors import UnsupportedError
from genlm.kit.checkpoints import Shapes, read_by_transformers
from genlm.kit.loads import Reading

#: The values of ``load_format`` for folders that transformers can read too.
FORMATS = ("auto", "hf", "safetensors")

#: The attribute of a loaded model that :func:`unread` reads.
UNREAD = "genlm_unread_weights"


@contextmanager
def watched() -> Iterator[None]:
    """Inside the block, vLLM loads a model in this process, see :func:`watch`."""
    end = watch()
    try:
        yield
    finally:
        end()


def watch() -> Callable[[], None]:
    """Let vLLM's loader read the files that transformers reads, and note the tensors that it leaves
    out. Calling the result ends this."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as Loader

    prepare, load = Loader._prepare_weights, Loader.load_weights
    if hasattr(load, UNREAD):  # a forked process inherits its parent's
        return lambda: None

    def prepare_weights(self: Any, *args: Any, **named: Any) -> tuple[Any, ...]:
        folder, files, safe, *more = prepare(self, *args, **named)
        if self.load_config.load_format in FORMATS:
            files = read_by_transformers(folder, files)
            safe = files[0].endswith(".safetensors")
        return folder, files, safe, *more

    def load_weights(self: Any, model: Any, *args: Any, **named: Any) -> None:
        reading, weights = Reading(), self.get_all_weights
        self.get_all_weights = lambda *of, **how: reading.of(weights(*of, **how))
        try:
            with reading.watched():
                load(self, model, *args, **named)
        finally:
            del self.get_all_weights
        setattr(model, UNREAD, reading.unread(model))

    setattr(load_weights, UNREAD, True)

    def end() -> None:
        Loader._prepare_weights, Loader.load_weights = prepare, load

    Loader._prepare_weights, Loader.load_weights = prepare_weights, load_weights
    return end


def unread(model: Any) -> Shapes:
    """The shapes of the tensors of a loaded model's checkpoint that vLLM did not read, by name.
    Empty if another one of vLLM's loaders loaded the model."""
    found: Shapes = getattr(model, UNREAD, {})
    return found


def explain_repacked_weights(model: Any) -> None:
    """Let a model explain why vLLM cannot load other weights into it: on a CPU, vLLM has repacked
    the loaded ones."""
    # Otherwise a closed model would keep itself alive.
    own: Any = weakref.WeakMethod(model.load_weights)

    def load_weights(*args: Any, **named: Any) -> Any:
        try:
            return own()(*args, **named)
        # The cause is a size, or the loader no longer exists.
        except (AssertionError, AttributeError) as error:
            raise UnsupportedError(
                "vLLM has packed the weights of this model anew, and cannot load others into it "
                f"({describe_error(error)}); some may have been loaded, so close it: save the "
                "weights to a folder and load that, or load the model with backend='hf'"
            ) from error

    model.load_weights = load_weights
