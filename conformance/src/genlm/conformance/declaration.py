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
    """The model that a suite tests: how to load it, and what is known about it.

    An attribute may be a property, for paths that exist only when the tests run.

    Attributes:
        backend: The name of the entry point.
        model: What ``load_model_by_name`` takes.
        adapters: Paths of two or more LoRA adapters of that model, by name. With fewer, some
            clauses are skipped.
        atol: The absolute tolerance of probabilities. The largest log-probabilities may differ by
            ten times as much. :data:`~genlm.conformance.compare.ATOL` has values for other types
            than float32.
        options: Further ``llm_opts``.
        effort: Multiplies the numbers of examples; 0.1 takes about a tenth of the time.
        patience: The most seconds to wait for an event before the suite reports a hang.
        deadline: The most seconds of a whole run; the suite then reports what it has found. An
            ``effort`` above 1 multiplies it.
        longest: The longest context to ask for, in tokens; ``None`` lets the suite choose by the
            time that a row takes.
        window: The number of last tokens that a row depends on; ``None`` means all tokens.
        ignores_tokens: Whether different contexts may have the same row, as in a back-off model.
        reference: The name of another backend that takes the same model. Cold rows are compared
            with its rows.
        second_model: Whether a process can hold a second model of the backend.
        text_is_normalised: Whether the tokenizer changes text before it encodes it, for instance to
            lower case.
        seed: Chooses the examples; equal seeds give equal examples in every run.
        excused: Capabilities that are not tested, by their names in
            :data:`~genlm.conformance.advice.CAPABILITIES`, each with the reason. The report lists
            them.
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
        Override this method for a model that is made in another way."""
        wrappers = [*self.options.get("wrappers", ()), *core.pop("wrappers", ())]
        options = {**self.options, **core, "wrappers": wrappers}
        return load_model_by_name(os.fspath(self.model), self.backend, options)

    def reference_rows(
        self, contexts: Sequence[TokenIds], adapter: str | None = None
    ) -> Sequence[torch.Tensor] | None:
        """Reference rows, computed without the backend. Override this method, or set
        :attr:`reference`.

        Args:
            contexts: The contexts.
            adapter: One of the names in :attr:`adapters`; ``None`` is the base model.

        Returns:
            For each context ``[len(lm.byte_vocab)]`` log-probabilities; ``None`` if there is no
            reference.
        """
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
        """A way to make the engine fail in the middle of an evaluation, or ``None``.

        Override this method for an engine whose model is not a torch module in this process.

        Returns:
            A function of a number ``n`` that returns a context manager. Inside the context manager,
            the next ``n`` evaluations fail. ``None`` if the suite cannot make the engine fail.
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
