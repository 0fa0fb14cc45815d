"""The command's output: tables and bars in text, and a line of progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def bar(share: float, width: int = 40) -> str:
    """A bar of up to ``width`` columns, in eighths of a column. If the output cannot show block
    characters, it consists of ``#``."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    blocks = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    return blocks if _shows(blocks) else "#" * (eighths // 8)


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


class Progress:
    """One line of progress on the standard error, overwritten each time. Nothing is shown if that
    is not a terminal."""

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
