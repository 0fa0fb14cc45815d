"""Which SGLang this plugin was written and tested for. Imports nothing of SGLang."""

from __future__ import annotations

from importlib import metadata

#: SGLang promises nothing of its scheduler between releases: both ends are tested, and what lies
#: beyond is refused.
SUPPORTED = ">=0.5.17,<0.5.24"


def why_unavailable() -> str | None:
    """Why the installed SGLang cannot be used, with the remedy; ``None`` when it can."""
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "sglang is not installed; pip install genlm-sgl"
    from packaging.specifiers import SpecifierSet  # wherever there is an engine, this is too

    if SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        return None
    return (
        f"sglang {installed} is installed, but this genlm-sgl drives the scheduler of sglang "
        f"{SUPPORTED} in process, "
        "and its internals differ from release to release; install a version in that range or "
        "another genlm-sgl"
    )
