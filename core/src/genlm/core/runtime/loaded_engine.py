"""The typed face of one loaded engine: every hook is called here, and its result checked and made
the core's own."""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from genlm.core.errors import (
    EngineDeadError,
    InvalidInputError,
    ModelClosedError,
    PluginError,
    UnsupportedError,
)
from genlm.core.hookspecs import hookimpl
from genlm.core.logs import get_logger
from genlm.core.plugins import (
    arguments_of,
    check_engine,
    implemented_hooks,
    plugin_manager,
    wrappers_of,
)
from genlm.core.runtime.isolation import WrapperError
from genlm.core.runtime.timeline import Timeline
from genlm.core.tokenization import Token, decode_vocab
from genlm.core.types import (
    Adapter,
    Answer,
    Engine,
    Query,
    Request,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)

if TYPE_CHECKING:
    import torch

log = get_logger()

EVALUATION_HOOKS = ("genlm_next_token_logprobs", "genlm_step")


class Innermost:
    """The wrapper nearest to the engine: knows what the engine itself did in a step, whatever other
    wrappers make of it.

    Attributes:
        entered: Whether the engine was called.
        answers: What it returned; ``None`` if it raised.
    """

    def __init__(self) -> None:
        self.entered = False
        self.answers: Sequence[Answer] | None = None

    @hookimpl(wrapper=True, trylast=True)
    def genlm_step(self) -> Generator[None, Sequence[Answer], Sequence[Answer]]:
        self.entered = True
        self.answers = yield
        return self.answers


class LoadedEngine:
    """An engine, the wrappers around it, and its vocabulary. Lives on the engine thread; the
    attributes are read anywhere.

    Args:
        engine: What ``genlm_load`` returned.
        backend: The backend's name, for messages.
        wrappers: Objects with ``@hookimpl(wrapper=True)`` methods; the last one is the outermost.
        timeline: Receives the time in the evaluation hooks, and the time that their rows take.

    Raises:
        PluginError: the engine lacks an attribute or has a misspelt hook or none that evaluates.
        VocabularyError: the tokenizer's tokens have no byte strings.
    """

    def __init__(
        self,
        engine: Engine,
        backend: str,
        wrappers: Iterable[object] = (),
        timeline: Timeline | None = None,
    ) -> None:
        self.backend = backend
        self._owner = f"engine {type(engine).__name__} of backend {backend!r}"
        self._timeline = timeline or Timeline()
        try:
            self._adopt(engine, wrappers)
        except BaseException:
            self._close_refused(engine)
            raise

    def _adopt(self, engine: Engine, wrappers: Iterable[object]) -> None:
        check_engine(engine, self._owner)
        self._manager = plugin_manager(self._owner, engine, wrappers)
        self._hooks: Any = self._manager.hook
        self._implemented = implemented_hooks(self._manager)
        if not any(self.supports(hook) for hook in EVALUATION_HOOKS):
            raise PluginError(
                f"{self._owner} has no hook that evaluates; implement one of "
                f"{', '.join(EVALUATION_HOOKS)}"
            )
        self.continuous = self.supports("genlm_step")
        taken = arguments_of(self._manager, "genlm_step")
        #: Which requests besides queries it takes in its steps.
        self.in_steps = frozenset(
            kind
            for kind in ("samples", "scores")
            if kind in taken and self._may_answer("genlm_step", kind)
        )
        #: Whether it takes back requests in its steps.
        self.drops = "dropped" in taken
        #: Whether it draws and scores itself, in its steps or by hooks of their own.
        self.draws = "samples" in self.in_steps or self._native("genlm_sample")
        self.scores = "scores" in self.in_steps or self._native("genlm_sequence_logprobs")
        # Registered last, and it wants to be the last that is called: nearest to the engine.
        self._innermost = Innermost()
        if self.continuous:
            self._manager.register(self._innermost)
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.vocab_size
        self.max_context = engine.max_context
        self.device = str(engine.device)
        self._model = engine.model
        self.closed = False
        self.byte_vocab: list[Token]
        self.str_vocab: list[str]
        self.byte_vocab, self.str_vocab = decode_vocab(engine.tokenizer)
        self.width = len(self.byte_vocab)  # of rows; kept, because users have the list itself

    def _close_refused(self, engine: object) -> None:
        """The engine has been loaded, so it must be closed. The error to report is the one that
        refused it."""
        try:
            getattr(engine, "genlm_close", lambda: None)()
        except Exception:
            log.exception("engine.close_failed", backend=self.backend)

    @cached_property
    def special_token_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return [token.token_id for token in self.byte_vocab if token.is_special]

    @property
    def model(self) -> Any:
        """Raises: ModelClosedError: the engine has been let go."""
        model = self._model
        if self.closed:
            raise ModelClosedError(
                f"the model of backend {self.backend!r} has been closed; load it again"
            )
        return model

    # --- capabilities -----------------------------------------------------------------------------

    def supports(self, hook: str) -> bool:
        """Whether the engine itself implements ``hook``; told after closing too.

        Raises:
            InvalidInputError: there is no such hook.
        """
        if hook not in self._implemented:
            meant = [name for name in self._implemented if str(hook) in name] or (
                difflib.get_close_matches(str(hook), self._implemented, n=1)
            )
            hint = (
                f"did you mean {' or '.join(map(repr, meant))}?"
                if meant
                else f"there are {', '.join(self._implemented)}"
            )
            raise InvalidInputError(f"there is no hook {hook!r}; {hint}")
        return self._implemented[hook]

    def _native(self, hook: str) -> bool:
        return self.supports(hook) and self._may_answer(hook)

    def _may_answer(self, hook: str, argument: str | None = None) -> bool:
        """Whether a hook, or one argument of it, may answer in place of rows: every wrapper around
        the rows, which may change them, is around it too."""
        around_rows = set[int]().union(
            *(wrappers_of(self._manager, hook) for hook in EVALUATION_HOOKS)
        )
        return around_rows <= wrappers_of(self._manager, hook, argument)

    def require(self, hook: str, feature: str) -> None:
        """Raises: UnsupportedError: the engine does not implement ``hook``."""
        if not self.supports(hook):
            raise UnsupportedError(
                f"backend {self.backend!r} has no {feature}: its engine does not implement {hook}, "
                "or was loaded without "
                f"{feature}; see the backend's options"
            )

    # --- evaluation -------------------------------------------------------------------------------

    def next_token_logprobs(self, queries: Sequence[Query]) -> list[torch.Tensor]:
        """One row of its own for each query, over the tokenizer's vocabulary."""
        import torch

        with self._timeline.stage("engine", queries=len(queries)):
            rows = self._hooks.genlm_next_token_logprobs(queries=queries)
        with self._timeline.stage("alignment"):
            self._check_shape(rows, (len(queries), self.vocab_size), "genlm_next_token_logprobs")
            own: Any = torch.unbind_copy(self._align(rows))  # type: ignore[func-returns-value]  # so its stub says
            return list(own)

    def step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest] = (),
        scores: Sequence[ScoreRequest] = (),
        dropped: Sequence[Request] = (),
    ) -> list[tuple[Request, Any]]:
        """Advance a continuous engine; what it finished, each result checked as above."""
        newcomers = len(queries) + len(samples) + len(scores)
        with self._timeline.stage("engine", newcomers=newcomers):
            answers: Sequence[Answer] = self._call_step(
                queries=queries, samples=samples, scores=scores, dropped=dropped
            )
        with self._timeline.stage("alignment"):
            return [(answer.request, self._own(answer)) for answer in answers]

    def _call_step(self, **arguments: Any) -> Sequence[Answer]:
        core = self._innermost
        core.entered, core.answers = False, None
        try:
            answers: Sequence[Answer] = self._hooks.genlm_step(**arguments)
        except EngineDeadError:
            raise
        except Exception as error:
            if core.entered and core.answers is None:
                raise
            answered = None if core.answers is None else [a.query for a in core.answers]
            raise WrapperError(answered) from error
        return answers

    def wake(self) -> None:
        """Make the step under way return early, if the engine can. On any thread."""
        try:
            self._hooks.genlm_wake()
        except Exception:
            log.exception("engine.wake_failed", backend=self.backend)

    def sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]] | None:
        """Native draws, or ``None`` where the engine declines."""
        with self._timeline.stage("engine", draws=len(queries)):
            drawn = self._hooks.genlm_sample(queries=queries, params=params)
        if drawn is None:
            return None
        if len(drawn) != len(queries):
            raise PluginError(
                f"{self._owner}: genlm_sample gave {len(drawn)} continuations for {len(queries)} "
                "queries"
            )
        return [self._own_draw(continuation) for continuation in drawn]

    def sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> list[torch.Tensor] | None:
        """Native scores, or ``None`` where the engine declines."""
        with self._timeline.stage("engine", scores=len(queries)):
            scores = self._hooks.genlm_sequence_logprobs(
                queries=queries, continuations=continuations
            )
        if scores is None:
            return None
        return [
            self._own_score(score, len(continuation), "genlm_sequence_logprobs")
            for score, continuation in zip(scores, continuations, strict=True)
        ]

    # --- state ------------------------------------------------------------------------------------

    def cache_prefix(self, query: Query) -> None:
        self._hooks.genlm_cache_prefix(query=query)

    def clear_kv_cache(self) -> None:
        self._hooks.genlm_clear_kv_cache()

    def add_lora(self, adapter: Adapter) -> None:
        self._hooks.genlm_add_lora(adapter=adapter)

    def remove_lora(self, adapter: Adapter) -> None:
        self._hooks.genlm_remove_lora(adapter=adapter)

    def close(self) -> None:
        """End the engine and let go of it, so that its memory is free however long this object is
        kept."""
        try:
            self._hooks.genlm_close()
        finally:
            self.closed = True
            self._model = None
            for plugin in self._manager.get_plugins():
                self._manager.unregister(plugin)

    # --- results ----------------------------------------------------------------------------------

    def _own(self, answer: Answer) -> Any:
        """The result of one request, or the exception that it met, or that says what is wrong with
        the result; the other answers are in order."""
        request, result = answer.request, answer.result
        if isinstance(result, Exception):
            return result
        try:
            if isinstance(request, Query):
                self._check_shape(result, (self.vocab_size,), "genlm_step")
                return self._align(result).clone()
            if result is None:
                return None
            if isinstance(request, SampleRequest):
                return self._own_draw(result)
            return self._own_score(result, len(request.continuation), "genlm_step")
        except Exception as error:
            return error

    def _own_draw(self, drawn: Sequence[int]) -> list[int]:
        return [int(token_id) for token_id in drawn]

    def _own_score(self, score: Any, length: int, hook: str) -> torch.Tensor:
        self._check_shape(score, (length,), hook)
        own: torch.Tensor = score.clone()
        return own

    def _check_shape(self, rows: Any, shape: tuple[int, ...], hook: str) -> None:
        import torch

        if not isinstance(rows, torch.Tensor):
            raise PluginError(
                f"{self._owner}: {hook} returned {type(rows).__name__}, not a tensor of shape "
                f"{shape}"
            )
        if tuple(rows.shape) != shape or rows.dtype != torch.float32 or rows.requires_grad:
            raise PluginError(
                f"{self._owner}: {hook} returned shape {tuple(rows.shape)}, {rows.dtype}, "
                f"requires_grad={rows.requires_grad}; expected {shape}, torch.float32, "
                "requires_grad=False"
            )

    def _align(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows, or one row, to the width of the tokenizer's vocabulary: drop padding and
        renormalise, or fill up with ``-inf``."""
        surplus = self.vocab_size - self.width
        if surplus > 0:
            rows = rows[..., :-surplus]
            return rows - rows.logsumexp(dim=-1, keepdim=True)
        if surplus < 0:
            aligned = rows.new_full((*rows.shape[:-1], self.width), -float("inf"))
            aligned[..., : self.vocab_size] = rows
            return aligned
        return rows
