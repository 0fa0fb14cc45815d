"""The base model below adapters: checks that an adapter fits its weights, and ways to keep PEFT
from changing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from genlm.core.errors import InvalidAdapterError, UnsupportedError
from genlm.kit.adapter_files import PREFIX, WEIGHTS, AdapterFolder, Feature, read_tensor


def require_same_embeddings(
    model: Any, folder: AdapterFolder, parameters: Mapping[str, tuple[int, ...]]
) -> None:
    """Reject an adapter that holds copies of another model's base weights. PEFT saves such copies
    of embeddings with LoRA matrices, and of modules that were trained whole.

    Args:
        model: The base model.
        folder: The adapter.
        parameters: The shapes of the model's parameters.

    Raises:
        InvalidAdapterError: a saved weight has another shape than the model's.
    """
    retrained = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in folder.tensors.items()
        if any(f"{saved}." in name for saved in folder.retrained)
    }
    for name, saved in {**retrained, **folder.saved_copies}.items():
        shape = parameters.get(name)
        if saved.shape != shape and (shape is not None or name not in retrained):
            longer = shape is not None and saved.shape[1:] == shape[1:]
            raise InvalidAdapterError(
                f"LoRA adapter {folder.path} is made for another model: it holds {name} of "
                f"shape {list(saved.shape)}, where this model has "
                f"{'nothing' if shape is None else list(shape)}; "
                + (
                    f"if tokens were added for it, call resize_token_embeddings({saved.shape[0]}) "
                    "on the model and give the model to AsyncTransformer, with the adapter's "
                    "tokenizer"
                    if longer
                    else "give an adapter made for this model"
                )
            )
    for name, saved in folder.saved_copies.items():
        module = model.get_submodule(name.rpartition(".")[0])
        weight = getattr(module, "base_layer", module).weight
        copy = read_tensor(folder.path / WEIGHTS, saved).to(weight.device, weight.dtype)
        if not torch.allclose(copy, weight, rtol=2**-7, atol=1e-6):
            raise InvalidAdapterError(
                f"LoRA adapter {folder.path} holds {name} of another base model; give the "
                "base model that it was trained on, or an adapter made for this model"
            )


def require_plain_weights(model: Any, folder: AdapterFolder) -> None:
    """Reject an adapter for which PEFT would read quantised weights, because it would misread them:
    bitsandbytes repacks 4-bit weights for the CPU. PEFT reads base weights to copy modules that
    were trained whole, and for DoRA.

    Raises:
        UnsupportedError: such weights are quantised.
    """
    below_dora = Feature.DORA in folder.features and model.device.type == "cpu"
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.is_floating_point():
            continue
        # PEFT retrains every module whose name ends with this one, and the modules inside it.
        is_retrained = any(f"{saved}." in f"{name}." for saved in folder.retrained)
        if is_retrained or below_dora:
            kind = Feature.RETRAINED if is_retrained else Feature.DORA
            raise UnsupportedError(
                f"LoRA adapter {folder.path} has {folder.features[kind]} ({kind.description}), "
                f"and the weights of {name} are quantised; merge the adapter into the model, "
                "or load the model without quantisation"
            )


@contextmanager
def plain_state_dicts(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, ``state_dict()`` of every module only collects its tensors.

    PEFT asks the whole model for the names of its own tensors. To make a state dict, bitsandbytes
    unpacks in place the 4-bit weights that it has packed for the CPU, which loses precision and
    changes scales.
    """
    plain = torch.nn.Module._save_to_state_dict
    others = [one for one in model.modules() if type(one)._save_to_state_dict is not plain]
    for module in others:
        module.__dict__["_save_to_state_dict"] = MethodType(plain, module)
    try:
        yield
    finally:
        for module in others:
            del module.__dict__["_save_to_state_dict"]


@contextmanager
def asked_for_own_tokens(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, embeddings with single trained tokens name only the tokens of the adapter
    that is loaded. PEFT (up to 0.21) looks for the tokens of every adapter in each file."""
    from peft.utils.other import TrainableTokensWrapper

    def own(wrapper: Any, name: str) -> dict[str, str]:
        of_kind = TrainableTokensWrapper.adapter_state_dict_load_map
        return of_kind(wrapper, name) if name in wrapper._adapters else {}

    wrappers = [one for one in model.modules() if isinstance(one, TrainableTokensWrapper)]
    for wrapper in wrappers:
        wrapper.__dict__["adapter_state_dict_load_map"] = MethodType(own, wrapper)
    try:
        yield
    finally:
        for wrapper in wrappers:
            del wrapper.__dict__["adapter_state_dict_load_map"]
