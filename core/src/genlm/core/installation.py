"""How to install what is missing: from PyPI, or from the clone that the core was installed from."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

CORE = "genlm-core"


def pip_install(name: str, extra: str = "") -> str:
    """The command that installs a distribution of this project.

    Args:
        name: The distribution: ``"genlm-hf"``.
        extra: The extra that is needed.
    """
    *needed, what = [str(folder) for folder in _in_clone(name)] or [name]
    words = [*needed, f"{what}[{extra}]" if extra else what]
    return f"pip install {' '.join(map(shlex.quote, words))}"


def _in_clone(name: str) -> list[Path]:
    """The folder of a distribution in the clone that the core was installed from, if there is one.
    For a plugin, the kit's folder comes first, since the plugin may need it.

    Source: PEP 610: pip records in ``direct_url.json`` the folder that it installed from.
    """
    try:
        recorded = distribution(CORE).read_text("direct_url.json")
    except PackageNotFoundError:
        return []
    url = urlsplit(json.loads(recorded or "{}").get("url", ""))
    if url.scheme != "file":
        return []
    core = Path(url2pathname(url.path))
    clone = core.parent
    candidates = (
        [[core]]
        if name == CORE
        else [[clone / name.removeprefix("genlm-")], [clone / "kit", clone / "plugins" / name]]
    )
    for folders in candidates:
        if all((folder / "pyproject.toml").is_file() for folder in folders):
            return folders
    return []
