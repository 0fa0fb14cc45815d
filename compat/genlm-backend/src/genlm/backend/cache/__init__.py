"""The output cache. A package, because 0.3 has a module of this name: where 0.3 lies in the same
folder, Python takes this package before that module, and it says what is wrong."""

from __future__ import annotations

from collections.abc import Hashable
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VERSION = "0.4.0"

_folder = Path(__file__).parents[3]
_others = {one.version for one in distributions(name="genlm-backend", path=[str(_folder)])}
_others.discard(VERSION)
if _others:
    raise ImportError(
        f"genlm-backend {', '.join(sorted(_others))} and {VERSION} are both installed in "
        f"{_folder}. Run `pip uninstall genlm-backend` until it finds nothing more, then install "
        "the one that you want"
    )

from genlm.backend._removed import TokenTrie  # noqa: E402
from genlm.core import cache  # noqa: E402

DynamicTokenTrie = TokenTrie


class OutputCache(cache.OutputCache):
    """The core's, as a mapping: what goes in and what comes out are copies."""

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """A copy of the row of ``key``, now the most recently used.

        Raises:
            KeyError: There is no row of ``key``.
        """
        row = self.get(key)
        if row is None:
            raise KeyError(key)
        return row

    def __setitem__(self, key: Hashable, row: torch.Tensor) -> None:
        """Keep a copy of ``row``, unless it is larger than the whole cache. Writing a key again
        evicts no other."""
        self.put([(key, row)], self.generation)


__all__ = ["DynamicTokenTrie", "OutputCache", "TokenTrie"]
