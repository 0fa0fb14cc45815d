"""Random programs against an engine; every row and score is compared with transformers'."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define
from transformers import AutoModelForCausalLM

from genlm.kit.kv.sharing import Worth
from genlm.mlx import store
from genlm.mlx.loading import load
from genlm.mlx.store import Store
from tests.programs import Asked, Program, Tokens, constants

from .watched import Watched

#: How far log-probabilities may be from transformers'; recurrent state adds up roundings, and the
#: angles of thousands of positions are rounded otherwise (cold rows are as far off).
CLOSE, RECURRENT, FAR = 2e-3, 1e-2, 1e-2

#: The longest context.
LONGEST = 3000

#: Constants of the stores, each with values on both sides of what short programs reach.
CONSTANTS = {
    "genlm.mlx.store.FEW_MORE": [0, 4, 1000],
    "genlm.mlx.store.MOST_PRODUCTS": [1 << 9, 1 << 21],
    "genlm.mlx.store.LEAST_FED": [3, 256],
    "genlm.mlx.blocks.WORTHWHILE": [2, 16, 100],
    "genlm.mlx.aside.LEAST_ASIDE": [0, 64 << 20],
    "genlm.mlx.blocks.STAYS_WHOLE": [0.0, 0.25, 1.1],
    "genlm.mlx.blocks.TOLERATED_PADDING": [0, 4096],
    "genlm.mlx.layout.FEW": [1, 8],
    "genlm.mlx.runner.FIRST_LOGITS": [1, 64],
}
WORTHS = [
    store.WORTH,
    Worth(),
    Worth(2, 2, 4, 2, 6, 1.25, 1, 2, 2, 3),
    Worth(1, 1, 1, 1, 1, 1.0, 0, 1, 1, 2),
    Worth(4, 3, 40, 8, 64, 2.0, 4, 4, 4, 6),
]
STEP_SIZES = [3, 16, 50, 256, 2048]
BUDGETS = [None, 0, 30_000, 1_000_000]


class Reference:
    """Rows of transformers, by adapter; those of all prefixes of a context at once."""

    def __init__(self, folder: Path, adapters: Mapping[str, str]) -> None:
        self._folder, self._folders = folder, adapters
        self._models: dict[str | None, Any] = {}
        self._known: OrderedDict[Asked, torch.Tensor] = OrderedDict()

    def rows(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        longest = sorted(set(asked), key=lambda one: -len(one[1]))
        found = {one: self._whole(*one)[len(one[1]) - 1] for one in longest}
        return [found[one] for one in asked]

    def _whole(self, name: str | None, tokens: Tokens) -> torch.Tensor:
        """``[n, vocab_size]`` of a context that begins with ``tokens``."""
        for (other, known), rows in self._known.items():
            if other == name and known[: len(tokens)] == tokens:
                return rows
        with torch.no_grad():
            logits = self._model(name)(torch.tensor([tokens]), use_cache=False).logits[0]
        self._known[name, tokens] = logits.log_softmax(-1)
        while len(self._known) > 200:
            self._known.popitem(last=False)
        return self._known[name, tokens]

    def _model(self, name: str | None) -> Any:
        if name not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self._folder).eval()
            if name is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, self._folders[name]).eval()
            self._models[name] = model
        return self._models[name]


@define(eq=False, kw_only=True)
class OnMlx(Program):
    """Forward passes fail now and then; the store's own books are looked at."""

    model: Watched
    reference: Reference
    adapters: Mapping[str, str]
    close: float

    def ways(self) -> dict[Callable[[], None], int]:
        return {**super().ways(), self.fail: 4}

    def run(self) -> None:
        super().run()
        if isinstance(self.engine.store, Store):
            self.engine.store.planner.tree.check_integrity()

    def fail(self) -> None:
        """A forward pass that fails: everything in flight is gone, and the engine goes on."""
        self.model.failing = True
        try:
            self.step()
        except RuntimeError as error:
            if "a forward pass failed" not in str(error):
                raise
            self.in_flight.clear()
        finally:
            self.model.failing = False

    def folder_of(self, name: str) -> str:
        return self.adapters[name]

    def compare(
        self, asked: Sequence[Asked], given: Sequence[torch.Tensor], columns: Sequence[slice]
    ) -> None:
        expected = self.reference.rows(asked)
        for one, row, right, of in zip(asked, given, expected, columns, strict=True):
            off = float((row - right[of]).abs().max())
            assert off < self.close, f"{one[0]}, {len(one[1])} tokens: {off:.3g} off"


def fuzz(
    folder: Path,
    adapters: Mapping[str, str],
    seed: int,
    seconds: float,
    longest: int = LONGEST,
    close: float = CLOSE,
    say: Callable[[str], None] = print,
) -> int:
    """Run random programs for some time; gives how many rows and scores were compared."""
    reference = Reference(folder, adapters)
    until, checked = time.monotonic() + seconds, 0
    while time.monotonic() < until or not checked:
        source = random.Random(seed)
        with constants(CONSTANTS, source) as chosen:
            far = min(longest, source.choice([100, 300, longest]))
            sizes = STEP_SIZES if far <= 100 else STEP_SIZES[2:]
            options = {
                "prefill_step_size": source.choice(sizes),
                "kv_cache_bytes": source.choice(BUDGETS),
            }
            engine = load(str(folder), options)
            engine._runner.model = watched = Watched(engine.model)
            if isinstance(engine.store, Store):
                worth = source.choice(WORTHS)
                chosen += f", {worth}"
                engine.store = Store(engine._runner, options["kv_cache_bytes"], worth)
            program = OnMlx(
                engine=engine,
                source=source,
                longest=far,
                names=[*adapters],
                chunk=options["prefill_step_size"],
                model=watched,
                reference=reference,
                adapters=adapters,
                close=close,
            )
            steps = 0
            try:
                while steps < 60 and (time.monotonic() < until or not steps):
                    program.run()
                    steps += 1
                program.drained()
            except BaseException:
                say(f"{folder.name}: seed {seed}, operation {steps}, {options}, {chosen}")
                raise
            checked += program.checked
            engine.genlm_clear_kv_cache()  # closing would end this thread's streams
        seed += 1
    return checked
