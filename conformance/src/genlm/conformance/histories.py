"""Clauses on histories, and on state that grows, moves and goes: what was asked before never
shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.compare import Violation, brief, check
from genlm.conformance.scheduled import REBOUND_ADAPTER
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: How many times a name is rebound at effort 1, and how many of these turns have one pin, so that a
#: context is pinned again 8 and 16 versions later.
REBOUND_TIMES, FIRST_TURNS = 260, 18


class HistoryClauses:
    """Long histories, without clearing anything."""

    @advise("contexts that fork from one parent write into one state", "forked_contexts")
    def test_growing_particles(self, live: Subject) -> None:
        """A dozen contexts with one prompt grow token by token, fork and end, as in sequential
        Monte Carlo; all have their cold rows."""
        contexts = live.contexts
        steps = min(live.scaled(24, 20), contexts.limit - 24)
        if steps < 2:
            pytest.skip(f"max_context is {contexts.limit}: no room for contexts that grow")
        source = live.random("particles")
        particles = [contexts.long(20)] * 12
        for step in range(steps):
            particles = [
                (*source.choice(particles), source.choice(contexts.tokens)) for _ in particles
            ]
            rows = live.gather(particles)
            for i in source.sample(range(len(particles)), live.scaled(4, 2)):
                how = f"one of 12 particles, at step {step + 1}"
                live.expect.row(rows[i], particles[i], how=how)

    @advise("a long context changes tables that short ones read", "cold_row_is_repeatable")
    def test_two_long_contexts_in_turn(self, live: Subject) -> None:
        """A very long context, short ones, another long one, and the first again: each has the same
        row as before."""
        contexts = live.contexts
        short = [contexts.stem[:n] for n in (1, 3, 12) if n <= contexts.limit]
        before = {context: live.lm.next_token_logprobs_uncached(context) for context in short}
        longest = [contexts.long(live.longest, variant) for variant in (2, 3)]
        for long in (*longest, longest[0]):
            live.check_row(long, how="asked for after short contexts")
            for context in short:
                now = live.lm.next_token_logprobs_uncached(context)
                what = f"the context {brief(context)} after one of {live.longest} tokens"
                live.expect.same(now, before[context], f"{what}, computed cold")
                live.expect.same(live.ask(context), before[context], what)
            live.lm.clear_cache()

    @advise(
        "clear_kv_cache keeps old state, such as that of a prompt pinned twice, or the engine "
        "keeps a copy of the weights",
        "dropped_state",
        capability="weights",
    )
    def test_weights_changed_in_place(self, live: Subject) -> None:
        """If the model is a torch module: after its weights change, cold rows use only the new
        weights, and so do all rows after ``clear_cache`` and ``clear_kv_cache``."""
        from torch import nn

        model = live.lm.underlying_model
        if not isinstance(model, nn.Module):
            pytest.skip("the engine's own model is not a torch.nn.Module in this process")
        contexts = [live.contexts.long(n) for n in (6, 40) if n + 1 <= live.contexts.limit]
        old = [live.ask(context) for context in contexts]
        # Each context is pinned twice, because a second pin must be given back, too.
        for context in [*contexts, *contexts]:
            live.lm.cache_kv(context[:-1])
        with _changed_weights(model):
            before = [live.lm.next_token_logprobs_uncached(context) for context in contexts]
            live.model.clear()
            for context, row, early in zip(contexts, old, before, strict=True):
                cold = live.lm.next_token_logprobs_uncached(context)
                if cold.equal(row):
                    pytest.skip("the weights in this process are not those that the engine uses")
                how = f"{brief(context)} with other weights, cold, while older state was kept"
                live.expect.same(early, cold, how)
                how = f"{brief(context)} with other weights, after clear_kv_cache()"
                live.expect.same(live.ask(context), cold, how)
        live.model.clear()
        for context in contexts:
            live.check_row(context, how="after the old weights were put back")

    @advise(
        "a change of the weights was not undone exactly, such as a merged adapter",
        "removed_adapter",
    )
    def test_oracle_has_not_changed(self, live: Subject) -> None:
        """The first cold rows of the run are still the cold rows at its end."""
        for context, row in live.expect.first_rows.items():
            what = f"the cold row of {brief(context)}, computed again after all other clauses"
            live.expect.same(live.lm.next_token_logprobs_uncached(context), row, what)

    @advise(
        "the engine writes into a result after returning it, or one request of a batch fails "
        "all of them"
    )
    def test_contract_is_kept_throughout(self, live: Subject) -> None:
        """In every clause so far the hooks returned results that fit the contract, did not write
        into them afterwards, were woken without an error, and did not fail requests only because
        they came together, unless memory ran out. (Faults that another clause reported are not
        repeated.)"""
        found = [str(violation) for violation in live.gate.violations] + live.gate.misdeeds
        found = [each for each in dict.fromkeys(found) if each not in live.gate.told]
        check(not found, "; ".join(found[:3]))


@contextmanager
def _changed_weights(model: Any) -> Iterator[None]:
    import torch

    weights = [each for each in model.parameters() if each.ndim == 2 and each.is_floating_point()]
    with torch.no_grad():
        kept = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.mul_(0.9)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)


class GrowthClauses:
    """Tables grow and are moved together, and nothing is lost."""

    @advise(
        "pinned state is not copied when a table grows or moves",
        "contexts_beside_as_many_pins_as_fit",
        capability="pins",
    )
    def test_pinned_contexts_are_moved_with_the_others(self, live: Subject) -> None:
        """Contexts are pinned, other state is freed, and much more is asked for; then the pinned
        contexts are extended. After two rounds of this, all have their cold rows."""
        live.needs("genlm_cache_prefix")
        contexts = live.contexts
        room = contexts.limit - 2
        pinned = [contexts.long(min(n, room, live.longest), i) for i, n in enumerate((20, 90, 300))]
        adapter = next(iter(live.loras), None)
        many = contexts.many(live.scaled(120, 80))
        long = [contexts.long(min(200, room, live.longest), 3 + i) for i in range(12)]
        for context in pinned:
            live.lm.cache_kv(context)
        for turn, token in enumerate(contexts.tokens[:2]):
            longer = [(*context, token) for context in pinned]
            if adapter is not None:
                live.model.bind(REBOUND_ADAPTER, adapter)
                live.gather(long[:4], [REBOUND_ADAPTER] * 4)
                how = "with an adapter, extending one that is pinned without"
                live.check_rows(longer, [REBOUND_ADAPTER] * len(longer), how=how)
                live.model.remove(REBOUND_ADAPTER)
            live.gather(many[turn::2])
            live.gather(long[turn::2])
            self._expect_all(live, longer, "extending a pinned one, after others came and went")
            others = [(*context, token) for context in (*many[turn:12:2], *long[turn::2])]
            self._expect_all(live, others, "extending one of those that came after others went")

    @advise(
        "pins of a removed adapter keep their memory, or the version of an adapter is stored "
        "in too few bits",
        "pins_end_with_their_adapter",
        "prompt_pinned_twice_is_cleared_once",
        capability="pins",
    )
    def test_adapters_are_bound_and_pinned_again_and_again(self, live: Subject) -> None:
        """Again and again a name is rebound and contexts are pinned under it, hundreds in all and
        without any clear: every pin is accepted, and rows are those of the current adapter."""
        live.needs("genlm_cache_prefix")
        names = live.needs_adapters(2)[:2]
        contexts = live.contexts
        times = live.scaled(REBOUND_TIMES, 32)
        # All turns together make at least so many pins: fewer turns have more of them.
        each = math.ceil((REBOUND_TIMES - FIRST_TURNS) / (times - FIRST_TURNS))
        longest = min(130 if live.effort >= 1 else 66, contexts.limit - 1)
        pinned = 0
        for turn in range(times):
            # The order of the two files has no period, so two versions that an engine takes for
            # one another, for instance modulo 16, have different files.
            name = names[turn.bit_count() % 2]
            live.model.bind(REBOUND_ADAPTER, name)
            # Little is computed between the first turns, so that blocks of one are kept until a
            # turn that pins the same context 8 or 16 versions later.
            is_first = turn < FIRST_TURNS
            before = pinned
            variants = [turn % 2] if is_first else range(turn, turn + each)
            try:
                for variant in variants:
                    context = contexts.long(longest, variant % max(12, each))
                    live.lm.cache_kv(context, lora_name=REBOUND_ADAPTER)
                    pinned += 1
            except Exception as error:
                raise Violation(
                    f"a pin of {longest} tokens was rejected: {error}. Before it a name was bound "
                    f"{turn + 1} times, and {pinned} contexts were pinned under it; all "
                    f"but {pinned - before} of these pins belong to adapters that are removed"
                    f"{self._after_a_clear(live, context)}"
                ) from error
            if (turn % 8 < 2 and is_first) or turn % 50 < 2 or turn == times - 1:
                longer = (*context, contexts.tokens[0])
                (row,) = live.gather([longer], [REBOUND_ADAPTER])
                bound = f"which was bound to {name!r}, for time {turn + 1}"
                how = f"pinned with {REBOUND_ADAPTER!r}, {bound}"
                live.expect.row(row, longer, name, how=how)
        live.model.remove(REBOUND_ADAPTER)

    def _after_a_clear(self, live: Subject, context: TokenIds) -> str:
        """Whether a pin is taken once everything has been cleared."""
        try:
            live.model.clear()
            live.lm.cache_kv(context, lora_name=REBOUND_ADAPTER)
        except Exception:
            return "; after clear_kv_cache() it fails too: no pin is given back by that, either"
        return (
            "; after clear_kv_cache() it is accepted: removing an adapter does not give pins back"
        )

    def _expect_all(self, live: Subject, contexts: list[TokenIds], how: str) -> None:
        live.lm.clear_cache()
        live.check_rows(contexts, how=how)
