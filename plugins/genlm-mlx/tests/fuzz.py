"""Random programs against an engine; every row and score is compared with transformers'."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define
from transformers import AutoModelForCausalLM

from genlm.conformance import Program
from genlm.core import Query
from genlm.core.types import TokenIds
from genlm.kit.kv.sharing import SharingCosts
from genlm.mlx import store
from genlm.mlx.blocks import Blocks
from genlm.mlx.loading import load
from genlm.mlx.store import Store
from tests.programs import constants

from .watched import Watched

#: The largest difference from transformers' log-probabilities. Recurrent state accumulates
#: rounding, and the angles of thousands of positions are rounded differently; cold rows differ by
#: as much.
CLOSE_ATOL, RECURRENT_ATOL, FAR_ATOL = 2e-3, 1e-2, 1e-2

#: The longest context.
MAX_TOKENS = 3000

#: Constants of the stores, each with values that short programs reach and do not reach.
CONSTANTS = {
    "genlm.mlx.store.MAX_TOKENS_BEFORE_LAST": [0, 4, 1000],
    "genlm.mlx.store.MAX_PRODUCTS": [1 << 9, 1 << 21],
    "genlm.mlx.store.MIN_FED_TOKENS": [3, 256],
    "genlm.mlx.blocks.MIN_SHARED_TOKENS": [2, 16, 100],
    "genlm.mlx.blocks.MAX_TOKENS_BEFORE_READ": [0, 64, 1000],
    "genlm.mlx.runner.MAX_READ_TOKENS": [1, 128],
    "genlm.mlx.cache_limit.MIN_KEPT_BYTES": [0, 64 << 20],
    "genlm.mlx.blocks.MIN_STAYING_SHARE": [0.0, 0.25, 1.1],
    "genlm.mlx.blocks.MAX_PADDING_TOKENS": [0, 4096],
    "genlm.mlx.layout.MAX_PADDED_TOKENS": [1, 8],
    "genlm.mlx.runner.FIRST_READ_ROWS": [1, 64],
}
SHARING_COSTS = [
    store.SHARING_COSTS,
    SharingCosts(),
    SharingCosts(2, 2, 4, 2, 6, 1.25, 1, 2, 2, 3),
    SharingCosts(1, 1, 1, 1, 1, 1.0, 0, 1, 1, 2),
    SharingCosts(4, 3, 40, 8, 64, 2.0, 4, 4, 4, 6),
]
STEP_SIZES = [3, 16, 50, 256, 2048]
BUDGETS = [None, 0, 30_000, 1_000_000]


class Reference:
    """Rows of transformers; those of all prefixes of a context at once.

    Args:
        folder: Of the model.
        adapters: The folders of its adapters, by name.
    """

    def __init__(self, folder: Path, adapters: Mapping[str, str]) -> None:
        self.folder, self.adapters = folder, adapters
        self._models: dict[str | None, Any] = {}
        self._known: OrderedDict[tuple[str | None, TokenIds], torch.Tensor] = OrderedDict()

    def row(self, query: Query) -> torch.Tensor:
        path, tokens = query.adapter and query.adapter.path, query.token_ids
        for (other, known), rows in self._known.items():
            if other == path and known[: len(tokens)] == tokens:
                return rows[len(tokens) - 1]
        with torch.no_grad():
            logits = self._model(path)(torch.tensor([tokens]), use_cache=False).logits[0]
        self._known[path, tokens] = logits.log_softmax(-1)
        while len(self._known) > 200:
            self._known.popitem(last=False)
        return self._known[path, tokens][-1]

    def _model(self, path: str | None) -> Any:
        if path not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self.folder).eval()
            if path is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, path).eval()
            self._models[path] = model
        return self._models[path]


@define(eq=False, kw_only=True)
class OnMlx(Program):
    """Forward passes fail now and then; the store's own books are looked at."""

    model: Watched
    reference: Reference

    def ways(self) -> dict[Callable[[], None], int]:
        return {**super().ways(), self.fail: 4}

    def look(self) -> None:
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

    def expected(self, query: Query) -> torch.Tensor:
        return self.reference.row(query)


@contextmanager
def program(
    reference: Reference, longest: int, close: float, source: random.Random
) -> Iterator[Program]:
    """One on the model of a reference, with contexts of so many tokens at most."""
    far = min(longest, source.choice([100, 300, longest]))
    options = {
        "prefill_step_size": source.choice(STEP_SIZES if far <= 100 else STEP_SIZES[2:]),
        "kv_cache_bytes": source.choice(BUDGETS),
    }
    with constants(CONSTANTS, source):
        engine = load(str(reference.folder), options)
        engine._runner.model = watched = Watched(engine.model)
        kept, settings = engine.store, None
        kind: Any = type(kept)
        if any(hasattr(layer, "max_size") for layer in engine._runner.empty_cache()):
            kind = source.choice([Store, Blocks])  # both stores can hold windows
        if kind is Store:
            settings = source.choice(SHARING_COSTS)
        elif kind is Blocks:
            settings = source.choice([getattr(kept, "_ragged", True), False])
        if settings is not None:
            engine.store = kind(engine._runner, options["kv_cache_bytes"], settings)
        try:
            yield OnMlx(
                engine=engine,
                source=source,
                longest=far,
                adapters=reference.adapters,
                chunk=options["prefill_step_size"],
                atol=close,
                model=watched,
                reference=reference,
            )
        except BaseException as error:
            error.add_note(f"{reference.folder.name}, {options}, {settings}")
            raise
        engine.genlm_clear_kv_cache()  # closing would clear this thread's streams
