"""Logging that shows only warnings, until the program configures structlog.

Warnings are always shown. To see the rest, for instance which backend was chosen::

    import structlog

    structlog.configure()
"""

from __future__ import annotations

import logging
import sys
import traceback
from functools import partialmethod
from typing import Any

import structlog

#: Levels that are shown only once structlog is configured.
QUIET = ("debug", "info")


class Logger:
    """structlog's logger, silent below warnings until the application has configured structlog.

    Unconfigured, structlog prints every event to the standard output, where a library's progress
    has no place. Which processors, levels and outputs there are is up to the application. An
    error in one of those is printed, as the standard library's :mod:`logging` does it, and is not
    raised: it must not become the error of a request.
    """

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    def _say(self, level: str, event: str, **fields: Any) -> None:
        if level in QUIET and not structlog.is_configured():
            return
        try:
            getattr(self._log, level)(event, **fields)
        except Exception:
            if logging.raiseExceptions and sys.stderr is not None:
                print(f"--- the event {event!r} could not be logged ---", file=sys.stderr)
                traceback.print_exc()

    debug, info = partialmethod(_say, "debug"), partialmethod(_say, "info")
    warning, error = partialmethod(_say, "warning"), partialmethod(_say, "error")
    exception = partialmethod(_say, "exception")
    """An error, with the exception that is being handled."""


def get_logger() -> Logger:
    """The logger of a module of the core or of a plugin."""
    return Logger()
