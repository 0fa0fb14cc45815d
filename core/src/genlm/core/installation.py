"""How to install what is missing: from PyPI, or from the clone that the core was installed from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

CORE = "genlm-core"


def pip_install(name: str, extra: str = "") -> str:
    """The command that installs a distribution of this project.

    Args:
        name: The distribution: ``"genlm-hf"``.
        extra: Of its extras, the one that is needed.
    """
    found = _in_clone(name)
    what = f"{found or name}[{extra}]" if extra else str(found or name)
    plain = not (extra or " " in what)
    return f"pip install {what}" if plain else f"pip install '{what}'"


def _in_clone(name: str) -> Path | None:
    """The folder of a distribution, where the core was installed from a clone that has one.

    Source: PEP 610: pip records in ``direct_url.json`` the folder that it installed from.
    """
    try:
        recorded = distribution(CORE).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(recorded or "{}").get("url", ""))
    if url.scheme != "file":
        return None
    core = Path(url2pathname(url.path))
    top = core.parent
    folders = (
        (core,) if name == CORE else (top / name.removeprefix("genlm-"), top / "plugins" / name)
    )
    return next((folder for folder in folders if (folder / "pyproject.toml").is_file()), None)
