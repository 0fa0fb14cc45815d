"""The outcome of each kind of adapter on a backend: right, apart or rejected.

Needs PEFT and transformers, whose rows are the reference.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from genlm.conformance.compare import Violation, check
from genlm.core.errors import InvalidAdapterError
from tests.adapter_kinds import KINDS, Kind, make_adapter

if TYPE_CHECKING:
    import torch

    from genlm.core.lm import AsyncLM


def reference_rows(
    model: str, adapter: str | None, contexts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The rows by transformers and PEFT alone, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, adapter)
    loaded.eval()
    with torch.no_grad():
        return [
            loaded(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].log_softmax(-1)
            for ids in contexts
        ]


@frozen(eq=False)
class Case:
    """An adapter of a kind, another adapter beside it, and the rows that they have.

    Attributes:
        kind: The kind.
        paths: Their folders: ``"this"`` and ``"other"``; the base model has none.
        rows: What each gives after each of :data:`CONTEXTS`; ``None`` where PEFT itself fails.
    """

    kind: Kind
    paths: Mapping[str | None, str | None]
    rows: Mapping[str | None, list[torch.Tensor] | None]


#: One context for each round, so that none is known from before.
CONTEXTS = [(5, 6, 7, 8, 9, 10 + n) for n in range(7)]


def make_case(kind: Kind, model: str, folder: Path) -> Case:
    """Save an adapter of a kind and a plain one, and compute their rows."""
    path = make_adapter(kind, model, folder / "adapter")
    try:
        rows = reference_rows(model, path, CONTEXTS)
    except Exception:
        rows = None  # the backend should reject it
    plain, others = _without(model)
    paths = {None: None, "other": plain, "this": path}
    return Case(kind, paths, {**others, "this": rows})


@functools.cache
def _without(model: str) -> tuple[str, dict[str | None, list[torch.Tensor]]]:
    """A plain adapter for a model, saved beside it, and the rows of both."""
    path = make_adapter(KINDS[0], model, Path(f"{model}-other"), seed=2)
    rows: dict[str | None, list[torch.Tensor]] = {
        None: reference_rows(model, None, CONTEXTS),
        "other": reference_rows(model, path, CONTEXTS),
    }
    return path, rows


def outcome(lm: AsyncLM, case: Case, atol: float, forwards: Sequence[int] = ()) -> str:
    """The outcome of a kind of adapter on a backend: ``"right"``, ``"apart"`` (right, in batches of
    its own) or ``"rejected"``.

    The adapter is mixed in one batch with the base model and another adapter, before, during and
    after.

    Args:
        lm: A model of the backend, without adapters and without a cache of rows.
        case: The adapters and their rows.
        atol: How far a row may be from that of transformers and PEFT.
        forwards: Grows by one with each forward of the engine, where a test can count them.

    Raises:
        Violation: a row is wrong: of the adapter, or of the others because of it.
    """

    def ask(round: int, *names: str | None) -> None:
        async def gather() -> list[torch.Tensor]:
            return await asyncio.gather(
                *(lm.next_token_logprobs(CONTEXTS[round], lora_name=name) for name in names)
            )

        for name, row in zip(names, asyncio.run(gather()), strict=True):
            expected = case.rows[name]
            if expected is None:
                raise Violation(f"{case.kind.name}: accepted, though PEFT itself fails with it")
            right = expected[round][: len(row)].log_softmax(-1)  # padding is dropped
            off = float((row[: len(right)].cpu() - right).abs().max())
            whose = "the base model" if name is None else f"the {name} adapter"
            check(off < atol, f"{case.kind.name}: {whose} is {off:.3g} off in round {round}")

    lm.add_new_lora(str(case.paths["other"]), "other")
    try:
        ask(0, None, "other")
        try:
            lm.add_new_lora(str(case.paths["this"]), "this")
        except InvalidAdapterError as error:
            check("adapter" in str(error), f"{case.kind.name}: {error}")
            found = "rejected"
        else:
            try:
                before = len(forwards)
                ask(1, None, "other", "this")
                found = "apart" if len(forwards) > before + 1 else "right"
                ask(2, "this")
                ask(3, None, "other")
                ask(4, "other", "this")
            finally:
                lm.remove_lora("this")
        ask(5, None, "other")
    finally:
        lm.remove_lora("other")
    ask(6, None)
    return found
