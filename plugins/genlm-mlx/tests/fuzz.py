"""Random programs against an engine; every row and score is compared with transformers'."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, Query
from genlm.kit.kv.sharing import Worth
from genlm.mlx import aside, layout, pool, runner, store
from genlm.mlx.loading import load
from genlm.mlx.store import Store

from .watched import Watched

Tokens = tuple[int, ...]

#: How far log-probabilities may be from transformers'; recurrent state adds up roundings, and the
#: angles of thousands of positions are rounded otherwise (cold rows are as far off).
CLOSE, RECURRENT, FAR = 2e-3, 1e-2, 1e-2

#: The longest context, and the most positions of a step that nothing knows.
LONGEST, MOST_NEW = 3000, 6000

#: Constants of the stores, each with values on both sides of what short programs reach.
CONSTANTS: list[tuple[Any, str, list[Any]]] = [
    (store, "FEW_MORE", [0, 4, 1000]),
    (store, "MOST_PRODUCTS", [1 << 9, 1 << 21]),
    (store, "LEAST_FED", [3, 256]),
    (pool, "WORTHWHILE", [2, 16, 100]),
    (aside, "LEAST_ASIDE", [0, 64 << 20]),
    (pool, "STAYS_WHOLE", [0.0, 0.25, 1.1]),
    (pool, "TOLERATED_PADDING", [0, 4096]),
    (layout, "FEW", [1, 8]),
    (runner, "FIRST_LOGITS", [1, 64]),
]
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

    def __init__(self, folder: Path, adapters: dict[str, str]) -> None:
        self._folder, self._folders = folder, adapters
        self._models: dict[str | None, Any] = {}
        self._known: OrderedDict[tuple[str | None, Tokens], torch.Tensor] = OrderedDict()

    def rows(self, asked: Sequence[tuple[str | None, Tokens]]) -> list[torch.Tensor]:
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


@contextmanager
def constants(source: random.Random) -> Iterator[dict[str, Any]]:
    """Other constants for some time; gives them, for messages."""
    chosen = [(module, name, source.choice(values)) for module, name, values in CONSTANTS]
    before = [(module, name, getattr(module, name)) for module, name, _ in chosen]
    try:
        for module, name, value in chosen:
            setattr(module, name, value)
        yield {f"{module.__name__}.{name}": value for module, name, value in chosen}
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@define
class Program:
    """One engine, and what was asked of it.

    Attributes:
        checked: The rows and scores that were compared.
    """

    engine: Any
    model: Watched
    reference: Reference
    adapters: dict[str, str]
    source: random.Random
    close: float
    longest: int
    known: list[tuple[str | None, Tokens]] = field(factory=lambda: [(None, (5, 6, 7))])
    bound: dict[str, Adapter] = field(factory=dict)
    flying: dict[Query, tuple[str | None, Tokens]] = field(factory=dict)
    versions: int = 0
    checked: int = 0

    def run(self) -> None:
        """One random thing."""
        what = self.source.choices(
            [self.step, self.drained, self.score, self.cold, self.pin, self.clear, self.adapt,
             self.fail],
            [60, 12, 8, 4, 3, 2, 5, 4],
        )[0]  # fmt: skip
        what()
        if isinstance(self.engine.pool, Store):
            self.engine.pool.check_integrity()

    # --- what may happen --------------------------------------------------------------------------

    def step(self) -> None:
        """Newcomers, some that leave, and a step."""
        dropped = [query for query in self.flying if self.source.random() < 0.1]
        for query in dropped:
            del self.flying[query]
        new = {self.query(*one): one for one in self.batch()}
        new = {query: one for query, one in new.items() if query not in self.flying}
        if not (new or dropped or self.flying):
            return
        self.flying |= new
        answers = self.engine.genlm_step(list(new), dropped)
        asked = [self.flying.pop(answer.request) for answer in answers]
        self.compare(asked, [answer.result for answer in answers])

    def drained(self) -> None:
        """Steps until nothing is in flight: other things happen only then."""
        steps = 0
        while self.flying:
            answers = self.engine.genlm_step([], [])
            asked = [self.flying.pop(answer.request) for answer in answers]
            self.compare(asked, [answer.result for answer in answers])
            steps += 1
            assert steps < 20_000, "no end"

    def score(self) -> None:
        self.drained()
        name, context = self.source.choice(self.known)
        drawn = self.tokens(self.source.choice([1, 2, 5, 70]))
        query = self.query(name, context[: self.longest - 80])
        (scores,) = self.engine.genlm_sequence_logprobs([query], [drawn])
        whole = (*query.token_ids, *drawn)
        prefixes = [(name, whole[:stop]) for stop in range(len(query.token_ids), len(whole))]
        rows = torch.stack(self.reference.rows(prefixes))
        expected = rows.gather(1, torch.tensor(drawn)[:, None])[:, 0]
        torch.testing.assert_close(scores, expected, atol=self.close, rtol=0)
        self.checked += len(drawn)

    def cold(self) -> None:
        self.drained()
        name, context = self.source.choice(self.known)
        query = Query(context, self.bound.get(name) if name else None, cold=True)
        self.compare([(name, context)], self.engine.genlm_step([query], [])[0].result[None])

    def pin(self) -> None:
        self.drained()
        self.engine.genlm_cache_prefix(self.query(*self.source.choice(self.known)))

    def clear(self) -> None:
        self.drained()
        self.engine.genlm_clear_kv_cache()

    def adapt(self) -> None:
        """Bind a name anew, or remove it."""
        self.drained()
        if not self.adapters:
            return
        name = self.source.choice([*self.adapters])
        old = self.bound.pop(name, None)
        if old is None or self.source.random() < 0.5:
            self.versions += 1
            new = Adapter(name, self.adapters[name], self.versions)
            self.engine.genlm_add_lora(new, self.engine.genlm_read_lora(new))
            self.bound[name] = new
        if old is not None:
            self.engine.genlm_remove_lora(old)
        self.known = [one for one in self.known if one[0] is None or one[0] in self.bound]

    def fail(self) -> None:
        """A forward pass that fails: everything in flight is gone, and the engine goes on."""
        self.model.failing = True
        try:
            self.step()
        except RuntimeError as error:
            if "a forward pass failed" not in str(error):
                raise
            self.flying.clear()
        finally:
            self.model.failing = False

    # --- what is asked ----------------------------------------------------------------------------

    def batch(self) -> list[tuple[str | None, Tokens]]:
        """Contexts that go on, fork, are cut, share a prompt, or are new."""
        size = self.source.choice([1, 2, 5, 5, 12, 40])
        asked: dict[tuple[str | None, Tokens], None] = {}
        room = MOST_NEW
        for name, context in self.source.choices(self.known[-60:], k=size):
            one = name, self.grown(context)
            room -= len(one[1])
            if room > 0 or not asked:
                asked[one] = None
        if self.source.random() < 0.15:  # prefixes of one prompt, some a whole number of chunks
            name, context = self.source.choice([one for one in asked])
            step = self.engine._runner.step_size
            for count in range(1, 5):
                if 0 < (stop := count * step + self.source.choice([0, 0, 1, -1])) <= len(context):
                    asked[name, context[:stop]] = None
        names = [None, None, *self.bound]
        if self.source.random() < 0.3:
            name = self.source.choice(names)
            lengths = [1, 2, 20, 100, 513, self.longest]
            length = self.source.choices(lengths, [4, 4, 8, 4, 2, 1])[0]
            asked[name, self.tokens(min(length, self.longest))] = None
        self.known = [*self.known[-200:], *asked]
        return list(asked)

    def grown(self, context: Tokens) -> Tokens:
        cut = self.source.choice([len(context)] * 6 + [self.source.randint(1, len(context))])
        more = self.source.choice([0, 1, 1, 1, 1, 1, 2, 3, 9, 40])
        return (*context[:cut], *self.tokens(more))[: self.longest]

    def tokens(self, n: int) -> Tokens:
        return tuple(self.source.choices(range(256), k=n))

    def query(self, name: str | None, context: Tokens) -> Query:
        return Query(context, None if name is None else self.bound[name])

    def compare(self, asked: Sequence[tuple[str | None, Tokens]], rows: Sequence[Any]) -> None:
        for one, row, expected in zip(asked, rows, self.reference.rows(asked), strict=True):
            off = float((row - expected).abs().max())
            assert off < self.close, f"{one[0]}, {len(one[1])} tokens: {off:.3g} off"
        self.checked += len(asked)


def fuzz(
    folder: Path,
    adapters: dict[str, str],
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
        with constants(source) as chosen:
            far = min(longest, source.choice([100, 300, longest]))
            sizes = STEP_SIZES if far <= 100 else STEP_SIZES[2:]
            options = {
                "prefill_step_size": source.choice(sizes),
                "kv_cache_bytes": source.choice(BUDGETS),
            }
            engine = load(str(folder), options)
            engine._runner.model = watched = Watched(engine.model)
            if isinstance(engine.pool, Store):
                chosen["worth"] = worth = source.choice(WORTHS)
                engine.pool = Store(engine._runner, options["kv_cache_bytes"], worth)
            program = Program(engine, watched, reference, adapters, source, close, far)
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
