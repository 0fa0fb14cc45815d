"""Which SGLang this plugin was written and tested for. Imports nothing of SGLang."""

from __future__ import annotations

from importlib import metadata

#: SGLang's scheduler may change with any release: the first and the last of these are tested, and
#: others are refused.
SUPPORTED = ">=0.5.17,<0.5.24"


def why_unavailable() -> str | None:
    """Why the installed SGLang cannot be used, with the remedy; ``None`` if it can."""
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "sglang is not installed; pip install genlm-sgl"
    from packaging.specifiers import SpecifierSet  # installed with every engine

    if SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        return None
    return (
        f"sglang {installed} is installed, but this genlm-sgl drives the scheduler of sglang "
        f"{SUPPORTED} in process, "
        "and its internals differ from release to release; install a version in that range or "
        "another genlm-sgl"
    )
