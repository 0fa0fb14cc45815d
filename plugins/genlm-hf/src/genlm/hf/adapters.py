"""LoRA adapters, through PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from genlm.core.errors import UnsupportedError
from genlm.core.types import Adapter

#: What PEFT calls the base model in a list of adapter names.
BASE = "__base__"


class AdapterSet:
    """The adapters of one model, by version. PEFT is imported when the first one is added.

    Args:
        model: The model that PEFT's layers are injected into, in place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: Any = None
        # By version: whether it cannot share a forward with others.
        self._alone: dict[int, bool] = {}
        self._active: int | None = None  # the version that a forward without adapter names applies
        # None: not known, because PEFT has just wrapped or unwrapped modules.
        self._enabled: bool | None = None
        self._names: list[str] | None = None  # of the rows of the mixed batch under way
        self._hooks: list[Any] = []

    def add(self, adapter: Adapter) -> None:
        """Load an adapter's weights.

        Raises:
            UnsupportedError: PEFT is not installed, or had its layers in the model before: they
                would go with ours.
            Exception: whatever PEFT says of the folder; nothing of the adapter remains.
        """
        try:
            from peft import LoraConfig, PeftConfig, PeftModel
            from peft.tuners.tuners_utils import BaseTunerLayer
        except ImportError as error:
            raise UnsupportedError(
                "LoRA adapters need PEFT: pip install 'genlm-hf[lora]'"
            ) from error
        if self._peft is None and any(
            isinstance(module, BaseTunerLayer) for module in self._model.modules()
        ):
            raise UnsupportedError(
                "the model had adapters of PEFT's before AsyncTransformer got it, and they are "
                "part of the base model; "
                "merge them (merge_and_unload), or give the plain model and add every adapter by "
                "add_new_lora"
            )
        name = _name(adapter.version)
        config = PeftConfig.from_pretrained(adapter.path)
        config.inference_mode = True
        if not isinstance(config, LoraConfig):
            raise UnsupportedError(
                f"{adapter.path} is a {config.peft_type} adapter; only LoRA adapters can be "
                "switched"
            )
        try:
            if self._peft is None:
                self._peft = PeftModel(self._model, config, adapter_name=name)
            self._peft.load_adapter(adapter.path, adapter_name=name, peft_config=config)
        except Exception:
            if not self._alone:
                self.close()
            elif name in self._peft.peft_config:
                self._delete(name)
            self._changed()
            raise
        self._model.eval()
        self._changed()
        self._alone[adapter.version] = (
            config.use_dora or bool(config.modules_to_save) or self._adapts_head(name)
        )

    def remove(self, adapter: Adapter) -> None:
        """Drop an adapter's weights."""
        del self._alone[adapter.version]
        if self._alone:
            self._delete(_name(adapter.version))
        else:
            self.close()  # PEFT cannot load another adapter where none is left
        self._changed()

    def close(self) -> None:
        """Take PEFT's layers out of the model again."""
        if self._peft is not None:
            self._peft.unload()
            self._peft = None

    def groups(self, adapters: Sequence[Adapter | None]) -> list[list[int]]:
        """Which jobs may share a forward: all, but for adapters that PEFT cannot mix (DoRA,
        retrained modules)."""
        alone: dict[int, list[int]] = {}
        mixed = []
        for at, adapter in enumerate(adapters):
            if adapter is not None and self._alone[adapter.version]:
                alone.setdefault(adapter.version, []).append(at)
            else:
                mixed.append(at)
        return [group for group in (mixed, *alone.values()) if group]

    @contextmanager
    def applied(self, rows: Sequence[Adapter | None]) -> Iterator[None]:
        """While it lasts, row ``i`` of every batch is computed with ``rows[i]``."""
        if not self._alone:
            yield
            return
        if len(set(rows)) == 1:
            self._switch_to(rows[0])
            yield
            return
        self._enable(True)
        self._names = [BASE if row is None else _name(row.version) for row in rows]
        try:
            yield
        finally:
            self._names = None

    def _changed(self) -> None:
        """PEFT has wrapped or unwrapped modules: the new ones are on, whatever the others are, and
        have no hook yet.

        The hooks are ours, and stay. Those that PEFT makes for a mixed batch remain on its layers
        if the batch raises, and name adapters for later batches.
        """
        self._active = self._enabled = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._peft is not None:
            from peft.tuners.lora import LoraLayer

            self._hooks = [
                module.register_forward_pre_hook(self._name_rows, with_kwargs=True)
                for module in self._model.modules()
                if isinstance(module, LoraLayer)
            ]

    def _name_rows(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._names is None:
            return None
        return args, {**kwargs, "adapter_names": self._names}

    def _delete(self, name: str) -> None:
        """Delete one adapter of several; another one is made active first, or PEFT would warn of
        every module."""
        self._peft.set_adapter(_name(next(iter(self._alone))))
        self._peft.delete_adapter(name)

    def _switch_to(self, adapter: Adapter | None) -> None:
        self._enable(adapter is not None)
        if adapter is not None and self._active != adapter.version:
            self._peft.set_adapter(_name(adapter.version))
            self._active = adapter.version

    def _enable(self, enabled: bool) -> None:
        """Switch PEFT's layers on or off; it walks over all modules, so only where that changes
        something."""
        if enabled != self._enabled:
            layers = self._peft.base_model
            (layers.enable_adapter_layers if enabled else layers.disable_adapter_layers)()
            self._enabled = enabled

    def _adapts_head(self, name: str) -> bool:
        """Whether the adapter changes the output layer, which sees other rows than the batch
        has."""
        head = self._model.get_output_embeddings()
        return head is not None and name in getattr(head, "lora_A", {})


def _name(version: int) -> str:
    return f"v{version}"
