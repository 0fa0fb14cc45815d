"""The import of SGLang, which takes long and must not be interrupted."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence

#: Seconds between two checks whether the waiting program has been interrupted.
POLL_SECONDS = 0.2


def import_whole(names: Sequence[str]) -> None:
    """Import modules completely, even if an interrupt (Ctrl-C) ends the wait for them.

    A half-imported SGLang cannot be imported again in the process, because some of its
    registrations may happen only once. So a separate thread runs the import to its end.

    Raises:
        Exception: the import's own error.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            for name in names:
                importlib.import_module(name)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="genlm-import", daemon=True)
    thread.start()
    while thread.is_alive():  # an interrupt arrives between two waits
        thread.join(POLL_SECONDS)
    if raised:
        raise raised.pop()
