"""Logging that a program does not notice until it asks for it."""

from __future__ import annotations

from typing import Any

import structlog


class Logger:
    """structlog's logger, silent below warnings until the application has configured structlog.

    Unconfigured, structlog prints every event to the standard output, where a library's progress has no place. Which
    processors, levels and outputs there are stays the application's affair.
    """

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    def debug(self, event: str, **fields: Any) -> None:
        if structlog.is_configured():
            self._log.debug(event, **fields)

    def info(self, event: str, **fields: Any) -> None:
        if structlog.is_configured():
            self._log.info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log.warning(event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log.error(event, **fields)

    def exception(self, event: str, **fields: Any) -> None:
        """An error, with the exception that is being handled."""
        self._log.exception(event, **fields)


def get_logger() -> Logger:
    """The logger of a module of the core or of a plugin."""
    return Logger()
