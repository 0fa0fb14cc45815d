"""One hierarchy of errors. Every message names the value, the limit and the remedy."""

from __future__ import annotations


class GenlmError(Exception):
    """The root of all errors raised by the core."""


# --- what the caller gave -------------------------------------------------------------------------


class InvalidInputError(GenlmError, ValueError):
    """Bad input. It was rejected before the engine saw it."""


class InvalidQueryError(InvalidInputError):
    """An invalid context: empty, not ints, out of range or too long."""


class InvalidOptionError(InvalidInputError):
    """An option with a value or a name that is not accepted."""


class ModelNotFoundError(InvalidOptionError, OSError):
    """A model that does not exist: no such folder, an empty folder, or no such name on the hub."""


class UnknownAdapterError(InvalidInputError):
    """No LoRA adapter of this name is registered, or it has been removed."""


class InvalidAdapterError(InvalidInputError):
    """A LoRA adapter folder that is not sound, is made for another model, or is of a kind that the
    engine does not apply."""


class VocabularyError(InvalidInputError):
    """A tokenizer whose tokens have no byte strings of their own."""


class VocabularyItemError(VocabularyError, TypeError):
    """An item of a vocabulary that cannot stand in a trie: not iterable, or not hashable."""


class UnsupportedError(GenlmError, NotImplementedError):
    """The backend does not implement the hook that the call needs."""


# --- finding and loading a backend ----------------------------------------------------------------


class BackendNotFoundError(GenlmError, ValueError):
    """No installed distribution provides a backend of that name."""


class BackendImportError(GenlmError, ImportError):
    """The backend is installed, but importing it failed. The cause is chained."""


class BackendUnavailableError(GenlmError, RuntimeError):
    """The backend is installed and sound, but cannot run on this machine."""


class PluginError(GenlmError):
    """A plugin breaks the contract: a misspelt hook, a missing attribute, a result of the wrong
    shape."""


# --- while the model lives ------------------------------------------------------------------------


class EngineError(GenlmError, RuntimeError):
    """The engine failed on this request. The engine's own error is chained; the model still
    works."""


class EngineDeadError(GenlmError, RuntimeError):
    """The engine can no longer answer. An engine raises it from a hook; from then on the core
    rejects every request."""


class ModelClosedError(GenlmError, RuntimeError):
    """The model was closed before the request was answered."""


class QueriesResetError(GenlmError, RuntimeError):
    """``reset_async_queries`` dropped the request before the engine took it."""


class ReentrancyError(GenlmError, RuntimeError):
    """A hook or wrapper made a blocking request of its own model, which could never be answered."""
