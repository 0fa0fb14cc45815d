"""The output cache. A package, because 0.3 has a module of this name: where 0.3 lies in the same
folder, Python takes this package before that module, and it says what is wrong."""

from importlib.metadata import distributions
from pathlib import Path

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
from genlm.core.cache import OutputCache  # noqa: E402

DynamicTokenTrie = TokenTrie

__all__ = ["DynamicTokenTrie", "OutputCache", "TokenTrie"]
