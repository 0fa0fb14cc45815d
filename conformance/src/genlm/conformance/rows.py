"""Clauses on the rows themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.compare import brief, check, with_adapter
from genlm.conformance.properties import for_all
from genlm.conformance.subject import Subject
from genlm.core import together
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: How far the logarithm of a row's total mass may be from 0, nats.
MAX_LOG_MASS = 1e-4

#: Printable ASCII, and every character of two bytes in UTF-8.
ASCII = "".join(map(chr, range(0x20, 0x7F)))
TWO_BYTES = "".join(map(chr, range(0x80, 0x800)))


class RowClauses:
    """Clauses on the form of a row and on its tokens."""

    @advise("token_bytes() of the tokenizer, or the decoding of byte tokens such as <0x0A>")
    def test_bytes_of_text(self, live: Subject) -> None:
        """The bytes of ``encode(text)`` joined are the text, over printable ASCII and characters of
        two bytes. (Set ``text_is_normalised`` where the tokenizer changes text.)"""
        if live.suite.text_is_normalised:
            pytest.skip("this class says that the tokenizer changes text (text_is_normalised)")
        tokenizer, vocab = live.lm.tokenizer, live.lm.byte_vocab
        special = set(live.contexts.special)
        texts = [ASCII, ASCII[::-1], "a b  c", "1 + 1 = 2"]
        texts += [TWO_BYTES[i : i + 40] for i in range(0, len(TWO_BYTES), 40)]
        for text in texts:
            try:
                ids = [int(token_id) for token_id in tokenizer.encode(text)]
            except (AttributeError, TypeError, ValueError) as error:
                pytest.skip(f"the tokenizer does not encode text: {error}")
            if getattr(tokenizer, "unk_token_id", None) in ids:
                continue  # The vocabulary lacks one of these characters.
            found = b"".join(vocab[i].byte_string for i in ids if i not in special)
            # Some tokenizers put a space before the first word.
            check(
                found.removeprefix(b" ") == text.encode().removeprefix(b" "),
                f"the tokens of the text {text[:20]!r}... have the bytes {found[:40]!r}... instead "
                "of the bytes of the text",
            )

    @advise(
        "logits without log_softmax, or a log_softmax in a type shorter than float32",
        "engine_keeps_its_contract",
    )
    def test_row_is_normalised(self, live: Subject) -> None:
        """``logsumexp(row)`` is 0 within 1e-4, and no number is NaN or ``+inf`` (``-inf`` means no
        mass)."""

        @for_all(live, context=live.contexts.any())
        def row_is_normalised(context: TokenIds) -> None:
            rows = {
                "asked for": live.ask(context),
                "in a batch": live.run(live.lm.batch_next_token_logprobs([context]))[0],
                "computed cold": live.cold(context),
            }
            for way, row in rows.items():
                what = f"the row of {brief(context)}, {way},"
                check(not bool(row.isnan().any()), f"{what} has NaN")
                mass = float(row.detach().double().logsumexp(dim=0))
                check(
                    abs(mass) <= MAX_LOG_MASS,
                    f"{what} is not normalised: logsumexp(row) is {mass:.6g} instead of 0 "
                    f"(tolerance {MAX_LOG_MASS:g})",
                )

    @advise(
        "cold queries read state that other requests left",
        "warm_row_equals_cold_row",
        "dropped_state",
    )
    def test_cold_row_is_repeatable(self, live: Subject) -> None:
        """A context's cold row, the reference of all others, is always the same."""

        @for_all(live, examples=12, contexts=live.contexts.distinct())
        def cold_row_is_repeatable(contexts: list[TokenIds]) -> None:
            before = [live.lm.next_token_logprobs_uncached(context) for context in contexts]
            live.gather(contexts)
            for context, row in zip(contexts, before, strict=True):
                again = live.lm.next_token_logprobs_uncached(context)
                live.expect.same(again, row, f"the context {brief(context)}, cold once more")
                live.expect.row(again, context, how="cold once more")

    @advise(
        "the model is loaded differently from its reference: dtype, rotary embedding, "
        "softcap, window, or an adapter's scale",
        "row_depends_on_every_token",
    )
    def test_cold_rows_are_the_reference(self, live: Subject) -> None:
        """If the class gives reference rows that were computed without the backend, the cold rows
        agree with them, up to the longest context, and with adapters."""
        lengths = sorted({min(length, live.longest) for length in (1, 8, 130, 300, 600, 1024)})
        contexts = [live.contexts.long(length, 1) for length in lengths]
        rows = {name: live.suite.reference_rows(contexts, name) for name in (None, *live.loras[:2])}
        if rows[None] is None:
            pytest.skip(
                "there are no rows to compare with; override `reference_rows`, or name another "
                "backend that takes the model by `reference` (--reference)"
            )
        width = len(live.lm.byte_vocab)
        for name, context, row in [
            (name, *pair)
            for name, some in rows.items()
            if some is not None
            for pair in zip(contexts, some, strict=True)
        ]:
            what = f"{brief(context)}{with_adapter(name)}"
            check(
                row.shape == (width,),
                f"the reference row of {what} has the shape {tuple(row.shape)}, not "
                f"({width},): without ids that the tokenizer lacks, normalised over the others",
            )
            how = "compared with the reference row"
            live.expect.same(live.cold(context, name), row, f"the cold row of {what}, {how}")

    @advise("the hook returns another shape, dtype or count than hookspecs.py says")
    def test_engine_keeps_its_contract(self, live: Subject) -> None:
        """The results of the hooks themselves, before the core changes them, have the right number,
        shape, type, values and mass."""

        @for_all(live, contexts=live.contexts.several(), tokens=live.contexts.tails())
        def engine_keeps_its_contract(contexts: list[TokenIds], tokens: TokenIds) -> None:
            before = len(live.gate.violations)
            live.gather(contexts)
            live.lm.cache_kv(contexts[0])
            if live.lm.supports("genlm_cache_prefix"):
                check(
                    live.gate.pinned == [True],
                    f"genlm_cache_prefix returned {live.gate.pinned[0]}; it must return True when "
                    "the prefix is pinned",
                )
            live.run(live.lm.batch_sample(contexts, max_tokens=2, eos_token_ids=[], seed=0))
            live.score(contexts[0], tokens)
            found = list(dict.fromkeys(map(str, live.gate.violations[before:])))
            live.gate.told.update(found)
            check(not found, "; ".join(found[:3]))

    @advise(
        "rows are on another device, or in another order, than the queries of their step",
        "batch_answers_in_order",
    )
    def test_functions_of_rows(self, live: Subject) -> None:
        """A result of ``then`` is computed from the caller's own row and arguments, also beside
        other callers and beside a caller for whom the function raises; only that caller gets the
        exception."""

        @together
        def tagged(rows: torch.Tensor, tags: list[Any]) -> list[tuple[Any, torch.Tensor]]:
            if None in tags:
                raise KeyError("asked for")
            return [*zip(tags, rows.unbind(), strict=True)]

        async def asked(contexts: list[TokenIds], tags: list[Any]) -> list[Any]:
            each = zip(contexts, tags, strict=True)
            thens = (live.lm.next_token_logprobs(ids, then=tagged(tag)) for ids, tag in each)
            found: list[Any] = await asyncio.gather(*thens, return_exceptions=True)
            return found

        @for_all(live, examples=6, contexts=live.contexts.several())
        def functions_of_rows(contexts: list[TokenIds]) -> None:
            several = [*contexts, contexts[0], contexts[-1]]
            tags = [*range(len(several) - 1), None]
            *found, refused = live.run(asked(several, tags))
            for context, tag, result in zip(several, tags, found, strict=False):
                what = f"a function of the row of {brief(context)} and of the argument {tag}"
                check(isinstance(result, tuple), f"{what} gives its caller {result!r:.200}")
                given, row = result
                check(given == tag, f"{what} was called with the argument {given}")
                live.expect.row(
                    row, context, how="in a function of rows, beside other callers' rows"
                )
            check(
                isinstance(refused, KeyError),
                f"a caller whose function raises a KeyError gets {refused!r:.200} instead of it",
            )
