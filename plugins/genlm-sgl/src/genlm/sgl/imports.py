"""The import of SGLang, which takes long and must not be cut."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence

#: How often a wait looks whether its program has been interrupted, seconds.
POLL_SECONDS = 0.2


def import_whole(names: Sequence[str]) -> None:
    """Import modules, also where an interrupt (Ctrl-C) ends the wait for them.

    Half of SGLang cannot be imported again in the process: it has registered what may be registered
    once. So a thread of its own imports, to the end.

    Raises:
        Exception: what the import has raised.
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
