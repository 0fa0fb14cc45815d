"""Clauses on the beginning and the end of a model."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import subprocess
import sys
from typing import Any

from attrs import frozen

from genlm.core.conformance.compare import check
from genlm.core.conformance.subject import Outcome, Subject, submitted
from genlm.core.errors import ModelClosedError
from genlm.core.plugins import find_backend

#: What importing a plugin module may not bring along, besides the engine's own distribution.
HEAVY = frozenset({"jax", "mlx", "tensorflow", "torch", "transformers"})

#: Prints the top-level modules that looking at a backend imports, beyond those of the core.
LOOK = """
import json, sys
from genlm.core.plugins import find_backend
before = set(sys.modules)
find_backend(sys.argv[1]).info()
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


@frozen
class Farewell:
    """What became of everybody when the model was closed with questions pending."""

    waiting: list[Outcome]  # callers whose question the engine had not taken
    blocked: Outcome  # the same, in a thread
    taken: Outcome  # the caller whose question the engine had in hand
    closed: Outcome  # of close()
    closed_again: Outcome
    afterwards: dict[str, Outcome]  # of each method called on the closed model


class LifecycleClauses:
    """Import, close."""

    backend: str

    def test_close_fails_what_is_pending(self, live: Subject) -> None:
        """``close`` answers every waiting caller with ``ModelClosedError``; a question in the
        engine's hands may end."""
        farewell = self._farewell(live)
        for outcome in [*farewell.waiting, farewell.blocked]:
            check(
                isinstance(outcome, ModelClosedError),
                f"pending when the model was closed, it ended in {outcome!r:.200}",
            )
        taken = farewell.taken
        if not isinstance(taken, ModelClosedError):
            context = live.contexts.stem[:2]
            live.expect(taken, context, how="in the engine's hands when the model was closed")

    def test_close_again_and_use_after_close(self, live: Subject) -> None:
        """Closing twice is nothing; everything asked of a closed model is a ``ModelClosedError``,
        at once."""
        farewell = self._farewell(live)
        for which, outcome in (
            ("close()", farewell.closed),
            ("a second close()", farewell.closed_again),
        ):
            check(outcome is None, f"{which} ended in {outcome!r:.200}")
        for method, outcome in farewell.afterwards.items():
            check(
                isinstance(outcome, ModelClosedError),
                f"{method} on a closed model ended in {outcome!r:.200}",
            )

    def test_import_of_plugin_imports_no_engine(self, live: Subject) -> None:
        """Importing the plugin module and asking what the backend is imports no engine and no
        tensor library."""
        backend = find_backend(self.backend)
        looked = subprocess.run(
            [sys.executable, "-c", LOOK, self.backend], capture_output=True, text=True, check=False
        )
        check(looked.returncode == 0, f"looking at the backend failed: {looked.stderr[-500:]}")
        imported = set(json.loads(looked.stdout.splitlines()[-1]))
        engine = backend.info().engine
        own = backend.entry_point.dist.name if backend.entry_point.dist else None
        modules = importlib.metadata.packages_distributions().items()
        forbidden = {
            module for module, names in modules if engine in names and engine != own
        } | HEAVY
        found = sorted(imported & forbidden)
        check(
            not found,
            f"importing {backend.module.__name__} and asking genlm_backend_info imports "
            f"{', '.join(found)}",
        )

    def _farewell(self, live: Subject) -> Farewell:
        """Close the model, once for both clauses, and see."""
        known = live.notes.get("farewell")
        if isinstance(known, Farewell):
            return known
        live.cold(live.contexts.stem[:2])
        live.reset()
        farewell = live.run(_say_goodbye(live))
        live.forget()
        live.notes["farewell"] = farewell
        return farewell


async def _say_goodbye(live: Subject) -> Farewell:
    lm, stem = live.lm, live.contexts.stem
    live.gate.hold()
    taken = asyncio.ensure_future(lm.next_token_logprobs(stem[:2]))
    await submitted()
    await asyncio.wrap_future(live.thread(live.gate.wait_inside))
    waiting = [asyncio.ensure_future(lm.next_token_logprobs(stem[:n])) for n in (3, 4, 4)]
    await submitted()
    blocked = live.thread(lambda: lm.next_token_logprobs_sync(stem[:5]))
    closing = live.thread(lm.close)
    # These must end while the engine is still busy with the first question.
    ended = [await _outcome(live, future) for future in waiting]
    ended_in_thread = await _outcome(live, asyncio.wrap_future(blocked))
    live.gate.release()
    return Farewell(
        waiting=ended,
        blocked=ended_in_thread,
        taken=await _outcome(live, taken),
        closed=await _outcome(live, asyncio.wrap_future(closing)),
        closed_again=await _outcome(live, asyncio.wrap_future(live.thread(lm.close))),
        afterwards={
            "next_token_logprobs": await _outcome(live, lm.next_token_logprobs(stem[:6])),
            "batch_next_token_logprobs": await _outcome(
                live, lm.batch_next_token_logprobs([stem[:6]])
            ),
            "sample": await _outcome(live, lm.sample(stem[:6], 1, [])),
            "next_token_logprobs_sync": await _call(
                live, lambda: lm.next_token_logprobs_sync(stem[:6])
            ),
            "next_token_logprobs_uncached": await _call(
                live, lambda: lm.next_token_logprobs_uncached(stem[:6])
            ),
            "cache_kv": await _call(live, lambda: lm.cache_kv(stem[:6])),
            "clear_kv_cache": await _call(live, lm.clear_kv_cache),
        },
    )


async def _call(live: Subject, call: Any) -> Outcome:
    return await _outcome(live, asyncio.wrap_future(live.thread(call)))


async def _outcome(live: Subject, awaitable: Any) -> Outcome:
    try:
        return await live.soon(awaitable)
    except asyncio.CancelledError as error:
        return error
    except Exception as error:
        return error
