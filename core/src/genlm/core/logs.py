"""Logging that a program does not notice until it asks for it.

Warnings are always shown. To see the rest, for instance which backend was chosen::

    import structlog

    structlog.configure()
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import structlog


class Logger:
    """structlog's logger, silent below warnings until the application has configured structlog.

    Unconfigured, structlog prints every event to the standard output, where a library's progress
    has no place. Which processors, levels and outputs there are is up to the application. An
    error in one of those is printed, as the standard library's :mod:`logging` does it, and is not
    raised: it must not become the error of a request.
    """

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    def debug(self, event: str, **fields: Any) -> None:
        if structlog.is_configured():
            self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        if structlog.is_configured():
            self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._say("error", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """An error, with the exception that is being handled."""
        self._say("exception", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            getattr(self._log, level)(event, **fields)
        except Exception:
            if logging.raiseExceptions and sys.stderr is not None:
                print(f"--- the event {event!r} could not be logged ---", file=sys.stderr)
                traceback.print_exc()


def get_logger() -> Logger:
    """The logger of a module of the core or of a plugin."""
    return Logger()
