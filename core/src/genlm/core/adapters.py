"""LoRA adapters and the names to which they are bound."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal

from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidOptionError, UnknownAdapterError
from genlm.core.types import Adapter


class Unset(Enum):
    """The value of ``lora_name`` if the caller gave none; it differs from ``None``."""

    UNSET = "the model's default adapter"


UNSET: Final = Unset.UNSET
LoraName = str | None | Literal[Unset.UNSET]


class AdapterRegistry:
    """Names, the adapters bound to them, and the default.

    Safe to use from any thread, except that only the engine thread may call :meth:`bind` and
    :meth:`unbind`.

    Attributes:
        default: The name of the adapter of calls that name none; ``None`` is the base model.
    """

    def __init__(self) -> None:
        self._bound: dict[str, Adapter] = {}
        self.default: str | None = None
        self._versions = itertools.count(1)

    def new(self, name: str, path: str | bytes | os.PathLike[Any]) -> Adapter:
        """An adapter with a version of its own, not bound yet.

        Raises:
            InvalidOptionError: the name is not a string or empty, or the path is not a path.
        """
        if not isinstance(name, str) or not name:
            raise InvalidOptionError(
                f"{name!r} cannot be the name of a LoRA adapter; give a string that is not empty"
            )
        try:
            return Adapter(name, os.fsdecode(path), next(self._versions))
        except TypeError:
            raise InvalidOptionError(
                "the path of a LoRA adapter must be a string or a pathlib.Path; "
                f"got {safe_repr(path)}"
            ) from None

    def bind(self, adapter: Adapter) -> Adapter | None:
        """Bind an adapter to its name, and return the adapter that was bound to it before."""
        old = self._bound.get(adapter.name)
        self._bound[adapter.name] = adapter
        return old

    def unbind(self, name: str) -> Adapter:
        """Raises: UnknownAdapterError: the name is not bound."""
        adapter = self.named(name)
        del self._bound[name]
        return adapter

    def named(self, name: str) -> Adapter:
        """Raises: UnknownAdapterError: the name is not bound."""
        adapter = self._bound.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise UnknownAdapterError(
                f"no LoRA adapter {safe_repr(name)}; registered: "
                f"{', '.join(sorted(self._bound)) or 'none'}; register it with "
                "add_new_lora(path, name); clear_lora() goes back to the base model"
            )
        return adapter

    def resolve(self, name: LoraName) -> Adapter | None:
        """The adapter that a call means: the one it names, or the default's; ``None`` is the base
        model.

        Raises:
            UnknownAdapterError: the name is not bound, or the default has been removed.
        """
        if name is None:
            return None
        if name is not UNSET:
            return self.named(name)
        default = self.default  # read once, because another thread may change it
        if default is None:
            return None
        adapter = self._bound.get(default)
        if adapter is None and self.default == default:
            raise UnknownAdapterError(
                f"the default LoRA adapter {default!r} has been removed; call clear_lora() to go "
                "back to the base model, or set_lora(name) to choose another"
            )
        # If there is no adapter, the default has changed meanwhile, so it is looked up again.
        return self.resolve(name) if adapter is None else adapter

    def bound(self) -> Mapping[str, Adapter]:
        """The adapters by their names, as they are now."""
        return MappingProxyType(dict(self._bound))

    def outdated(self, adapter: Adapter | None) -> UnknownAdapterError | None:
        """The error for an adapter that was removed or rebound since it was resolved. ``None`` if
        its name is still bound to it, or for the base model."""
        if adapter is None or self._bound.get(adapter.name) is adapter:
            return None
        return UnknownAdapterError(
            f"LoRA adapter {adapter.name!r} was removed or bound again while the request was on "
            "its way; ask again"
        )
