"""The backend's own class."""

from __future__ import annotations

from typing import Any, Self

from genlm.core import AsyncLM


class AsyncNumpyLM(AsyncLM):
    """A transformer in NumPy; make one with :meth:`from_name`."""

    @classmethod
    def from_name(cls, path: str, **options: Any) -> Self:
        """Load a model from an ``.npz`` file; the options are those of every backend."""
        return cls.from_backend("numpy", path, options)
