"""Clauses on histories: what was asked before, however much of it, never shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st

from genlm.core.conformance.agreement import expect_greedy, expect_scores
from genlm.core.conformance.compare import brief, check
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

#: One operation on a context.
OPERATIONS = ("ask", "score", "draw", "pin", "ask longer", "ask shorter")


class HistoryClauses:
    """Long histories, without clearing anything."""

    def test_operations_in_turn(self, live: Subject) -> None:
        """A context that is scored, drawn after, pinned, extended and asked, in any order: every
        answer is the oracle's."""

        def operations_in_turn(
            lengths: Iterable[int], variant: int, operations: list[str], tail: TokenIds
        ) -> None:
            for length in lengths:
                context = live.contexts.long(length, variant)
                for i, operation in enumerate(operations):
                    live.lm.clear_cache()  # so that the engine is asked
                    how = f"after {', '.join(operations[:i]) or 'nothing'}"
                    check_operation(operation, context, tail, how)

        def check_operation(operation: str, context: TokenIds, tail: TokenIds, how: str) -> None:
            if operation == "ask":
                live.expect(live.ask(context), context, how=how)
            elif operation == "ask longer":
                live.expect(live.ask(context + tail), context + tail, how=how)
            elif operation == "ask shorter":
                shorter = context[: max(1, len(context) - 2)]
                live.expect(live.ask(shorter), shorter, how=how)
            elif operation == "score":
                scores = live.run(live.lm.sequence_logprobs(context, tail))
                expect_scores(live, scores, context, tail, how=how)
            elif operation == "draw":
                drawn = live.run(live.lm.sample(context, 3, [], temperature=0.0))
                expect_greedy(live, drawn, context, how=how)
            else:
                live.lm.cache_kv(context)

        lengths = [n for n in (3, 17, 33, 65) if n + 4 <= live.contexts.limit]
        live.check_all(
            operations_in_turn,
            examples=8,
            least=4,
            lengths=st.sampled_from([tuple(dict.fromkeys((n, lengths[-1]))) for n in lengths]),
            variant=st.integers(0, 1),
            # Twice, so that each comes before each.
            operations=st.permutations(OPERATIONS).map(lambda order: [*order, *order]),
            tail=live.contexts.tails(most=3),
        )

    def test_growing_particles(self, live: Subject) -> None:
        """A dozen contexts behind one prompt grow token by token, fork and end, as in sequential
        Monte Carlo; rows stay cold."""
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
                live.expect(rows[i], particles[i], how=f"one of 12 particles, at step {step + 1}")

    def test_many_contexts_without_clearing(self, live: Subject) -> None:
        """Hundreds of contexts, one batch after the other, then all asked again and extended: each
        has its cold row."""
        many = live.contexts.many(live.scaled(360, 140))
        tokens = live.contexts.tokens
        for begin in range(0, len(many), 60):
            live.gather(many[begin : begin + 60])
        live.lm.clear_cache()
        source = live.random("many")
        chosen = source.sample(many, live.scaled(120, 50))
        longer = [
            (*context, source.choice(tokens))
            for context in chosen
            if len(context) < live.contexts.limit
        ]
        for asked in (chosen, longer):
            for row, context in zip(live.gather(asked), asked, strict=True):
                live.expect(row, context, how=f"after {len(many)} others")

    def test_two_long_contexts_in_turn(self, live: Subject) -> None:
        """One very long context, then short ones, then another long one and the first again: each
        has the row that it had before."""
        contexts = live.contexts
        short = [contexts.stem[:n] for n in (1, 3, 12) if n <= contexts.limit]
        before = {context: live.lm.next_token_logprobs_uncached(context) for context in short}
        longest = [contexts.long(live.longest, variant) for variant in (2, 3)]
        for long in (*longest, longest[0]):
            live.expect(live.ask(long), long, how="in turn with short ones")
            for context in short:
                now = live.lm.next_token_logprobs_uncached(context)
                what = f"the context {brief(context)} after one of {live.longest} tokens"
                live.expect_row(now, before[context], f"{what}, computed cold")
                live.expect_row(live.ask(context), before[context], what)
            live.lm.clear_cache()

    def test_weights_changed_in_place(self, live: Subject) -> None:
        """Where the model is a torch module: after its weights have changed, ``clear_cache`` and
        ``clear_kv_cache`` leave nothing of the old ones."""
        from torch import nn

        model = live.lm.underlying_model
        if not isinstance(model, nn.Module):
            pytest.skip("the engine's own model is not a torch.nn.Module in this process")
        contexts = [live.contexts.long(n) for n in (6, 40) if n + 1 <= live.contexts.limit]
        old = [live.ask(context) for context in contexts]
        for context in contexts:
            live.lm.cache_kv(context[:-1])
        with _changed_weights(model):
            live.lm.clear_cache()
            live.lm.clear_kv_cache()
            for context, row in zip(contexts, old, strict=True):
                cold = live.lm.next_token_logprobs_uncached(context)
                if cold.equal(row):
                    pytest.skip("the weights in this process are not those that the engine uses")
                live.expect_row(live.ask(context), cold, f"{brief(context)} with other weights")
        live.lm.clear_cache()
        live.lm.clear_kv_cache()
        for context in contexts:
            live.expect(live.ask(context), context, how="with the old weights again")

    def test_oracle_has_not_changed(self, live: Subject) -> None:
        """The first cold rows of the run are the cold rows still, after everything that was
        asked."""
        for context, row in live.first_rows.items():
            live.expect_row(
                live.lm.next_token_logprobs_uncached(context),
                row,
                f"the cold row of {brief(context)}, computed again after all other clauses",
            )

    def test_contract_is_kept_throughout(self, live: Subject) -> None:
        """In every clause up to here the hooks returned what the contract says, and left it alone
        afterwards."""
        found = list(dict.fromkeys(str(violation) for violation in live.contract_violations))
        found += live.gate.rewritten
        check(not found, "; ".join(found[:3]))


@contextmanager
def _changed_weights(model: Any) -> Iterator[None]:
    import torch

    weights = [
        parameter
        for parameter in model.parameters()
        if parameter.ndim == 2 and parameter.is_floating_point()
    ]
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
