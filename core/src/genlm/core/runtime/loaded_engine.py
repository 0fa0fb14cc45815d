"""One loaded engine: its attributes, its abilities, and the calls that do not give rows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from genlm.core.checks import integer, safe_repr
from genlm.core.errors import InvalidOptionError, ModelClosedError, PluginError, UnsupportedError
from genlm.core.hook_calls import HookCalls
from genlm.core.logs import get_logger
from genlm.core.options import CoreOptions
from genlm.core.runtime.results import CHECKED_RESULTS, Results
from genlm.core.tokenization import decode_vocab
from genlm.core.tokenization.turns import take_turns
from genlm.core.types import Engine

log = get_logger()

#: The attributes that every engine has.
ATTRIBUTES = [name for name, value in vars(Engine).items() if isinstance(value, property)]


class LoadedEngine:
    """An engine, the wrappers around it, and its vocabulary. Lives on the engine thread; the
    attributes are read anywhere.

    Args:
        engine: What ``genlm_load`` returned.
        backend: The backend's name, for messages.
        wrappers: Objects that change rows, in this order, or observe calls.
        options: The core's.

    Raises:
        PluginError: the engine lacks an attribute, has a misspelt hook, or no hook that evaluates.
        VocabularyError: the tokenizer's tokens have no byte strings.
    """

    def __init__(
        self, engine: Engine, backend: str, wrappers: Iterable[object], options: CoreOptions
    ) -> None:
        if isinstance(engine, type):
            raise PluginError(
                f"genlm_load of backend {backend!r} returned the class {engine.__name__}; return "
                "an instance of it"
            )
        self.backend = backend
        self._owner = f"engine {type(engine).__name__} of backend {backend!r}"
        try:
            self._adopt(engine, wrappers, options)
        except BaseException:  # the engine has been loaded, so it must be closed
            if hasattr(self, "calls"):
                self.calls.forget()
            try:
                getattr(engine, "genlm_close", lambda: None)()
            except Exception:
                log.exception("engine.close_failed", backend=backend)
            raise

    def _adopt(self, engine: Engine, wrappers: Iterable[object], options: CoreOptions) -> None:
        if missing := [name for name in ATTRIBUTES if not hasattr(engine, name)]:
            raise PluginError(
                f"{self._owner} lacks {', '.join(missing)}; see genlm.core.types.Engine"
            )
        #: The hooks of the engine and its wrappers, with the checks of their results.
        self.calls = HookCalls(self._owner, engine, wrappers, options.violated)
        self.supports = self.calls.supports
        self.continuous = self.supports("genlm_step")
        evaluates = "genlm_step" if self.continuous else "genlm_next_token_logprobs"
        if not self.supports(evaluates):
            raise PluginError(
                f"{self._owner} has no hook that evaluates queries; implement "
                "genlm_next_token_logprobs(queries) or genlm_step(queries)"
            )
        if not self.supports(evaluates, "queries"):
            raise PluginError(
                f"{self._owner}: {evaluates} takes no argument queries; name it, without a "
                "default, after self"
            )
        try:
            self.vocab_size = integer("vocab_size", engine.vocab_size, least=1)
            self.max_context = integer("max_context", engine.max_context, least=1, optional=True)
            ends = getattr(engine, "eos_token_ids", None)
            named = [*map(operator.index, ends or ())]
        except InvalidOptionError as error:
            raise PluginError(f"{self._owner}: {error}") from None
        except TypeError:
            raise PluginError(
                f"{self._owner}: eos_token_ids must be a list of token ids; got {safe_repr(ends)}"
            ) from None
        self.tokenizer = engine.tokenizer
        self.byte_vocab, self.str_vocab = decode_vocab(engine.tokenizer)
        take_turns(engine.tokenizer)
        # The width of rows; stored, because users may change the list.
        self.width = len(self.byte_vocab)
        processors = self.calls.processors
        #: The hooks by which the engine answers ``samples`` and ``scores`` itself. Empty with
        #: wrappers that change rows: the engine would not use the changed rows.
        self.native: dict[str, str] = {}
        # Without `width`, padding would have mass in scores.
        over = "width" if self.vocab_size > self.width else None
        hooks = {"samples": ("genlm_sample", None), "scores": ("genlm_sequence_logprobs", over)}
        for kind, (hook, needed) in hooks.items():
            in_steps = self.supports("genlm_step", kind) and (
                needed is None or self.supports("genlm_step", needed)
            )
            if not processors and (in_steps or self.supports(hook, needed)):
                self.native[kind] = "genlm_step" if in_steps else hook
        #: Whether the engine applies the callers' functions (``then``) where its rows are.
        self.reduces = (
            not processors
            and self.supports("genlm_step", "reductions")
            and (over is None or self.supports("genlm_step", over))
        )
        self.device = str(engine.device)
        self._model = engine.model
        self.lacking: Mapping[str, str] = getattr(engine, "lacking", {})
        self.closed = False
        self.eos_token_ids = [token_id for token_id in named if 0 <= token_id < self.width]
        first = 0 if options.check is False else CHECKED_RESULTS
        self.results = Results(
            self._owner, self.vocab_size, self.width, processors, options.violated, first
        )

    @cached_property
    def special_token_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return [token.token_id for token in self.byte_vocab if token.is_special]

    @property
    def model(self) -> Any:
        """Raises: ModelClosedError: the engine has been released."""
        model = self._model  # read first, because another thread may close the model
        if self.closed:
            raise ModelClosedError(
                f"the model of backend {self.backend!r} has been closed; load it again"
            )
        return model

    def require(self, hook: str, feature: str) -> None:
        """Raises: UnsupportedError: the engine does not implement ``hook``."""
        if not self.supports(hook):
            unknown = (
                f"its engine does not implement {hook}, or was loaded without {feature}; see the "
                "backend's options"
            )
            why = self.lacking.get(hook, unknown)
            raise UnsupportedError(f"backend {self.backend!r} has no {feature}: {why}")

    def change(self, hook: str, **arguments: Any) -> None:
        """Call a hook that changes the engine's state and must return ``True``. Its first argument
        is the adapter or query that the change is about."""
        result = self.calls.call(hook, **arguments)
        if self.supports(hook) and result is not True:
            subject = next(iter(arguments.values()))
            self.results.violation(hook, subject, f"{result!r}; expected True")

    def close(self) -> None:
        """End the engine and release it, so that its memory is free even while this object is
        kept."""
        try:
            self.calls.call("genlm_close")
        finally:
            self.closed = True
            self._model = None
            self.calls.forget()
