"""Clauses on the names of adapters, and on engines without any."""

from __future__ import annotations

from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds


class AdapterClauses:
    """Names that stand for adapters."""

    def test_default_adapter(self, live: Subject) -> None:
        """``set_lora`` is for the calls that give no ``lora_name``; an explicit ``None`` is the
        base model."""
        name, *_ = live.needs_adapters()

        @live.for_all(examples=5, context=live.contexts.any())
        def default_adapter(context: TokenIds) -> None:
            def check_default(name: str | None, how: str) -> None:
                row = live.run(live.lm.next_token_logprobs(context))
                live.expect(row, context, name, how)

            live.lm.set_lora(name)
            check_default(name, "as the default")
            live.check_row(context, None, how="by an explicit None")
            live.lm.clear_lora()
            check_default(None, "after clear_lora")
