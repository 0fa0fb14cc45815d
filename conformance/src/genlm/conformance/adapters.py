"""Clauses on LoRA adapters: they never mix, and are what their folders hold."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from genlm.conformance.advice import advise
from genlm.conformance.compare import Violation, answered, brief, check, difference, with_adapter
from genlm.conformance.driver import Outcome, started, submitted
from genlm.conformance.properties import for_all
from genlm.conformance.subject import Subject
from genlm.core.errors import UnknownAdapterError
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: The tokens of a sample that is under way while adapters change.
DRAWN_TOKENS = 8


class AdapterClauses:
    """Each request is answered with its adapter and no other."""

    @advise("the adapter is not applied, or both names are given one path")
    def test_adapter_changes_the_rows(self, live: Subject) -> None:
        """Each adapter changes the rows. (Otherwise an engine that ignores adapters would pass the
        other clauses.)"""
        names = [None, *live.needs_adapters()]
        context = live.contexts.stem[:8]
        for i, name in enumerate(names):
            for other in names[:i]:
                rows = live.cold(context, name), live.cold(context, other)
                check(
                    difference(*rows, 5 * live.expect.atol) is not None,
                    f"{_named(name)} and {_named(other)} give the same row of {list(context)}",
                )

    @advise(
        "a batch is computed with the adapter of its first request, or equal tokens once for "
        "all adapters",
        "adapters_in_turn",
    )
    def test_adapters_in_one_batch(self, live: Subject) -> None:
        """Requests under different adapters and under none, asked for together, also for the same
        context, each get the row of their own adapter."""
        names = [None, *live.needs_adapters()]

        queries = st.tuples(live.contexts.any(), st.sampled_from(names))

        @for_all(live, least=6, asked=st.lists(queries, min_size=2, max_size=5))
        def adapters_in_one_batch(asked: list[tuple[TokenIds, str | None]]) -> None:
            asked = [*asked, *((asked[0][0], name) for name in names)]
            how = f"in a batch of requests under {', '.join(_named(name) for _, name in asked)}"
            live.check_rows(*zip(*asked, strict=True), how=how)

    @advise("kept state is found without its adapter", "adapters_in_one_batch")
    def test_adapters_in_turn(self, live: Subject) -> None:
        """The same contexts are asked for under one adapter after the other: no state kept under
        one adapter is used for another."""
        names = [None, *live.needs_adapters()]

        @for_all(
            live,
            examples=14,
            least=8,
            context=live.contexts.any(),
            tail=live.contexts.tails(),
            turns=st.permutations(names),
            pinned=st.booleans(),
        )
        def adapters_in_turn(
            context: TokenIds, tail: TokenIds, turns: list[str | None], pinned: bool
        ) -> None:
            for i, name in enumerate(turns):
                before = ", ".join(map(_named, turns[:i])) or "no other"
                before = f"asked for after requests under {before}"
                if pinned:
                    live.lm.cache_kv(context, lora_name=name)
                for end in range(len(tail) + 1):
                    live.check_row(context + tail[:end], name, how=before)

    @advise("weights or state are kept by name; keep them by adapter.version", "removed_adapter")
    def test_rebound_adapter(self, live: Subject) -> None:
        """After a name is bound to another adapter, rows under that name are those of the new
        adapter, whatever was cached before."""
        first, second, *_ = live.needs_adapters(2)

        @for_all(
            live,
            examples=10,
            context=live.contexts.any(),
            pinned=st.booleans(),
            removed=st.booleans(),
        )
        def rebound_adapter(context: TokenIds, pinned: bool, removed: bool) -> None:
            old, new = live.cold(context, first), live.cold(context, second)
            done: list[str] = []

            def expect(row: torch.Tensor) -> None:
                how = f"after {', '.join(done)}" if done else "asked for the first time"
                what = f"the context {brief(context)}{with_adapter(first)}, {how}"
                live.expect.same(live.ask(context, first), row, what)
                done.append("the row was asked for")

            if pinned:
                live.lm.cache_kv(context[:-1] or context, lora_name=first)
                done.append("the context was pinned")
            expect(old)
            if removed:
                live.model.remove(first)
                done.append(f"{first!r} was removed")
            live.model.bind(first, second)
            done.append(f"{first!r} was bound to the files of {second!r}")
            expect(new)
            live.lm.clear_cache()
            done.append("the row cache was cleared")
            expect(new)
            live.model.bind(first, first)
            done.append(f"{first!r} was bound to its own files again")
            expect(old)

    @advise("removing an adapter, or clearing state, changes other adapters", "rebound_adapter")
    def test_removed_adapter(self, live: Subject) -> None:
        """A removed adapter is unknown, rows of the base model and of the other adapters are
        unchanged, and the adapter can be added again."""
        name, *_ = live.needs_adapters()

        def removed_adapter(context: TokenIds) -> None:
            expected = live.cold(context, name)
            live.ask(context, name)
            live.model.remove(name)
            (outcome,) = live.gather([context], [name])
            check(
                isinstance(outcome, UnknownAdapterError),
                f"a request with the removed adapter {name!r} gets {outcome!r:.200} instead of an "
                "UnknownAdapterError",
            )
            for other in [None, *(other for other in live.adapters if other != name)]:
                live.check_row(context, other, how=f"after {name!r} was removed")
            live.model.bind(name, name)
            what = f"{list(context)} with {name!r} added again"
            live.expect.same(live.ask(context, name), expected, what)

        live.model.reset()
        # One context has several blocks, also where Hypothesis chooses short ones.
        removed_adapter(live.contexts.long(min(40, live.contexts.limit - 1), 1))
        for_all(live, examples=4, context=live.contexts.any())(removed_adapter)

    @advise(
        "an adapter is looked up by name when a request runs, or a dropped request keeps it in use",
        "rebound_adapter",
        capability="adapters in flight",
    )
    def test_adapters_changed_in_flight(self, live: Subject) -> None:
        """Names are bound again, adapters are removed and added while rows, a score and a cancelled
        draw under them are in flight: each request uses the adapter that its name had when it was
        asked."""
        first, second, *_ = live.needs_adapters(2)
        changes: dict[str, Callable[[], None]] = {
            f"{first!r} was rebound": lambda: live.model.bind(first, second),
            f"{first!r} was removed": lambda: live.model.remove(first),
            "another adapter was added": lambda: live.model.bind("another", first),
        }
        context, tail = live.contexts.stem[:4], live.contexts.tokens[:2]
        names = [None, first, second]

        async def changed_in_flight(change: Callable[[], None]) -> list[Outcome]:
            with live.gate.held():
                *asked, draw = await started(
                    *(live.lm.next_token_logprobs(context, lora_name=name) for name in names),
                    live.lm.sequence_logprobs(context, tail, first),
                    live.lm.sample(context, DRAWN_TOKENS, [], lora_name=first),
                )
                await live.gate.until_held()
                draw.cancel()
                await submitted()
                changed = live.thread(change)
            outcomes = await live.soon(asyncio.gather(*asked, return_exceptions=True))
            await live.soon(asyncio.wrap_future(changed))
            return outcomes

        for what, change in changes.items():
            live.model.reset()
            rows = [live.cold(context, name) for name in names]
            expected = float(live.cold((*context, tail[0]), first)[tail[1]])
            *answers, score = live.run(changed_in_flight(change))
            for name, answer, row in zip(names, answers, rows, strict=True):
                live.expect.same(answer, row, f"{brief(context)} with {name!r}, while {what}")
            # The core rejects a score that it makes from several rows if its adapter goes.
            if not isinstance(score, UnknownAdapterError):
                asked = f"{brief(tail)} after {brief(context)} with {first!r}, while {what}"
                live.expect.score(float(answered(score, asked)[1]), expected, f"{asked}: token 1")
            for name in [None, *live.model.bound]:
                live.check_row(context, name, how=f"after {what}")

    @advise("genlm_read_lora leaves what it read on the engine; return it")
    def test_adapters_added_at_once(self, live: Subject) -> None:
        """Two threads add an adapter each, and both have read the files before either is loaded:
        each name has its own."""
        live.needs("genlm_read_lora")
        names = live.needs_adapters(2)[:2]
        context = live.contexts.stem[:4]
        rows = [live.cold(context, name) for name in names]
        live.gate.readers = threading.Barrier(2)
        calls = [
            live.thread(functools.partial(live.model.bind, f"new-{name}", name)) for name in names
        ]
        for call in calls:
            answered(live.outcome(call), "adding an adapter while another is added")
        live.gate.readers = None
        for name, row in zip(names, rows, strict=True):
            how = f"{brief(context)} with {name!r}, added while another was"
            live.expect.same(live.ask(context, f"new-{name}"), row, how)
            live.model.remove(f"new-{name}")

    @advise("the old adapter is dropped before the new files are read", "rebound_adapter")
    def test_adapter_that_fails_to_load(self, live: Subject) -> None:
        """If loading an adapter fails, the name keeps its old binding and every row is as before,
        also after ``clear_kv_cache``."""
        name, *_ = live.needs_adapters()
        context = live.contexts.stem[:4]
        live.cold(context, name), live.cold(context)
        try:
            live.lm.add_new_lora("there-is-no-such-adapter", name)
        except Exception as error:
            check(bool(str(error)), f"{type(error).__name__} without a message")
        else:
            # The engine takes any path, as the mock does, so nothing failed.
            live.model.bind(name, name)
        for then in ("", ", and after clear_kv_cache()"):
            for chosen in (None, name):
                how = f"after loading {name!r} from a path that does not exist{then}"
                live.check_row(context, chosen, how=how)
            live.model.clear()

    @advise(
        "if there are more adapters than slots, one is evicted silently", "adapters_in_one_batch"
    )
    def test_many_adapters(self, live: Subject) -> None:
        """More adapters than an engine may have slots for keep their own rows, in one batch and in
        turn."""
        first, second, *_ = live.needs_adapters(2)
        context = live.contexts.stem[:4]
        rows = [live.cold(context, first), live.cold(context, second)]
        names = []
        for i in range(4):
            try:
                live.model.bind(f"further-{i}", (first, second)[i % 2])
            except Exception:
                break  # An engine may have a limit, and say so.
            names.append(f"further-{i}")
        asked = [first, second, *names, None]
        expected = [*rows, *(rows[i % 2] for i in range(len(names))), live.cold(context)]
        for together in (True, False, True):
            outcomes = (
                live.gather([context] * len(asked), asked)
                if together
                else [live.ask(context, name) for name in asked]
            )
            for name, outcome, row in zip(asked, outcomes, expected, strict=True):
                bound = f"when {len(asked) - 1} adapters are bound"
                what = f"{brief(context)}{with_adapter(name)}, {bound}"
                live.expect.same(outcome, row, what)
            live.lm.clear_cache()


class AdapterFileClauses:
    """Folders that change, and folders that are wrong."""

    @advise("weights are kept by path", "rebound_adapter")
    def test_same_path_with_other_weights(self, live: Subject) -> None:
        """An adapter that is removed and added again from the same folder has the weights that the
        folder holds now."""
        first, second, *_ = live.needs_adapters(2)
        folders = [live.adapters[first], live.adapters[second]]
        if not all(map(os.path.isdir, folders)):
            pytest.skip("the adapters are not folders")
        context = live.contexts.long(min(20, live.contexts.limit))
        rows = [live.cold(context, first), live.cold(context, second)]
        with tempfile.TemporaryDirectory() as scratch:
            same = os.path.join(scratch, "adapter")
            for i in (0, 1, 0):
                shutil.rmtree(same, ignore_errors=True)
                shutil.copytree(folders[i], same)
                live.model.bind("moving", same)
                what = f"an adapter from a copy of {folders[i]}"
                live.expect.same(live.ask(context, "moving"), rows[i], what)
                live.model.remove("moving")

    @advise("shapes are not compared; genlm.kit.adapter_files does so")
    def test_adapter_of_another_model(self, live: Subject) -> None:
        """An adapter whose matrices do not fit the model is rejected, and rows are as before."""
        name, *_ = live.needs_adapters()
        context = live.contexts.stem[:4]
        live.cold(context), live.cold(context, name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = os.path.join(scratch, "wider")
            if not _write_wider(live.adapters[name], folder):
                pytest.skip("the adapter is not a folder with adapter_model.safetensors")
            try:
                live.model.bind("wider", folder)
            except Exception as error:
                check(bool(str(error)), f"{type(error).__name__} without a message")
            else:
                (outcome,) = live.gather([context], ["wider"])
                live.model.remove("wider")
                raise Violation(
                    "an adapter of a model of twice the width was accepted, and gives "
                    f"{outcome!r:.80}"
                )
        for chosen in (None, name):
            live.check_row(context, chosen, how="after a wrong adapter")


def _write_wider(source: str, target: str) -> bool:
    """Copy an adapter with matrices of twice the width; returns whether there was one to copy."""
    weights = Path(source) / "adapter_model.safetensors"
    if not weights.is_file():
        return False
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    wider = {
        name: torch.cat([tensor, tensor], dim=1 if "lora_A" in name else 0).contiguous()
        for name, tensor in load_file(str(weights)).items()
    }
    save_file(wider, os.path.join(target, weights.name), metadata={"format": "pt"})
    return True


def _named(name: str | None) -> str:
    return "the base model" if name is None else repr(name)
