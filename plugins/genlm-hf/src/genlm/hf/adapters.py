"""LoRA adapters, through PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from genlm.core.errors import GenlmError, InvalidAdapterError, UnsupportedError
from genlm.core.types import Adapter
from genlm.hf.base_weights import (
    asked_for_own_tokens,
    plain_state_dicts,
    require_plain_weights,
    require_same_embeddings,
)
from genlm.hf.lora_config import changes, lora_config, require_known_tokens
from genlm.hf.names import in_names_of
from genlm.kit.adapter_files import AdapterFolder, Feature, module_shapes, read_adapter
from genlm.kit.memory import is_out_of_memory

#: The name that PEFT gives to the base model in a list of adapter names.
BASE = "__base__"

#: The features with which an adapter may share a forward with other adapters and the base model.
MIXED = frozenset({
    Feature.RSLORA, Feature.RANKS, Feature.ALPHAS, Feature.LORA_BIAS, Feature.EMBEDDING,
    Feature.HEAD, Feature.SAVED_EMBEDDINGS,
})  # fmt: skip

#: The features that PEFT applies to whole batches only.
ALONE = frozenset({Feature.DORA, Feature.RETRAINED, Feature.TOKENS, Feature.PARAMETERS})


class AdapterSet:
    """The adapters of one model, by version. PEFT is imported when the first one is added.

    Args:
        model: The model that PEFT's layers are injected into, in place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: Any = None
        # For each version, whether the adapter needs forwards of its own.
        self._alone: dict[int, bool] = {}
        # For each adapter, how it changes the layers that it changes.
        self._changes: dict[Adapter, dict[str, tuple[str, str]]] = {}
        self._active: int | None = None  # the version that a forward without adapter names applies
        # `None` means unknown, because PEFT has just wrapped or unwrapped modules.
        self._enabled: bool | None = None
        # The shapes of modules and parameters of the model without adapters.
        self._shapes: Mapping[str, tuple[int, int]] = {}
        self._parameters: Mapping[str, tuple[int, ...]] = {}
        # For each module, the names of its parameters.
        self._order: Mapping[Any, Sequence[str]] = {}
        self._trainable: list[Any] = []  # the model's parameters that PEFT freezes
        self._names: list[str] | None = None  # of each sequence of the current mixed batch
        self._wanted: list[str] | None = None  # of each position that reaches the output layer
        self._by_token: list[str] = []  # of each token of the current mixed batch
        self._hooks: list[Any] = []
        # PEFT's LoRA layers. Setting their switches here avoids that PEFT sets, at each switch,
        # whether every adapter's weights are trained. `None` means that an adapter changes other
        # kinds of layers too, so that PEFT must do the switching.
        self._layers: list[Any] | None = None

    def read(self, adapter: Adapter) -> AdapterFolder:
        """Read an adapter's folder. Called from any thread, while the model computes.

        Raises:
            InvalidAdapterError: the folder is invalid, or hf cannot apply this kind of adapter.
        """
        folder = read_adapter(adapter.path)  # first, since importing PEFT takes seconds
        folder.require(MIXED | ALONE, "hf")
        import peft  # noqa: F401  # here, on the caller's thread

        return folder

    def add(self, adapter: Adapter, folder: AdapterFolder) -> None:
        """Load an adapter's weights.

        Raises:
            InvalidAdapterError: the adapter is made for another model, changes a layer in another
                way than a loaded adapter, or cannot be loaded by PEFT. Nothing of it remains in the
                model.
            UnsupportedError: the model already had PEFT's layers, which would be removed together
                with this plugin's; some weights are offloaded; or PEFT would misread quantised
                weights.
        """
        if self._peft is None:
            self._describe_model()
        gpus = {p.device.index or 0 for p in self._model.parameters() if p.device.type == "cuda"}
        with (
            in_names_of(self._model, folder, self._shapes, self._parameters) as named,
            torch.random.fork_rng(gpus),  # PEFT draws initial weights, which are then overwritten
        ):
            self._add(adapter, named)

    def _add(self, adapter: Adapter, folder: AdapterFolder) -> None:
        from peft import PeftModel

        require_plain_weights(self._model, folder)
        folder.require_modules(self._shapes)
        require_same_embeddings(self._model, folder, self._parameters)
        name = _name(adapter.version)
        try:
            config = lora_config(folder, self._parameters)
            changed = changes(self._model, config, self._parameters)
            require_known_tokens(folder, changed, self._parameters)
            self._require_like_others(adapter, changed)
            with plain_state_dicts(self._model), asked_for_own_tokens(self._model):
                if self._peft is None:
                    self._peft = PeftModel(self._model, config, adapter_name=name)
                else:  # load_adapter would read the configuration from the file
                    self._peft.add_adapter(name, config)
                self._load(folder, name)
        except Exception as error:
            if not self._alone:
                self.close()
            else:
                # PEFT drops the configuration of a failed adapter but leaves its weights in the
                # layers, and it deletes only adapters that have a configuration.
                self._peft.peft_config.setdefault(name, next(iter(self._peft.peft_config.values())))
                self._delete(name)
            self._changed()
            if isinstance(error, GenlmError) or is_out_of_memory(error):
                raise
            raise InvalidAdapterError(
                f"PEFT cannot load the LoRA adapter {folder.path} into this model "
                f"({type(error).__name__}: {' '.join(str(error).split()):.500}); give an adapter "
                "made for this model, or merge it (merge_and_unload in PEFT)"
            ) from error
        self._alone[adapter.version] = bool(folder.features.keys() & ALONE)
        self._changes[adapter] = changed
        self._changed()

    def _require_like_others(
        self, adapter: Adapter, changed: Mapping[str, tuple[str, str]]
    ) -> None:
        """Raises: InvalidAdapterError: it changes a layer in another way than a loaded adapter."""
        for other, layers in self._changes.items():
            for name, how in changed.items():
                if layers.get(name, how) != how:
                    raise InvalidAdapterError(
                        f"LoRA adapter {adapter.path} changes {name} by {how[0]}, where "
                        f"the adapter {other.name!r} does so by {layers[name][0]}, and PEFT cannot "
                        f"have both in one model; call remove_lora({other.name!r}) first, merge "
                        "one of them into the model (merge_and_unload in PEFT), or load the model "
                        "a second time"
                    )

    def _describe_model(self) -> None:
        """Record the model's modules and parameters before any adapter changes them.

        Raises:
            UnsupportedError: the model already has adapters, or some of its weights are offloaded.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        if any(isinstance(module, BaseTunerLayer) for module in self._model.modules()):
            raise UnsupportedError(
                "the model already had PEFT adapters when AsyncTransformer was made, and they are "
                "part of the base model; merge them (merge_and_unload), or give the model without "
                "adapters and add every adapter with add_new_lora"
            )
        for name, each in self._model.named_parameters():
            if each.device.type == "meta":
                raise UnsupportedError(
                    f"the weights {name} are not in memory (device 'meta'), probably because they "
                    "were offloaded, and LoRA needs all weights in memory; load the model with a "
                    "device_map that keeps them there, or merge the adapter into the model "
                    "(merge_and_unload in PEFT)"
                )
        self._shapes = module_shapes(self._model)
        self._parameters = {
            name: tuple(each.shape)
            for name, each in self._model.named_parameters(remove_duplicate=False)
        }
        self._order = {each: [*each._parameters] for each in self._model.modules()}
        self._trainable = [each for each in self._model.parameters() if each.requires_grad]

    def remove(self, adapter: Adapter) -> None:
        """Drop an adapter's weights."""
        del self._alone[adapter.version], self._changes[adapter]
        if self._alone:
            self._delete(_name(adapter.version))
        else:
            self.close()  # PEFT cannot load an adapter into a model whose last one was removed
        self._changed()

    def close(self) -> None:
        """Take PEFT's layers out of the model again, and leave it as it was."""
        if self._shapes:
            self._unwrap(kept=())
            self._peft = None
            vars(self._model).pop("peft_config", None)
            for parameter in self._trainable:
                parameter.requires_grad_(True)

    def groups(self, adapters: Sequence[Adapter | None]) -> list[list[int]]:
        """The chunks that may share a forward, by index. Each adapter that PEFT cannot mix with
        others (DoRA, retrained modules) gets a group of its own; all other chunks share one."""
        if not any(self._alone.values()):
            return [[*range(len(adapters))]]
        alone: dict[int, list[int]] = {}
        mixed = []
        for at, adapter in enumerate(adapters):
            if adapter is not None and self._alone[adapter.version]:
                alone.setdefault(adapter.version, []).append(at)
            else:
                mixed.append(at)
        return [group for group in (mixed, *alone.values()) if group]

    @contextmanager
    def applied(
        self, adapters: Sequence[Adapter | None], wanted: Iterable[int], width: int
    ) -> Iterator[None]:
        """Inside the block, sequence ``i`` of every batch is computed with ``adapters[i]``.

        Args:
            adapters: One per sequence.
            wanted: The sequence of each position that the output layer sees, in its order.
            width: The tokens of each sequence.
        """
        if not self._alone:
            yield
            return
        distinct = set(adapters)
        if len(distinct) == 1:
            self._switch_to(adapters[0])
            yield
            return
        # An adapter that can be mixed is made active, so that modules which another adapter
        # replaces whole are off.
        self._switch_to(next(adapter for adapter in distinct if adapter is not None))
        self._names = [BASE if one is None else _name(one.version) for one in adapters]
        self._wanted = [self._names[at] for at in wanted]
        self._by_token = [name for name in self._names for _ in range(width)]
        try:
            yield
        finally:
            self._names = self._wanted = None

    def _load(self, folder: AdapterFolder, name: str) -> None:
        result = self._peft.load_adapter(str(folder.path), adapter_name=name)
        if result.unexpected_keys:
            raise InvalidAdapterError(
                f"LoRA adapter {folder.path} has {result.unexpected_keys[0]}, which this model has "
                "no place for; give an adapter made for this model"
            )
        if result.missing_keys:  # PEFT would leave them at their initial values
            raise InvalidAdapterError(
                f"LoRA adapter {folder.path} lacks {result.missing_keys[0].replace(f'.{name}', '')}"
                ", which its configuration asks for; save it again"
            )
        self._scale(folder, name)

    def _scale(self, folder: AdapterFolder, name: str) -> None:
        """Set the scale of every module. PEFT's own way matches each key of ``alpha_pattern``
        against each module."""
        from peft.tuners.lora.layer import LoraLayer, ParamWrapper

        for path, layer in self._model.named_modules():
            if isinstance(layer, LoraLayer) and name in layer.scaling:
                target = path.replace(".base_layer", "")
                if isinstance(layer, ParamWrapper):
                    target = f"{target}.{layer.parameter_name}"
                layer.scaling[name] = folder.settings.scale(target)

    def _delete(self, name: str) -> None:
        """Delete one of several adapters. Another adapter is made active first; otherwise PEFT
        would log a warning for each module."""
        self._peft.set_adapter(_name(next(iter(self._alone))))
        self._peft.delete_adapter(name)
        self._unwrap(kept=self._peft.peft_config)

    def _unwrap(self, kept: Any) -> None:
        """Put back the original modules that no adapter of ``kept`` changes, inner modules first.
        PEFT would keep them wrapped, or replace them by copies."""
        from peft.tuners.lora.layer import LoraLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        for name, module in reversed(list(self._model.named_modules())):
            whole = isinstance(module, AuxiliaryTrainingWrapper)
            if not (whole or isinstance(module, LoraLayer)):
                continue
            if not module._get_available_adapters() & set(kept):
                parent, _, last = name.rpartition(".")
                original = module.original_module if whole else module.base_layer
                setattr(self._model.get_submodule(parent), last, original)
                self._reorder(original)

    def _reorder(self, module: Any) -> None:
        """Restore the order of a module's parameters. When PEFT adapts a parameter directly, it
        removes it for each forward and appends it again at the end."""
        parameters = module._parameters
        for name in self._order.get(module, ()):
            if name in parameters:
                parameters[name] = parameters.pop(name)

    def _switch_to(self, adapter: Adapter | None) -> None:
        if adapter is None:
            self._enable(False)
            return
        if self._active != adapter.version:
            if self._layers is None:
                self._peft.set_adapter(_name(adapter.version))
            else:
                for layer in self._layers:
                    layer._active_adapter = [_name(adapter.version)]
            self._active = adapter.version
        self._enable(True)

    def _enable(self, enabled: bool) -> None:
        """Switch PEFT's layers on or off, unless they already are."""
        if enabled == self._enabled:
            return
        if self._layers is None:
            layers = self._peft.base_model
            (layers.enable_adapter_layers if enabled else layers.disable_adapter_layers)()
        else:
            for layer in self._layers:
                layer._disable_adapters = not enabled
        self._enabled = enabled

    def _changed(self) -> None:
        """Set up the layers again after PEFT has wrapped or unwrapped modules. New layers are on,
        whatever the state of the others, and have no hook yet.

        The plugin sets hooks of its own, which stay. PEFT sets its hooks for each mixed batch; if
        the batch raises, they would remain and name the wrong adapters for later batches.
        """
        self._active = self._enabled = None
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._layers = [], None
        if self._peft is not None:
            from peft.tuners.lora.layer import LoraLayer, ParamWrapper

            layers = [each for each in self._model.modules() if isinstance(each, LoraLayer)]
            if not any(self._alone.values()):
                self._layers = layers
            self._hooks = [
                layer.register_forward_pre_hook(self._name_adapters, with_kwargs=True)
                for layer in layers
                if not isinstance(layer, ParamWrapper)
            ]

    def _name_adapters(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._names is None:
            return None
        names = self._wanted if layer is self._model.get_output_embeddings() else self._names
        if args[0].dim() == 2 and len(args[0]) == len(self._by_token):
            names = self._by_token  # OPT and shared experts flatten all sequences into one
        return args, {**kwargs, "adapter_names": names}


def _name(version: int) -> str:
    return f"v{version}"
