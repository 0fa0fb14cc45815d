"""The suite on faulty engines."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from genlm.conformance import ConformanceSuite
from genlm.conformance.report import Verdict, run
from genlm.conformance.subject import Subject
from genlm.core import AsyncLM
from genlm.core.mock import ByteTokenizer, MockEngine, hashed_row
from genlm.core.options import refuse_unknown
from genlm.core.types import Adapter, TokenIds
from tools.tiny import write_adapter, write_tokenizer

from .mutants.registry import Mutant, Trouble

#: How long the suite waits before it says that something hangs, seconds. On a busy machine slow
#: calls must not seem to hang.
PATIENCE_SECONDS = 20.0


def verdict_on(suite: ConformanceSuite, clause: str) -> Verdict:
    """The outcome of one clause of a suite."""
    (verdict,) = run(suite, only=lambda name: name == clause).verdicts
    return verdict


class Faulty(ConformanceSuite):
    """The suite on an engine that is to fail.

    Attributes:
        shrinking: For how many seconds a counterexample is made simple.
    """

    patience = PATIENCE_SECONDS
    shrinking = 0.0

    def subject(self) -> Subject:
        subject = super().subject()
        subject.shrinking = self.shrinking
        return subject


class OfTheMock(Faulty):
    """The suite on a faulty mock."""

    backend = "mock"
    model = "mock"
    adapters = {"a": "first-adapter", "b": "second-adapter"}  # noqa: RUF012

    def __init__(
        self, engine: Callable[..., MockEngine], effort: float, max_context: int = 1024
    ) -> None:
        self.engine = engine
        self.effort = effort
        self.max_context = max_context
        self.trouble = Trouble()

    def load(self, **core: Any) -> AsyncLM:
        refuse_unknown("mock", self.options, ())
        how = {"max_context": self.max_context, "fail_on": self.trouble}
        return AsyncLM(lambda: self.engine(ByteTokenizer(), **how), backend="mock", **core)

    def fail_inside(self, lm: AsyncLM) -> Any:
        return self.trouble.during

    def reference_rows(
        self, contexts: Sequence[TokenIds], adapter: str | None = None
    ) -> Sequence[torch.Tensor]:
        bound = None if adapter is None else Adapter(adapter, self.adapters[adapter], version=1)
        return [hashed_row(ids, bound, len(ByteTokenizer())) for ids in contexts]


def of_a_mutant(mutant: Mutant, effort: float) -> OfTheMock:
    """The suite on a mutant of the registry."""
    suite = OfTheMock(mutant.engine, effort, mutant.max_context)
    suite.patience = 2.0 if mutant.hangs else PATIENCE_SECONDS
    return suite


class OfABlindEngine(Faulty):
    """The suite on an engine that was written without sight of it."""

    backend = "mock"
    model = "mock"

    def __init__(self, engine: Callable[[], Any], effort: float) -> None:
        self.engine = engine
        self.effort = effort
        self.window = getattr(engine, "window", None)
        self.adapters = two_files()

    def load(self, **core: Any) -> AsyncLM:
        refuse_unknown("mock", self.options, ())
        return AsyncLM(self.engine, backend="mock", **core)


@functools.cache
def two_files() -> dict[str, str]:
    """Adapters of engines that make anything of a file."""
    folder = Path(tempfile.mkdtemp())
    for name in "ab":
        (folder / name).write_text(name)
    return {name: str(folder / name) for name in "ab"}


class OfARealModel(Faulty):
    """The suite on a faulty tiny model behind genlm-hf."""

    backend = "hf"
    longest = 640  # A slow machine must look at all lengths, too.

    def __init__(self, engine: Any, effort: float) -> None:
        self.engine = engine
        self.effort = effort
        self.model, self.adapters = tiny()

    def load(self, **core: Any) -> AsyncLM:
        def load() -> Any:
            from genlm.hf.loading import load_pretrained
            from genlm.hf.options import HFOptions

            options = HFOptions.parse(self.options)
            return self.engine(*load_pretrained(str(self.model), options), options)

        return AsyncLM(load, backend="hf", **core)

    def reference_rows(
        self, contexts: Sequence[TokenIds], adapter: str | None = None
    ) -> Sequence[torch.Tensor]:
        from tests.adapter_outcomes import reference_rows

        return reference_rows(str(self.model), adapter and self.adapters[adapter], contexts)


@functools.cache
def tiny() -> tuple[str, dict[str, str]]:
    """The folder of a tiny random Llama with a byte tokenizer, and those of two adapters of it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = Path(tempfile.mkdtemp())
    model = folder / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=write_tokenizer(model, "<end>"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=640,
        initializer_range=0.15,  # Rows must be far from uniform, or a mix-up does not show.
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    adapters = {
        name: write_adapter(str(model), folder / name, seed=rank, rank=rank)
        for name, rank in (("a", 4), ("b", 8))
    }
    return str(model), adapters
