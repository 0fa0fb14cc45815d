"""Draws a record of ``lm.trace`` as lanes over time: when each request waited and was computed, and
the engine's work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import define

from tools.pictures.svg import MARGIN, Picture

LABELS = 116
WIDTH = 760


@define
class Span:
    """A time in which something happened, in milliseconds of the trace."""

    begin: float
    end: float
    requests: int = 0  # how many requests a batch has
    tokens: int = 0  # how many tokens a request's context has


@define
class Recorded:
    """The contents of a trace: the spans of requests in order, and of the engine's batches."""

    requests: list[Span]
    batches: list[Span]

    @classmethod
    def read(cls, trace: Path) -> Recorded:
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
        asked = {e["id"]: e for e in events if (e["ph"], e["name"]) == ("b", "request")}
        done = {e["id"]: e["ts"] for e in events if (e["ph"], e["name"]) == ("e", "request")}
        began = min(e["ts"] for e in asked.values())
        batches = [
            Span(at := (e["ts"] - began) / 1e3, at + e["dur"] / 1e3, e["args"]["requests"])
            for e in events
            if e["name"] == "engine"
        ]
        requests = [
            Span((e["ts"] - began) / 1e3, (done[i] - began) / 1e3, tokens=e["args"]["tokens"])
            for i, e in asked.items()
        ]
        requests.sort(key=lambda span: span.begin)
        batches.sort(key=lambda span: span.begin)
        return cls(requests, batches)

    def batch_of(self, request: Span) -> Span:
        """The batch that answered a request: the last that the engine ended before the answer."""
        return max(
            (batch for batch in self.batches if batch.end <= request.end),
            key=lambda batch: batch.end,
        )


def stacked(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few lanes as they need, as Perfetto shows them."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end <= span.begin), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def lanes(
    title: str, recorded: Recorded, callers: Sequence[tuple[str, Sequence[Span]]], height: float
) -> Picture:
    """A lane for each caller, with its requests; below them the engine's, with its batches.

    Args:
        title: What the picture shows.
        recorded: The whole trace.
        callers: The name of each lane, and its requests.
        height: The height of a lane, in pixels.
    """
    end = max(span.end for span in (*recorded.requests, *recorded.batches))
    below = MARGIN + 34 + height * len(callers)
    picture = Picture(title, WIDTH, below + 86)
    scale = (WIDTH - LABELS - 2 * MARGIN) / end

    def x(time: float) -> float:
        return LABELS + MARGIN + time * scale

    legend(picture)
    for lane, (name, spans) in enumerate(callers):
        y = MARGIN + 26 + lane * height
        picture.text(LABELS + MARGIN - 8, y + height * 0.66, name, anchor="end")
        for span in spans:
            started = recorded.batch_of(span).begin
            bar = max(height - 4, 2)
            picture.box(x(span.begin), y + 2, (started - span.begin) * scale, bar, "waiting")
            picture.box(x(started), y + 2, (span.end - started) * scale, bar, "engine")
    y = below + 4
    picture.text(LABELS + MARGIN - 8, y + 16, "engine thread", anchor="end", bold=True)
    for batch in recorded.batches:
        wide = (batch.end - batch.begin) * scale
        picture.box(x(batch.begin), y, wide, 24, "shared", f"a batch of {batch.requests} requests")
        words = f"batch of {batch.requests}"
        if wide > 8 * len(words):
            picture.text(x(batch.begin) + wide / 2, y + 16, words, anchor="middle", fill="#ffffff")
        elif wide > 18:
            picture.text(
                x(batch.begin) + wide / 2, y + 16, str(batch.requests), anchor="middle",
                fill="#ffffff", size=11,
            )  # fmt: skip
    axis(picture, x, end, y + 34)
    return picture


def legend(picture: Picture) -> None:
    x = float(LABELS + MARGIN)
    for fill, words in (("waiting", "a request waits"), ("engine", "it is computed")):
        picture.box(x, MARGIN, 12, 12, fill)
        picture.text(x + 18, MARGIN + 10.5, words)
        x += 130


def axis(picture: Picture, x: Callable[[float], float], end: float, y: float) -> None:
    """Milliseconds below a picture."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if end / step < 9)
    picture.line((x(0), y), (x(end), y))
    for at in range(0, int(end) + 1, step):
        picture.line((x(at), y), (x(at), y + 4))
        picture.text(x(at), y + 17, f"{at} ms" if at else "0", anchor="middle", size=11)
