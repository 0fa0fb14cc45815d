"""What is being done, on a line of the standard error that is overwritten; nothing where that is
not a terminal."""

from __future__ import annotations

import sys


class Progress:
    """One line that tells how far a command has come."""

    def __init__(self) -> None:
        self._out = sys.stderr
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._out.isatty():
            self.clear()
            self._shown = text
            print(text, end="", file=self._out, flush=True)

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        if self._shown:
            blank = " " * len(self._shown)
            print(f"\r{blank}\r", end="", file=self._out, flush=True)
            self._shown = ""
