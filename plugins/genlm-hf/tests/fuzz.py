"""Random work for an engine, every answer compared with what a fresh copy of the model gives.

One run is one small model of a family, with its thresholds, the engine's budget, its chunks and its
constants near the lengths asked. All follows from the run's seed.
"""

from __future__ import annotations

import copy
import importlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import peft
import torch
from attrs import define, field
from transformers import CONFIG_MAPPING

from genlm.core import Adapter, Query
from genlm.core.errors import EngineError, InvalidAdapterError, UnsupportedError
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from genlm.hf.reuse import Reuse
from genlm.kit.kv.sharing import Worth
from genlm.kit.twin import TOKENS
from tests.engines import add_lora, rows_of

from .families import small_family

#: Whose state is kept in snapshots, or not at all.
RECURRENT = (
    "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid",
    "inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2",
    "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_next", "recurrent_gemma", "rwkv",
)  # fmt: skip

#: Whose state is kept in rows.
ATTENTION = (
    "bloom", "deepseek_v3", "doge", "gemma2", "gemma3_text", "gpt_neo", "gpt_oss", "llama",
    "llama4_text", "ministral3", "mistral", "phi3", "qwen3_moe",
)  # fmt: skip

#: Constants whose values decide how a context is computed, and other values for them.
CONSTANTS = (
    ("genlm.hf.snapshots", "STEP_COST", (1, 4, 16)),
    (
        "genlm.hf.strategies",
        "WORTH",
        tuple(
            Worth(waiting=waiting, sharing=sharing, trunk=trunk)
            for waiting in (2, 16)
            for sharing in (1, 16, 1024)
            for trunk in (2, 32, 512)
        ),
    ),
)

#: Where an adapter may be. Experts are adapted together only.
TARGETS = ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj")

#: How far a log-probability may be off, nats: recurrent state in float32 is off by less.
ATOL = 5e-3

LONGEST = 90


@define
class Reference:
    """What transformers and PEFT give, in a model that the engine has no part in."""

    model: Any
    _fresh: Any = field(init=False)
    _rows: dict[tuple[int, ...], torch.Tensor] = field(factory=dict, init=False)

    @_fresh.default
    def _copy(self) -> Any:
        return copy.deepcopy(self.model)

    def row(self, context: tuple[int, ...]) -> torch.Tensor:
        if context not in self._rows:
            self._rows[context] = self._compute(self.model, context)
        return self._rows[context]

    def again(self, context: tuple[int, ...]) -> torch.Tensor:
        """The same of a model that has computed nothing before: a model may remember."""
        self._rows[context] = self._compute(copy.deepcopy(self._fresh), context)
        return self._rows[context]

    @torch.no_grad()
    def is_chaotic(self, context: tuple[int, ...]) -> bool:
        """Whether rounding decides what the row is, as where two experts are chosen alike: then
        another precision gives other rows, or weights that are off by about as much."""
        noise = torch.Generator().manual_seed(0)
        for off in (0.0, *(1e-6,) * 8):
            model = copy.deepcopy(self._fresh).double()
            model.set_experts_implementation("eager")  # others know no float64
            for weight in model.parameters():
                weight.mul_(1 + off * torch.randn(weight.shape, generator=noise))
            if (self._compute(model, context) - self.row(context)).abs().max() > ATOL / 5:
                return True
        return False

    @torch.no_grad()
    def _compute(self, model: Any, context: tuple[int, ...]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([context]), use_cache=False).logits
        return logits[0, -1].double().log_softmax(-1)


def fuzz(families: Sequence[str], seed: int, seconds: float, say: Callable[[str], None]) -> None:
    """Run after run, until the time is over; at least one.

    An old version of transformers lacks some families, and computes others so that hf refuses them.
    """
    families = [family for family in families if family in CONFIG_MAPPING]
    end, number, seen = time.monotonic() + seconds, 0, Counter[str]()
    while seen["runs"] == 0 or time.monotonic() < end:
        number += 1
        with ExitStack() as patches:
            try:
                run = Fuzz(f"{seed}-{number}", families, patches)
            except EngineError as refused:
                say(f"fuzz: run {number} is refused: {refused}")
                seen["refused"] += 1
                continue
            try:
                run.run(until=end)
            except BaseException:
                say(f"fuzz: run {number} of GENLM_FUZZ_SEED={seed}: {run}")
                raise
        seen.update(runs=1, answers=run.compared, chaotic=run.chaotic)
        seen[run.reuse.value] += 1
    say(f"fuzz: {dict(seen)}")


class Fuzz:
    """One run.

    Args:
        seed: Everything follows from it.
        families: Of the models.
        patches: Take the constants back in the end.
    """

    def __init__(self, seed: str, families: Sequence[str], patches: ExitStack) -> None:
        self._source = source = random.Random(seed)
        self.family = source.choice(families)
        for module, name, values in CONSTANTS:
            changed = patch.object(importlib.import_module(module), name, source.choice(values))
            patches.enter_context(changed)
        model = small_family(self.family, source.choice((5, 9, 20, 40)))
        self._references: dict[Adapter | None, Reference] = {None: Reference(copy.deepcopy(model))}
        self._options = {
            "max_batch_tokens": source.choice((4, 16, 48, 2048)),
            "kv_cache_bytes": source.choice((None, None, 0, 1 << source.randint(12, 22))),
        }
        self._engine = HFEngine(model, None, HFOptions.parse(self._options))
        self._known: list[tuple[int, ...]] = [(3,)]
        self._versions = 0
        self.compared = self.chaotic = 0

    @property
    def reuse(self) -> Reuse:
        return self._engine.reuse

    def __str__(self) -> str:
        return f"{self.family}, {self._engine.reuse.value}, {self._options}"

    def run(self, operations: int = 40, until: float = float("inf")) -> None:
        """Raises: AssertionError: an answer is another than that of a fresh model."""
        ways = [self._steps] * 8 + [self._scores] * 3 + [self._cold, self._pin, self._clear]
        ways += [self._add_adapter, self._remove_adapter]
        for _ in range(operations):
            if time.monotonic() > until:
                break
            self._source.choice(ways)()
        self._engine.genlm_close()

    def _context(self) -> tuple[int, ...]:
        """A known context, cut, and grown by a few tokens."""
        source = self._source
        known = source.choice(self._known[-40:])
        cut = source.choice((len(known), len(known), source.randint(1, len(known))))
        n = source.choice((0, 1, 1, 1, 1, 2, 3, 20, 45))
        context = (*known[:cut], *source.choices(range(TOKENS - 4), k=n))
        longest = min(LONGEST, self._engine.max_context or LONGEST)
        self._known.append(context[:longest])
        return self._known[-1]

    def _query(self) -> Query:
        return Query(self._context(), self._source.choice([*self._references]))

    def _steps(self) -> None:
        """Queries that come and go between steps."""
        waiting: dict[Query, None] = {}
        new = [self._query() for _ in range(self._source.randint(1, 6))]
        for turn in range(1000):
            new = [one for one in dict.fromkeys(new) if one not in waiting]
            gone = [one for one in waiting if self._source.random() < 0.1]
            waiting = {one: None for one in (*waiting, *new) if one not in gone}
            if not waiting and not gone:
                return
            for answer in self._engine.genlm_step(new, gone):
                del waiting[answer.request]
                self._compare(answer.request, answer.result)
            more = turn < 5 and self._source.random() < 0.3
            new = [self._query() for _ in range(self._source.randint(1, 3))] if more else []
        raise AssertionError(f"{len(waiting)} queries are never answered")

    def _scores(self) -> None:
        queries = [self._query() for _ in range(self._source.randint(1, 3))]
        whole = [query.token_ids for query in queries]
        starts = [self._source.randint(1, max(len(ids) - 1, 1)) for ids in whole]
        queries = [
            Query(ids[:at], query.adapter)
            for ids, at, query in zip(whole, starts, queries, strict=True)
        ]
        tails = [ids[at:] or (5,) for ids, at in zip(whole, starts, strict=True)]
        given = self._engine.genlm_sequence_logprobs(queries, tails)
        for query, tail, scores in zip(queries, tails, given, strict=True):
            for at, token in enumerate(tail):
                asked = Query((*query.token_ids, *tail[:at]), query.adapter)
                self._compare(asked, scores[at : at + 1], slice(token, token + 1))

    def _cold(self) -> None:
        query = self._query()
        cold = Query(query.token_ids, query.adapter, cold=True)
        self._compare(query, rows_of(self._engine, [cold])[0])

    def _pin(self) -> None:
        with suppress(EngineError):  # there is no room for it
            self._engine.genlm_cache_prefix(self._query())

    def _clear(self) -> None:
        self._engine.genlm_clear_kv_cache()

    def _add_adapter(self) -> None:
        plain = self._references[None].model
        names = {name.rpartition(".")[2] for name, one in plain.named_modules() if is_linear(one)}
        targets = sorted(names.intersection(TARGETS))
        if not targets or len(self._references) > 2:
            return
        chosen = self._source.sample(targets, self._source.randint(1, len(targets)))
        self._versions += 1
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=chosen)
        adapted = peft.get_peft_model(copy.deepcopy(plain), config)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self._source.randrange(1 << 30))
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.2)
        with tempfile.TemporaryDirectory() as folder:
            adapted.eval().save_pretrained(folder)
            adapter = Adapter("a", folder, self._versions)
            try:
                add_lora(self._engine, adapter)
            except (InvalidAdapterError, UnsupportedError):
                return
        self._references[adapter] = Reference(adapted)

    def _remove_adapter(self) -> None:
        adapters = [one for one in self._references if one is not None]
        if adapters:
            adapter = self._source.choice(adapters)
            self._engine.genlm_remove_lora(adapter)
            del self._references[adapter]

    def _compare(self, query: Query, given: torch.Tensor, columns: slice = slice(None)) -> None:
        reference, context = self._references[query.adapter], tuple(query.token_ids)
        self.compared += 1
        if is_close(given, reference.row(context)[columns]):
            return
        expected = reference.again(context)[columns]
        if not is_close(given, expected):
            self.chaotic += 1
            assert reference.is_chaotic(context), (
                f"{self}: after {len(context)} tokens a log-probability is "
                f"{float((given - expected).abs().max()):.3g} off: {query}"
            )


def is_close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(given.double(), expected, rtol=0.0, atol=ATOL, equal_nan=True)


def is_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear
