"""Clauses on histories: what was asked before, however much of it, never shows."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from genlm.core.conformance.compare import TOP_FACTOR, Violation, check, shown
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

#: One operation on a context.
OPERATIONS = ("ask", "score", "draw", "pin", "ask longer", "ask shorter", "forget rows")


class HistoryClauses:
    """Long histories, without clearing anything."""

    def test_operations_in_turn(self, live: Subject) -> None:
        """A context that is scored, drawn after, pinned, extended and asked, in any order: every
        answer is the oracle's."""

        def operations_in_turn(
            length: int, variant: int, operations: list[str], tail: TokenIds
        ) -> None:
            context = live.contexts.long(length, variant)
            done: list[str] = []
            for operation in operations:
                how = f"after {', '.join(done) or 'nothing'}"
                done.append(operation)
                if operation == "ask":
                    live.expect(live.ask(context), context, how=how)
                elif operation == "ask longer":
                    live.expect(live.ask(context + tail), context + tail, how=how)
                elif operation == "ask shorter":
                    shorter = context[: max(1, length - 2)]
                    live.expect(live.ask(shorter), shorter, how=how)
                elif operation == "score":
                    scores = live.run(live.lm.sequence_logprobs(context, tail))
                    for i, token_id in enumerate(tail):
                        expected = float(live.cold(context + tail[:i])[token_id])
                        near = abs(float(scores[i]) - expected) <= TOP_FACTOR * live.atol * max(
                            1.0, abs(expected)
                        )
                        check(
                            float(scores[i]) == expected or near,
                            f"token {i} of {shown(tail)} after {shown(context)}, {how}: scores "
                            f"{float(scores[i]):.6g}, its row has {expected:.6g}",
                        )
                elif operation == "draw":
                    live.run(live.lm.sample(context, 3, [], seed=1))
                elif operation == "pin":
                    live.lm.cache_kv(context)
                else:
                    live.lm.clear_cache()

        live.check_all(
            operations_in_turn,
            examples=15,
            least=8,
            length=st.sampled_from([n for n in (3, 17, 33, 65) if n + 4 <= live.contexts.limit]),
            variant=st.integers(0, 1),
            operations=st.lists(st.sampled_from(OPERATIONS), min_size=2, max_size=8),
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
                what = f"the context {shown(context)} after one of {live.longest} tokens"
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
                live.expect_row(live.ask(context), cold, f"{shown(context)} with other weights")
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
                f"the cold row of {shown(context)}, computed again after all other clauses",
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


class MoreAdapterClauses:
    """Adapters that come and go, and those that are wrong."""

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
        for turn in range(2):
            outcomes = live.gather([context] * len(asked), asked)
            for name, outcome, row in zip(asked, outcomes, expected, strict=True):
                live.expect_row(outcome, row, f"{shown(context)} with {name!r} of {len(asked)}")
            live.lm.clear_cache()
            if turn == 0:
                for name, row in zip(asked, expected, strict=True):
                    live.expect_row(live.ask(context, name), row, f"{shown(context)} with {name!r}")
                live.lm.clear_cache()

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
            for folder, row in zip([*folders, folders[0]], [*rows, rows[0]], strict=True):
                shutil.rmtree(same, ignore_errors=True)
                shutil.copytree(folder, same)
                live.bind("moving", same)
                live.expect_row(
                    live.ask(context, "moving"), row, f"an adapter from a copy of {folder}"
                )
                live.remove("moving")

    def test_adapter_of_another_model(self, live: Subject) -> None:
        """An adapter whose matrices do not fit the model is refused, and every row is as before."""
        name, *_ = live.needs_adapters()
        context = live.contexts.stem[:4]
        live.cold(context), live.cold(context, name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = os.path.join(scratch, "wider")
            if not _write_wider(live.adapters[name], folder):
                pytest.skip("the adapter is not a folder with adapter_model.safetensors")
            try:
                live.bind("wider", folder)
            except Exception as error:
                check(bool(str(error)), f"{type(error).__name__} without a message")
            else:
                (outcome,) = live.gather([context], ["wider"])
                live.remove("wider")
                check(
                    False,
                    "an adapter of a model of twice the width was accepted, and gives "
                    f"{outcome!r:.80}",
                )
        for chosen in (None, name):
            live.expect(live.ask(context, chosen), context, chosen, how="after a wrong adapter")


def _write_wider(source: str, target: str) -> bool:
    """Copy an adapter with matrices of twice the width; returns whether there was one to copy."""
    weights = Path(source) / "adapter_model.safetensors"
    if not weights.is_file():
        return False
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    wider = {}
    for name, tensor in load_file(str(weights)).items():
        dimension = 1 if "lora_A" in name else 0
        wider[name] = torch.cat([tensor, tensor], dim=dimension).contiguous()
    save_file(wider, os.path.join(target, weights.name), metadata={"format": "pt"})
    return True


class FaultClauses:
    """The engine fails in the middle of its work."""

    def fail_inside(self, lm: Any) -> Any:
        raise NotImplementedError

    def test_error_inside_the_engine(self, live: Subject) -> None:
        """An error in the middle of a batch, with adapters and without: whoever gets no row gets
        the error, and the same batches are right afterwards."""
        names = [None, *(live.adapters if live.lm.supports("genlm_add_lora") else [])][:3]
        contexts = [live.contexts.long(n, i) for i, n in enumerate((3, 3, 5, 18)) if n <= 60]
        contexts = [context[: live.contexts.limit - 1] for context in contexts]
        mixed = [(context, name) for context in contexts[:2] for name in names]
        plain = [(context, None) for context in contexts]
        for context, name in {*mixed, *plain}:
            live.cold(context, name)
        fault = self.fail_inside(live.lm)
        if fault is None:
            pytest.skip(
                "the suite cannot make this engine fail from inside; override fail_inside() where "
                "you can"
            )
        for asked in (mixed, plain, mixed[:1]):
            for times in (1, 1 << 20):
                live.lm.clear_cache()
                live.lm.clear_kv_cache()
                ids, adapters = [c for c, _ in asked], [a for _, a in asked]
                with self.fail_inside(live.lm)(times):
                    outcomes = live.gather(ids, adapters)
                for outcome, (context, name) in zip(outcomes, asked, strict=True):
                    if not isinstance(outcome, Exception):
                        live.expect(outcome, context, name, how="in a batch that failed inside")
                # Whoever used the same batch before, and whoever has the base model alone.
                for again in (asked, plain, mixed, mixed[::-1]):
                    live.lm.clear_cache()
                    rows = live.gather([c for c, _ in again], [a for _, a in again])
                    for row, (context, name) in zip(rows, again, strict=True):
                        live.expect(
                            row, context, name, how=f"after the engine had failed inside {times}x"
                        )


class RefusedOptionClauses:
    """Options that no backend has."""

    options: Any

    def test_unknown_option_is_refused(self, live: Subject) -> None:
        """An option that the backend does not have is refused before the model is loaded."""
        other = copy.copy(self)
        other.options = {**self.options, "no_such_option": 1}
        try:
            lm = other.load([])  # type: ignore[attr-defined]
        except ValueError as error:
            check("no_such_option" in str(error), f"the refusal does not name the option: {error}")
        else:
            lm.close()
            raise Violation("the option no_such_option=1 was accepted")
