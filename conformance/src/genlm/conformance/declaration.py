"""Declaration: what a suite says of the model under test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from genlm.conformance.compare import ATOL
from genlm.core.lm import AsyncLM, load_model_by_name
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch


class Declaration:
    """Which model a suite tests, how it is loaded, and what is known of it.

    An attribute may be a property, for paths that are made when the tests run.

    Attributes:
        backend: The name of the entry point.
        model: What ``load_model_by_name`` takes.
        adapters: Paths of two or more LoRA adapters of that model, by name. With fewer, some
            clauses are skipped.
        atol: The tolerance of probabilities; ten times that of the top log-probabilities. For other
            types than float32 see :data:`~genlm.conformance.compare.ATOL`.
        options: Further ``llm_opts``.
        effort: Multiplies the numbers of examples; 0.1 takes about a tenth of the time.
        patience: The most seconds to wait for what must happen before the suite says that it hangs.
        deadline: The most seconds of a whole run; what was found until then is told. With an
            ``effort`` above 1, so many times more.
        longest: The longest context to ask, in tokens; ``None`` is what the engine can bear.
        window: How many tokens back the model looks; ``None`` is all of them.
        ignores_tokens: Whether the model may give contexts that differ the same row, as a back-off
            model does.
        reference: Another backend that takes the same model, to compare the cold rows with.
        second_model: Whether a second model of the backend has room in the process.
        text_is_normalised: Whether the tokenizer changes text, for instance to lower case.
        seed: Chooses the examples; the same seed gives the same ones in every run.
        excused: What the engine is not asked for, with the reason, by the names of
            :data:`~genlm.conformance.advice.CAPABILITIES`. The report says so.
    """

    backend: str
    model: str | os.PathLike[str]
    adapters: Mapping[str, str | os.PathLike[str]] = {}
    atol: float = ATOL["float32"]
    options: Mapping[str, Any] = {}
    effort: float = 1.0
    patience: float = 120.0
    deadline: float = 3600.0
    longest: int | None = None
    window: int | None = None
    ignores_tokens: bool = False
    reference: str | None = None
    second_model: bool = True
    text_is_normalised: bool = False
    seed: int = 0
    excused: Mapping[str, str] = {}

    def load(self, **core: Any) -> AsyncLM:
        """Load the model with further options of the core, such as ``wrappers`` and ``check``.
        Override it for a model that is made in another way."""
        wrappers = [*self.options.get("wrappers", ()), *core.pop("wrappers", ())]
        options = {**self.options, **core, "wrappers": wrappers}
        return load_model_by_name(os.fspath(self.model), self.backend, options)

    def reference_rows(
        self, contexts: Sequence[TokenIds], adapter: str | None = None
    ) -> Sequence[torch.Tensor] | None:
        """The rows of some contexts under the base model, or under one of :attr:`adapters`,
        computed without the backend, each as wide as ``lm.byte_vocab``; ``None`` where there are
        none. Override it, or set :attr:`reference`."""
        if self.reference is None:
            return None
        with load_model_by_name(os.fspath(self.model), self.reference) as lm:
            if adapter is not None:
                if not lm.supports("genlm_add_lora"):
                    return None
                lm.add_new_lora(os.fspath(self.adapters[adapter]), adapter)
            rows = [lm.next_token_logprobs_uncached(ids, lora_name=adapter) for ids in contexts]
            return [row.cpu() for row in rows]

    def fail_inside(self, lm: AsyncLM) -> Callable[[int], AbstractContextManager[None]] | None:
        """A way to make the engine itself fail in the middle of its work; ``None`` where there is
        none. Override it for an engine whose model is not a torch module in this process.

        Returns:
            A function of a number, which returns a context manager. Inside the context manager, so
            many of the next evaluations fail.
        """
        return failing_forward(lm.underlying_model)


def failing_forward(model: Any) -> Callable[[int], AbstractContextManager[None]] | None:
    """A way to make a torch module raise in the middle of its forward; ``None`` for anything
    else."""
    from torch import nn

    if not isinstance(model, nn.Module):
        return None
    parts: list[nn.Module] = [each for each in model.modules() if isinstance(each, nn.Linear)]
    if not parts:
        # The engine has linear layers of its own: it fails between its blocks.
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        parts = [*max(lists, key=len, default=())]
    if not parts:
        # It has no list of blocks, either: it fails after any module with weights.
        parts = [each for each in model.children() if any(True for _ in each.parameters())]
    if not parts:
        return None
    middle = parts[len(parts) // 2]

    @contextmanager
    def failing(times: int) -> Iterator[None]:
        left = threading.Semaphore(times)

        def fail(*_: object) -> None:
            if left.acquire(blocking=False):
                raise RuntimeError("planted by the conformance suite inside the model's forward")

        hook = middle.register_forward_hook(fail)
        try:
            yield
        finally:
            hook.remove()

    return failing
