"""The reference backend: no engine, no files; rows are a pure function of the tokens and the
adapter.

It implements every hook, and can be told to be slow, to fail on chosen queries or to die, so that
what the core promises can be tested without an engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import define, field

from genlm.core.checks import describe_error, safe_repr
from genlm.core.drawer import Draw, TokenDrawer
from genlm.core.errors import EngineDeadError, InvalidOptionError, ModelNotFoundError
from genlm.core.hookspecs import hookimpl
from genlm.core.lm import AsyncLM
from genlm.core.options import CoreOptions, refuse_unknown
from genlm.core.together import results_of
from genlm.core.types import (
    Adapter,
    Answer,
    BackendInfo,
    Engine,
    Query,
    ReductionRequest,
    Request,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    query_of,
)

if TYPE_CHECKING:
    import torch

#: The name in ``load_model_by_name("mock", backend="mock")`` that selects the built-in tokenizer.
#: Any other name is that of a Hugging Face tokenizer.
BUILT_IN = "mock"


class ByteTokenizer:
    """One token for each byte, a beginning-of-sequence token and an end-of-sequence token."""

    bos_token_id = 256
    eos_token_id = 257

    def __len__(self) -> int:
        return 258

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        vocab = self.token_bytes()[: self.bos_token_id if skip_special_tokens else None]
        return b"".join(vocab[i] for i in token_ids if i < len(vocab)).decode(errors="replace")

    def token_bytes(self) -> Sequence[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b"<|bos|>", b"<|eos|>"]


#: The most tokens that are drawn in one call, which cannot be interrupted. The core draws longer
#: samples row by row, so that other requests come between and a caller may cancel.
MAX_DRAW_TOKENS = 200


@define(eq=False, repr=False, slots=False)
class MockEngine:
    """An engine whose rows come from a hash.

    Args:
        tokenizer: See :class:`~genlm.core.types.Engine`.
        row: Computes the row of a context under the base model; ``None`` hashes it.
        delay: Seconds that every evaluation takes.
        fail_on: A query for which it returns true fails, and with it the whole batch, as in a real
            engine.
        die_on: A query for which it returns true kills the engine.
        on_batch: Called with the queries of every evaluation, on the engine thread; it may block or
            raise.
        on_adapter: Called with every adapter that is added, on the engine thread; it may block or
            raise.
        max_context: The longest context, in tokens.
    """

    tokenizer: Any
    _row: Callable[[Sequence[int]], Any] | None = field(default=None, kw_only=True)
    _delay: float = field(default=0.0, kw_only=True)
    _fail_on: Callable[[Query], bool] | None = field(default=None, kw_only=True)
    _die_on: Callable[[Query], bool] | None = field(default=None, kw_only=True)
    _on_batch: Callable[[Sequence[Query]], None] | None = field(default=None, kw_only=True)
    _on_adapter: Callable[[Adapter], None] | None = field(default=None, kw_only=True)
    max_context: int | None = field(default=None, kw_only=True)
    adapters: dict[int, Adapter] = field(init=False, factory=dict)  # by version
    pinned: set[Query] = field(init=False, factory=set)  # engines made from this one read it
    vocab_size: int = field(init=False)
    device, model = "cpu", None

    @vocab_size.default
    def _all_of_the_tokenizer(self) -> int:
        if hasattr(self.tokenizer, "get_vocab"):  # ids may have gaps
            return max(self.tokenizer.get_vocab().values(), default=-1) + 1
        sized = hasattr(self.tokenizer, "__len__")
        return len(self.tokenizer if sized else self.tokenizer.token_bytes())

    # --- evaluation -------------------------------------------------------------------------------

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        import torch

        self._evaluate(queries)
        return torch.stack([self.row(query) for query in queries])

    @hookimpl
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]] | None:
        if max(how.max_tokens for how in params) > MAX_DRAW_TOKENS:
            return None
        self._evaluate(queries)
        return self._draws(queries, params)

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        self._evaluate(queries)
        return [self._score(query, ids) for query, ids in zip(queries, continuations, strict=True)]

    def row(self, query: Query) -> torch.Tensor:
        """The answer to one query, ``[vocab_size]`` float32."""
        import torch

        if query.adapter is None and self._row is not None:
            given = torch.as_tensor(self._row(list(query.token_ids)))
            # A copy: the model may write the next row where it wrote this one.
            row = given.detach().to(torch.float32, copy=True)
            if row.ndim != 1 or not 0 < row.shape[0] <= self.vocab_size:
                raise ValueError(
                    f"_get_logprobs gave a row of shape {tuple(row.shape)}; the tokenizer has "
                    f"{self.vocab_size} tokens: give at most as many values"
                )
            # A narrower row is that of a model that lacks the last tokens, as an engine's row may
            # be.
            lacking = self.vocab_size - row.shape[0]
            return torch.nn.functional.pad(row, (0, lacking), value=-torch.inf) if lacking else row
        return hashed_row(query.token_ids, query.adapter, self.vocab_size)

    def _draws(self, queries: Sequence[Query], params: Sequence[SamplingParams]) -> list[list[int]]:
        """The drawn ids of each query. All queries get their next token at the same time."""
        drawers = [TokenDrawer(how) for how in params]
        drawn: list[list[int]] = [[] for _ in queries]
        going = [at for at, how in enumerate(params) if how.max_tokens]
        while going:
            rows = [self.row(queries[at].extended(tuple(drawn[at]))) for at in going]
            token_ids = Draw([drawers[at] for at in going], rows)([])
            found, going = zip(going, token_ids, strict=True), []
            for at, token_id in found:
                if token_id not in params[at].stop_token_ids:
                    drawn[at].append(token_id)
                    if len(drawn[at]) < params[at].max_tokens:
                        going.append(at)
        return drawn

    def _score(self, query: Query, continuation: Sequence[int]) -> torch.Tensor:
        import torch

        contexts = [query.extended(tuple(continuation[:i])) for i in range(len(continuation))]
        return torch.stack(
            [self.row(context)[t] for context, t in zip(contexts, continuation, strict=True)]
        )

    def _obey(self, queries: Sequence[Query]) -> None:
        if self._on_batch:
            self._on_batch(queries)
        for query in queries:
            if self._die_on and self._die_on(query):
                raise EngineDeadError(f"the mock was told to die on {query.token_ids}")
            if self._fail_on and self._fail_on(query):
                raise RuntimeError(f"the mock was told to fail on {query.token_ids}")
            if query.adapter is not None and query.adapter.version not in self.adapters:
                raise RuntimeError(f"the mock has no adapter {query.adapter}")

    def _evaluate(self, queries: Sequence[Query]) -> None:
        self._obey(queries)
        if self._delay:
            time.sleep(self._delay)

    # --- state ------------------------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        self.pinned.add(query)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self.pinned.clear()

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        if self._on_adapter:
            self._on_adapter(adapter)
        self.adapters[adapter.version] = adapter
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        del self.adapters[adapter.version]
        self.pinned = {query for query in self.pinned if query.adapter != adapter}
        return True

    @hookimpl
    def genlm_close(self) -> None:
        self.adapters.clear()


class ContinuousMockEngine(MockEngine):
    """The same results from an engine that takes every kind of request in its steps.

    A row or a score takes ``steps`` steps, and a sample ``max_tokens`` steps. A step takes
    ``delay`` seconds. If it is woken, it returns early, and the next step continues it.
    """

    def __init__(self, tokenizer: Any, *, steps: int = 2, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._steps = steps
        self._in_flight: dict[Request, int] = {}  # for each request, how many steps it still takes
        self._alarm = threading.Lock()  # released once the engine has been woken
        self._alarm.acquire()
        self._due: float | None = None  # when the current step ends

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
    ) -> list[Answer]:
        return self.advance([*queries, *samples, *scores], dropped)

    @hookimpl
    def genlm_wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is already released
            self._alarm.release()

    def advance(
        self, new_requests: Sequence[Request], dropped: Sequence[Request] = ()
    ) -> list[Answer]:
        """Make one step. A subclass whose ``genlm_step`` takes fewer arguments calls this
        method."""
        for request in dropped:
            del self._in_flight[request]
        self._in_flight.update({request: self._steps_of(request) for request in new_requests})
        if not (self._in_flight and self._time_passes()):
            return []
        try:
            self._obey([query_of(request) for request in self._in_flight])
            self._in_flight = {request: left - 1 for request, left in self._in_flight.items()}
            finished = [request for request, left in self._in_flight.items() if left <= 0]
            for request in finished:
                del self._in_flight[request]
            return self._answers(finished)
        except Exception:
            self._in_flight.clear()
            raise

    def _steps_of(self, request: Request) -> int:
        return request.params.max_tokens if isinstance(request, SampleRequest) else self._steps

    def _answers(self, finished: Sequence[Request]) -> list[Answer]:
        draws = [request for request in finished if isinstance(request, SampleRequest)]
        drawn = self._draws([draw.query for draw in draws], [draw.params for draw in draws])
        reductions = [request for request in finished if isinstance(request, ReductionRequest)]
        rows = [self.row(request.query) for request in reductions]
        reduced = results_of([request.then for request in reductions], rows)
        others = [request for request in finished if isinstance(request, Query | ScoreRequest)]
        return [
            *map(Answer, draws, drawn),
            *map(Answer, reductions, reduced),
            *map(Answer, others, map(self._result, others)),
        ]

    def _result(self, request: Query | ScoreRequest) -> torch.Tensor:
        if isinstance(request, ScoreRequest):
            return self._score(request.query, request.continuation)
        return self.row(request)

    def _time_passes(self) -> bool:
        """Wait for the end of the step. ``False`` if the engine was woken before that."""
        if self._delay:
            now = time.monotonic()
            self._due = now + self._delay if self._due is None else self._due
            if self._alarm.acquire(timeout=max(self._due - now, 0.0)):
                return False
            self._due = None
        return True


class MockAsyncLM(AsyncLM):
    """A model without an engine, for tests. To give it a distribution of your own, override
    :meth:`_get_logprobs`.

    Args:
        tokenizer: A Hugging Face tokenizer, or an object with the methods of
            :class:`~genlm.core.types.Tokenizer`.
        options: Options of :class:`MockEngine` and of the core. ``continuous=True`` makes a
            :class:`ContinuousMockEngine`, and allows its options. If :meth:`_get_logprobs` is
            overridden, the default of ``cache_size`` is 0.
    """

    def __init__(self, tokenizer: Any = None, **options: Any) -> None:
        self._rng = np.random.RandomState(42)
        # A weak reference, because the engine must not keep the model from being collected.
        ours = weakref.WeakMethod(self._get_logprobs)

        def row(token_ids: Sequence[int]) -> Any:
            get_logprobs = ours()
            if get_logprobs is None:
                raise EngineDeadError("the model has been collected")
            return get_logprobs(token_ids)

        overridden = type(self)._get_logprobs is not MockAsyncLM._get_logprobs
        if overridden and "cache_opts" not in options:
            options.setdefault("cache_size", 0)  # a user's own method may change its answers
        core, own = CoreOptions.split(options)
        super().__init__(lambda: _engine(tokenizer, own, row=row), backend="mock", **core)

    @classmethod
    def from_name(cls, model_name: str = BUILT_IN, **options: Any) -> Self:
        """The mock over the tokenizer of a Hugging Face model, or over bytes for ``"mock"``."""
        return cls(_tokenizer(model_name), **options)

    def _get_logprobs(self, token_ids: Sequence[int]) -> Any:
        """The row of a context under the base model: a tensor or array of normalised
        log-probabilities, ``[vocab_size]``, with -inf for tokens that it does not have; a shorter
        one lacks the last tokens. Whether it is normalised is checked where a row is asked, and
        not where the mock draws or scores.

        Called on the engine thread. ``self._rng`` is a NumPy ``RandomState`` for the use of
        overriding methods.
        """
        return hashed_row(tuple(token_ids), None, self._engine.vocab_size)


def hashed_row(token_ids: Sequence[int], adapter: Adapter | None, vocab_size: int) -> torch.Tensor:
    """A row ``[vocab_size]`` in float32 that depends on every token, on their order and on the
    adapter's path.

    Source: BLAKE2b (RFC 7693) of all of it seeds the generator, so no two contexts share a row but
        by breaking the hash.
    """
    import torch

    digest = hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=32)
    digest.update(b"base" if adapter is None else b"adapter:" + adapter.path.encode())
    random = np.random.Generator(np.random.PCG64(int.from_bytes(digest.digest(), "little")))
    logits = 2.0 * random.standard_normal(vocab_size, dtype=np.float32)
    return torch.log_softmax(torch.from_numpy(logits), dim=-1)


@hookimpl
def genlm_backend_info() -> BackendInfo:
    return BackendInfo("rows from a hash, for tests and first steps", engine="genlm-core")


@hookimpl
def genlm_load(model: str, options: Mapping[str, object]) -> Engine:
    return _engine(_tokenizer(model), dict(options))


ENGINE_OPTIONS = (
    "delay",
    "fail_on",
    "die_on",
    "on_batch",
    "on_adapter",
    "max_context",
    "continuous",
    "steps",
)


def _engine(
    tokenizer: Any, options: dict[str, Any], row: Callable[[Sequence[int]], Any] | None = None
) -> MockEngine:
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    if isinstance(tokenizer, type | str):
        raise InvalidOptionError(
            "MockAsyncLM(tokenizer) takes a tokenizer's object, MockAsyncLM.from_name(name) the "
            f"name of a Hugging Face model; got {safe_repr(tokenizer)}"
        )
    own = ENGINE_OPTIONS if options.get("continuous") else ENGINE_OPTIONS[:-1]
    refuse_unknown("mock", options, own, {"steps": "continuous=True has it"})
    continuous = options.pop("continuous", False)
    return (ContinuousMockEngine if continuous else MockEngine)(tokenizer, row=row, **options)


def _tokenizer(model: str) -> Any:
    if model == BUILT_IN:
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)
    except (ImportError, OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"backend 'mock' takes the name 'mock', or the folder of a tokenizer that transformers "
            f"can load; got {safe_repr(model)} ({describe_error(error):.300})"
        ) from error
