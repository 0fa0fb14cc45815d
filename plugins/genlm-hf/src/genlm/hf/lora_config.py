"""The configuration of an adapter, as it is given to PEFT."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from genlm.core.errors import InvalidAdapterError
from genlm.kit.adapter_files import AdapterFolder, LoraModule, ends

#: The setting for tokens whose embeddings are trained.
TOKENS = "trainable_token_indices"


def lora_config(folder: AdapterFolder, parameters: Mapping[str, tuple[int, ...]]) -> Any:
    """The configuration for PEFT, made only from names that both the file and the model have. So
    PEFT evaluates no regular expression of the file, imports nothing that it names, initialises no
    base weight again, and allocates nothing for modules that the model lacks.

    Raises:
        InvalidAdapterError: the model lacks parameters that the adapter adapts, or has them in
            another shape; or the file lacks a module that was trained whole.
    """
    from peft import LoraConfig

    given, settings = folder.config, folder.settings
    whole = [
        each for each in settings.modules_to_save if any(f"{each}." in name for name in parameters)
    ]
    if missing := [each for each in whole if each not in folder.retrained]:
        raise InvalidAdapterError(
            f"LoRA adapter {folder.path} lacks the weights of {missing[0]}, which modules_to_save "
            "names; save it again"
        )
    modules = [name for name in folder.modules if not settings.adapts_parameters(name)]
    targets = _target_parameters(folder, parameters)
    ranks = {name: settings.rank(name) for name in (*modules, *targets)}
    most_common = Counter(ranks.values()).most_common(1)[0][0]
    return LoraConfig(
        r=most_common,
        rank_pattern={
            _one_of(name for name in ranks if ranks[name] == rank): rank
            for rank in {*ranks.values()} - {most_common}
        },
        target_modules=modules,
        target_parameters=targets or None,
        modules_to_save=whole or None,
        trainable_token_indices=given.get(TOKENS),
        fan_in_fan_out=bool(given.get("fan_in_fan_out")),
        use_dora=bool(given.get("use_dora")),
        lora_bias=bool(given.get("lora_bias")),
        inference_mode=True,
    )


def changes(
    model: Any, config: Any, parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """How an adapter changes the layers of a model. For each layer: the setting by which it is
    adapted, and the module that PEFT wraps for it.

    Args:
        model: The model.
        config: The adapter's configuration for PEFT.
        parameters: The parameters of the model without adapters.
    """
    changed = {name: ("LoRA", name) for name in sorted(config.target_modules)}
    for parameter in config.target_parameters or ():
        owner = parameter.rpartition(".")[0]
        changed[owner] = "target_parameters", owner
    embeddings = [model.get_input_embeddings()]
    if tied := getattr(model.config, "tie_word_embeddings", False):
        embeddings.append(model.get_output_embeddings())
    tokens = config.trainable_token_indices or []
    wrapped = list(tokens) if isinstance(tokens, dict) else []
    if tokens and (tied or not wrapped):
        wrapped += [name for name, each in model.named_modules() if each in embeddings]
    # PEFT retrains every module whose name ends with this one, and the modules inside it.
    for how, saved in (
        ("modules_to_save", config.modules_to_save or ()),
        (TOKENS, wrapped),
    ):
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in parameters):
            for end in saved:
                before, found, _ = f"{layer}.".partition(f"{end}.")
                if found:
                    changed[layer] = how, before + end
    return changed


def require_known_tokens(
    folder: AdapterFolder,
    changed: Mapping[str, tuple[str, str]],
    parameters: Mapping[str, tuple[int, ...]],
) -> None:
    """Reject an adapter that trains tokens which the model does not have. On CUDA, an index beyond
    the end of a tensor makes the device unusable for the whole process.

    Args:
        folder: The adapter.
        changed: The result of :func:`changes` for the adapter.
        parameters: The shapes of the parameters of the model without adapters.

    Raises:
        InvalidAdapterError: the adapter trains such a token.
    """
    given = folder.config.get(TOKENS) or []
    largest = max(
        chain.from_iterable(given.values() if isinstance(given, dict) else [given]), default=0
    )
    for how, module in changed.values():
        size = parameters.get(f"{module}.weight", (math.inf,))[0]
        if how == TOKENS and largest >= size:
            raise InvalidAdapterError(
                f"LoRA adapter {folder.path} is made for another model: it trains token {largest} "
                f"of {module}, which has {size}; give an adapter made for this model"
            )


def _one_of(names: Iterable[str]) -> str:
    """A regular expression that matches exactly these names."""
    return f"^(?:{'|'.join(map(re.escape, names))})"


def _target_parameters(
    folder: AdapterFolder, parameters: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """The full names of the parameters that PEFT adapts directly, rather than through a module.

    PEFT wraps a module once for each of its adapted parameters, so the file has one pair of
    matrices for each.
    """
    settings = folder.settings
    matches: dict[str, list[str]] = {}
    for name in parameters:
        if any(end in settings.target_parameters for end in ends(name)):
            matches.setdefault(name.rpartition(".")[0], []).append(name)
    pairs: dict[str, list[LoraModule]] = {}
    for name, module in folder.modules.items():
        if settings.adapts_parameters(name):
            pairs.setdefault(name.replace(".base_layer", ""), []).append(module)
    if missing := sorted(matches.keys() - pairs.keys()):
        raise InvalidAdapterError(
            f"LoRA adapter {folder.path} lacks the matrices of {matches[missing[0]][0]}, which its "
            "target_parameters name; save it again"
        )
    for owner, found in pairs.items():
        sizes = [(*parameters[name], settings.rank(name)) for name in matches.get(owner, ())]
        if len(found) != len(sizes) or not all(
            any(_fits(pair, size) for size in sizes) for pair in found
        ):
            raise InvalidAdapterError(
                f"LoRA adapter {folder.path} is made for another model: it adapts parameters of "
                f"{owner} by {[(pair.inputs, pair.rank, pair.outputs) for pair in found]} (inputs, "
                f"rank of all experts, outputs), where this model has {sizes} (shape, and the rank "
                "by the configuration); give an adapter made for this model"
            )
    return [name for owner in pairs for name in matches[owner]]


def _fits(pair: LoraModule, size: tuple[int, ...]) -> bool:
    *experts, first, second, rank = size
    return {pair.inputs, pair.outputs} == {first, second} and pair.rank == rank * math.prod(experts)
