"""Proofs that are remembered, so that a model is verified by default only once."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

from genlm.kit.verify.subject import Subject


class KnownProofs:
    """The models that have been verified by default, in the user's cache folder.

    A model counts as another one if a file in its folder is added, removed or changed (by its time
    or size), and with other options or versions.
    """

    def __init__(self) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = home / "genlm" / "verified"

    def __contains__(self, subject: Subject) -> bool:
        key = _key(subject)
        return key is not None and (self._folder / key).exists()

    def add(self, subject: Subject) -> None:
        """Remember that a model has been verified, if the folder can be written."""
        if (key := _key(subject)) is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / key).touch()
        except OSError:
            return


def _key(subject: Subject) -> str | None:
    """The name of its proof; ``None`` if it cannot be told from others."""
    folder = subject.folder()
    if folder is None:
        return None
    try:
        files = [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in sorted(folder.iterdir())
            if file.is_file()
        ]
        identity = [
            str(folder.resolve()),
            files,
            subject.backend,
            dict(subject.options),
            dict(subject.changes),
            sorted(subject.versions().items()),
            platform.node(),
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    except (OSError, TypeError, ValueError):  # for example, because the options contain a function
        return None
