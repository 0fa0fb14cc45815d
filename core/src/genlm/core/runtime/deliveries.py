"""Delivers results to the futures of callers, each in its own event loop."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
from collections.abc import Iterable, Sequence
from typing import Any

from genlm.core.runtime.calls import Call, Future
from genlm.core.runtime.timeline import Timeline


def deliver(found: Iterable[tuple[Call[Any], Any]], timeline: Timeline, began: float) -> None:
    """Resolve the future of each call. Each event loop is woken once.

    Args:
        found: Calls, each with its result, or with the exception in its place.
        timeline: Receives the time since ``began``.
        began: When the step was over, by the timeline's clock.
    """
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Future[Any], Any]]]
    by_loop = collections.defaultdict(list)
    for call, result in found:
        by_loop[call.loop].append((call.future, result))
    for loop, results in by_loop.items():
        if loop is None:
            _resolve(results, timeline, began)
        else:
            try:  # noqa: SIM105, since suppress() costs three calls for each batch
                loop.call_soon_threadsafe(_resolve, results, timeline, began)
            except RuntimeError:  # the loop has been closed
                pass


def _resolve(results: Sequence[tuple[Future[Any], Any]], timeline: Timeline, began: float) -> None:
    for future, result in results:
        try:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            continue  # its caller has cancelled
        except TypeError as refused:
            # An asyncio future does not accept a StopIteration, and the futures after this one must
            # not wait for ever.
            refused.__cause__ = result
            future.set_exception(refused)
    timeline.add("delivery", began, answers=len(results))


def another(error: Exception) -> Exception:
    """A copy of an error for a further caller. If several tasks raised the same object, each would
    show the frames of the others."""
    try:
        own = copy.copy(error)
        same = str(own) == str(error)
    except Exception:  # some classes of errors cannot be made from their ``args``, or have no text
        return error
    own.__cause__ = error.__cause__
    return own if same else error
