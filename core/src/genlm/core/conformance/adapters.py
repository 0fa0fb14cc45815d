"""Clauses on LoRA adapters: they never mix."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from genlm.core.conformance.compare import TOP_FACTOR, Violation, answered, brief, check, difference
from genlm.core.conformance.driver import Outcome, submitted
from genlm.core.conformance.subject import Subject
from genlm.core.errors import UnknownAdapterError, UnsupportedError
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: Tokens of a draw that is under way while adapters change.
DRAWN = 8


class AdapterClauses:
    """Each request is answered with its adapter and no other."""

    def test_adapter_changes_the_rows(self, live: Subject) -> None:
        """Each adapter has rows of its own: else the clauses on adapters would hold of an engine
        that ignores them."""
        names = [None, *live.needs_adapters()]
        context = live.contexts.stem[:8]
        for i, name in enumerate(names):
            for other in names[:i]:
                rows = live.cold(context, name), live.cold(context, other)
                check(
                    difference(*rows, 5 * live.atol) is not None,
                    f"{_named(name)} and {_named(other)} give the same row of {list(context)}",
                )

    def test_adapters_in_one_batch(self, live: Subject) -> None:
        """Requests with different adapters and none, asked together, each get the row of
        theirs."""
        names = [None, *live.needs_adapters()]

        @live.for_all(
            least=6,
            asked=st.lists(
                st.tuples(live.contexts.any(), st.sampled_from(names)), min_size=2, max_size=5
            ),
        )
        def adapters_in_one_batch(asked: list[tuple[TokenIds, str | None]]) -> None:
            how = f"in a batch with {', '.join(_named(name) for _, name in asked)}"
            live.check_rows(*zip(*asked, strict=True), how=how)

    def test_adapters_in_turn(self, live: Subject) -> None:
        """The same contexts with one adapter after the other: nothing kept under one serves
        another."""
        names = [None, *live.needs_adapters()]

        @live.for_all(
            examples=14,
            context=live.contexts.any(),
            tail=live.contexts.tails(),
            turns=st.permutations(names),
            pinned=st.booleans(),
        )
        def adapters_in_turn(
            context: TokenIds, tail: TokenIds, turns: list[str | None], pinned: bool
        ) -> None:
            for i, name in enumerate(turns):
                before = f"after {', '.join(map(_named, turns[:i])) or 'nothing'}"
                if pinned:
                    live.lm.cache_kv(context, lora_name=name)
                for end in range(len(tail) + 1):
                    asked = context + tail[:end]
                    live.check_row(asked, name, how=before)

    def test_default_adapter(self, live: Subject) -> None:
        """``set_lora`` is for the calls that give no ``lora_name``; an explicit ``None`` is the
        base model."""
        name, *_ = live.needs_adapters()

        @live.for_all(examples=5, context=live.contexts.any())
        def default_adapter(context: TokenIds) -> None:
            live.lm.set_lora(name)
            row = live.run(live.lm.next_token_logprobs(context))
            live.expect(row, context, name, how="as the default")
            live.check_row(context, None, how="by an explicit None")
            live.lm.clear_lora()
            row = live.run(live.lm.next_token_logprobs(context))
            live.expect(row, context, None, how="after clear_lora")

    def test_rebound_adapter(self, live: Subject) -> None:
        """A name that is bound to another adapter gives that one's rows from then on, whatever was
        cached under it."""
        first, second, *_ = live.needs_adapters(2)

        @live.for_all(
            examples=10, context=live.contexts.any(), pinned=st.booleans(), removed=st.booleans()
        )
        def rebound_adapter(context: TokenIds, pinned: bool, removed: bool) -> None:
            old, new = live.cold(context, first), live.cold(context, second)

            def expect(row: torch.Tensor, how: str) -> None:
                what = f"{list(context)} with {first!r}{how}"
                live.expect_row(live.ask(context, first), row, what)

            if pinned:
                live.lm.cache_kv(context[:-1] or context, lora_name=first)
            expect(old, "")
            if removed:
                live.remove(first)
            live.bind(first, live.adapters[second])
            expect(new, f" bound to {second!r} anew")
            live.lm.clear_cache()
            expect(new, f" bound to {second!r}, asked again")
            live.bind(first, live.adapters[first])
            expect(old, " bound back")

    def test_removed_adapter(self, live: Subject) -> None:
        """A removed adapter is unknown, the base model and the other adapters are as before, and it
        can come back."""
        name, *_ = live.needs_adapters()

        def removed_adapter(context: TokenIds) -> None:
            expected = live.cold(context, name)
            live.ask(context, name)
            live.remove(name)
            (outcome,) = live.gather([context], [name])
            check(
                isinstance(outcome, UnknownAdapterError),
                f"asked with the removed adapter {name!r}: {outcome!r:.200}",
            )
            for other in [None, *(other for other in live.adapters if other != name)]:
                live.check_row(context, other, how=f"after {name!r} was removed")
            live.bind(name, live.adapters[name])
            what = f"{list(context)} with {name!r} added again"
            live.expect_row(live.ask(context, name), expected, what)

        live.reset()
        # Of several blocks, also where Hypothesis chooses a short one.
        removed_adapter(live.contexts.long(min(40, live.contexts.limit - 1), 1))
        live.for_all(examples=4, context=live.contexts.any())(removed_adapter)

    def test_adapters_changed_in_flight(self, live: Subject) -> None:
        """Adapters are bound anew, removed and added while rows, a score and a cancelled draw with
        them are in flight: each request has the adapter that its name stood for when it was
        asked."""
        first, second, *_ = live.needs_adapters(2)
        changes: dict[str, Callable[[], None]] = {
            f"{first!r} is bound anew": functools.partial(live.bind, first, live.adapters[second]),
            f"{first!r} is removed": functools.partial(live.remove, first),
            "another is added": functools.partial(live.bind, "another", live.adapters[first]),
        }
        context, tail = live.contexts.stem[:4], live.contexts.tokens[:2]
        names = [None, first, second]
        for what, change in changes.items():
            live.reset()
            rows = [live.cold(context, name) for name in names]
            expected = float(live.cold((*context, tail[0]), first)[tail[1]])
            *answers, score = live.run(self._changed_in_flight(live, names, change))
            for name, answer, row in zip(names, answers, rows, strict=True):
                live.expect_row(answer, row, f"{brief(context)} with {name!r}, while {what}")
            # Where the core makes a score of several rows, it is refused if its adapter goes.
            if not isinstance(score, UnknownAdapterError):
                answered(score, f"a score with {first!r}, while {what}")
                tolerance = TOP_FACTOR * live.atol * max(1, abs(expected))
                check(
                    abs(float(score[1]) - expected) <= tolerance,
                    f"{brief(tail)} after {brief(context)} with {first!r}, while {what}: token 1 "
                    f"scores {float(score[1]):.6g}, its row has {expected:.6g}",
                )
            for name in [None, *live.bound]:
                live.check_row(context, name, how=f"after {what}")

    async def _changed_in_flight(
        self, live: Subject, names: list[str | None], change: Callable[[], None]
    ) -> list[Outcome]:
        """The outcomes of a row with each adapter and of a score, asked before a change."""
        lm, context, tail = live.lm, live.contexts.stem[:4], live.contexts.tokens[:2]
        with live.gate.held():
            asked: list[asyncio.Future[Outcome]] = [
                asyncio.ensure_future(lm.next_token_logprobs(context, lora_name=name))
                for name in names
            ]
            asked.append(asyncio.ensure_future(lm.sequence_logprobs(context, tail, names[1])))
            draw = asyncio.ensure_future(lm.sample(context, DRAWN, [], lora_name=names[1]))
            await submitted()
            await live.engine_held()
            draw.cancel()
            await submitted()
            changed = live.thread(change)
        outcomes = await live.soon(asyncio.gather(*asked, return_exceptions=True))
        await live.soon(asyncio.wrap_future(changed))
        return list(outcomes)

    def test_adapter_that_fails_to_load(self, live: Subject) -> None:
        """If loading an adapter fails, the name keeps its old binding and every row is as
        before."""
        name, *_ = live.needs_adapters()
        context = live.contexts.stem[:4]
        live.cold(context, name), live.cold(context)
        try:
            live.lm.add_new_lora("there-is-no-such-adapter", name)
        except Exception as error:
            check(bool(str(error)), f"{type(error).__name__} without a message")
        else:
            # An engine that takes any path, such as the mock: nothing failed.
            live.bind(name, live.adapters[name])
        for chosen in (None, name):
            live.check_row(context, chosen, how=f"after loading {name!r} from nowhere")

    def test_many_adapters(self, live: Subject) -> None:
        """More adapters than an engine may have places for: each keeps its rows, in one batch and
        in turn."""
        first, second, *_ = live.needs_adapters(2)
        paths = [live.adapters[first], live.adapters[second]]
        context = live.contexts.stem[:4]
        rows = [live.cold(context, first), live.cold(context, second)]
        names = []
        for i in range(4):
            try:
                live.bind(f"further-{i}", paths[i % 2])
            except Exception:  # an engine may have a limit, and say so
                break
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
                live.expect_row(outcome, row, f"{brief(context)} with {name!r} of {len(asked)}")
            live.lm.clear_cache()

    def test_lora_without_support(self, live: Subject) -> None:
        """Where the engine has no LoRA, adding an adapter says so, and the model goes on."""
        if live.lm.supports("genlm_add_lora"):
            pytest.skip("the engine has LoRA")
        context = live.contexts.stem[:4]
        try:
            live.lm.add_new_lora("nowhere", "x")
        except UnsupportedError:
            live.check_row(context, how="after LoRA was refused")
        else:
            raise Violation(
                "add_new_lora raised no UnsupportedError, and the engine does not implement "
                "genlm_add_lora"
            )


def _named(name: str | None) -> str:
    return "the base model" if name is None else repr(name)
