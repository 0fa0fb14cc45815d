"""Random work for an engine, every answer compared with what a fresh copy of the model gives.

One run is one small model of a family, with its thresholds, the engine's budget, its chunks and its
constants near the lengths asked. All follows from the run's seed.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import peft
import torch
from attrs import define, field
from transformers import CONFIG_MAPPING

from genlm.core.errors import EngineError, InvalidAdapterError, UnsupportedError
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from genlm.kit.kv.sharing import Worth
from genlm.kit.twin import TOKENS
from tests.programs import Asked, Program, Tokens, constants

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
CONSTANTS = {
    "genlm.hf.snapshots.STEP_COST": (1, 4, 16),
    "genlm.hf.strategies.WORTH": tuple(
        Worth(waiting=waiting, sharing=sharing, trunk=trunk)
        for waiting in (2, 16)
        for sharing in (1, 16, 1024)
        for trunk in (2, 32, 512)
    ),
}

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
    _rows: dict[Tokens, torch.Tensor] = field(factory=dict, init=False)

    @_fresh.default
    def _copy(self) -> Any:
        return copy.deepcopy(self.model)

    def row(self, context: Tokens) -> torch.Tensor:
        if context not in self._rows:
            self._rows[context] = self._compute(self.model, context)
        return self._rows[context]

    def again(self, context: Tokens) -> torch.Tensor:
        """The same of a model that has computed nothing before: a model may remember."""
        self._rows[context] = self._compute(copy.deepcopy(self._fresh), context)
        return self._rows[context]

    @torch.no_grad()
    def is_chaotic(self, context: Tokens) -> bool:
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
    def _compute(self, model: Any, context: Tokens) -> torch.Tensor:
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
        source = random.Random(f"{seed}-{number}")
        with constants(CONSTANTS, source) as chosen, tempfile.TemporaryDirectory() as folder:
            family = source.choice(families)
            options = {
                "max_batch_tokens": source.choice((4, 16, 48, 2048)),
                "kv_cache_bytes": source.choice((None, None, 0, 1 << source.randint(12, 22))),
            }
            what = f"run {number} of GENLM_FUZZ_SEED={seed}: {family}, {options}, {chosen}"
            try:
                program = program_of(family, options, source, Path(folder))
            except EngineError as refused:
                say(f"fuzz: {what}: is refused: {refused}")
                seen["refused"] += 1
                continue
            try:
                for _ in range(100):
                    if time.monotonic() > end:
                        break
                    program.run()
                program.drained()
            except BaseException:
                say(f"fuzz: {what}, {program.engine.reuse.value}")
                raise
            program.engine.genlm_close()
        seen.update(runs=1, answers=program.checked, chaotic=program.chaotic)
        seen[program.engine.reuse.value] += 1
    say(f"fuzz: {dict(seen)}")


def program_of(family: str, options: dict[str, Any], source: random.Random, folder: Path) -> OnHF:
    """A program on a small model of a family."""
    model = small_family(family, source.choice((5, 9, 20, 40)))
    plain = Reference(copy.deepcopy(model))
    engine = HFEngine(model, None, HFOptions.parse(options))
    return OnHF(
        engine=engine,
        source=source,
        longest=min(LONGEST, engine.max_context or LONGEST),
        tokens=TOKENS - 4,
        names="ab",
        refused=(InvalidAdapterError, UnsupportedError),
        folder=folder,
        references={None: plain},
    )


@define(eq=False, kw_only=True)
class OnHF(Program):
    """References, by the path of their adapter, are models that the engine has no part in."""

    folder: Path
    references: dict[str | None, Reference]
    chaotic: int = field(default=0, init=False)

    def pin(self) -> None:
        with suppress(EngineError):  # there is no room for it
            super().pin()

    def folder_of(self, name: str) -> str | None:
        plain = self.references[None].model
        names = {name.rpartition(".")[2] for name, one in plain.named_modules() if is_linear(one)}
        targets = sorted(names.intersection(TARGETS))
        if not targets:
            return None
        chosen = self.source.sample(targets, self.source.randint(1, len(targets)))
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=chosen)
        adapted = peft.get_peft_model(copy.deepcopy(plain), config)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.source.randrange(1 << 30))
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.2)
        folder = str(self.folder / str(len(self.references)))
        adapted.eval().save_pretrained(folder)
        self.references[folder] = Reference(adapted)
        return folder

    def compare(
        self, asked: Sequence[Asked], given: Sequence[torch.Tensor], columns: Sequence[slice]
    ) -> None:
        for (name, context), row, of in zip(asked, given, columns, strict=True):
            reference = self.references[None if name is None else self.bound[name].path]
            if is_close(row, reference.row(context)[of]):
                continue
            expected = reference.again(context)[of]
            if not is_close(row, expected):
                self.chaotic += 1
                off = float((row - expected).abs().max())
                assert reference.is_chaotic(context), (
                    f"after {len(context)} tokens, with {name}: {off:.3g} off: {context}"
                )


def is_close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(given.double(), expected, rtol=0.0, atol=ATOL, equal_nan=True)


def is_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear
