"""The way of a request through the core, as ``docs/architecture.md`` tells it."""

from __future__ import annotations

from tools.pictures.svg import MARGIN, Picture

#: For each step, the place of its code, and what it does.
STEPS = (
    ("1  check", "rows.py", "bad input raises here"),
    ("2  look up", "cache.py", "a hit returns a copy"),
    ("3  submit", "runtime/lanes.py", "equal requests share"),
    ("4  batch", "runtime/batcher.py", "all that wait leave together"),
    ("5  evaluate", "runtime/executor.py", "calls the engine's hooks"),
    ("6  leave the engine", "runtime/results.py", "checks, bytes, wrappers"),
    ("7  reduce", "together.py", "functions given as then="),
    ("8  deliver", "runtime/deliveries.py", "wakes each event loop once"),
)
WIDTH = 760
BOX = 164
HIGH = 62


def picture() -> Picture:
    shown = Picture(
        "A request is checked, looked up in the cache, submitted and batched. On the engine thread "
        "the batch is evaluated, its rows leave the engine, functions of rows run, and the answers "
        "are delivered to the callers.",
        WIDTH,
        292,
    )
    left, gap = MARGIN + 20.0, (WIDTH - 2 * MARGIN - 40 - 4 * BOX) / 3
    top, low = 58.0, 190.0
    shown.box(MARGIN, top - 32, WIDTH - 2 * MARGIN, HIGH + 48, "light", rx=6)
    shown.text(MARGIN + 12, top - 14, "the caller's thread and event loop", size=11, fill="line")
    shown.box(MARGIN, low - 32, WIDTH - 2 * MARGIN, HIGH + 48, "#e8f2ee", rx=6)
    shown.text(MARGIN + 12, low - 14, "the model's engine thread", size=11, fill="line")
    for number, (name, file, does) in enumerate(STEPS):
        forward = number < 4
        column = number if forward else 7 - number
        x, y = left + column * (BOX + gap), top if forward else low
        shown.box(x, y, BOX, HIGH, "#ffffff", rx=5, stroke="#57606a")
        shown.text(x + 10, y + 19, name, bold=True)
        shown.text(x + 10, y + 36, file, size=11, mono=True, fill="shared")
        shown.text(x + 10, y + 52, does, size=10.5, fill="line")
        middle = y + HIGH / 2
        if number in (0, 1, 2):
            shown.line((x + BOX, middle), (x + BOX + gap, middle), arrow=True)
        elif number in (4, 5, 6):
            shown.line((x, middle), (x - gap, middle), arrow=True)
    last = left + 3 * (BOX + gap) + BOX / 2
    shown.line((last, top + HIGH), (last, low), arrow=True)
    shown.line((left + BOX / 2, low), (left + BOX / 2, top + HIGH), arrow=True, dashed=True)
    shown.text(left + BOX / 2 + 8, top + HIGH + 28, "each caller gets its own row", size=11)
    return shown
