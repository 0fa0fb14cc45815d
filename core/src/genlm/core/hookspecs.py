"""The contract between the core and an inference engine.

A backend is two things: a *plugin module*, which an entry point of group ``genlm.backends`` names,
and the *engine object* that its ``genlm_load`` returns. Both carry hook implementations, marked
with :data:`hookimpl`::

    # pyproject.toml                         # genlm_mine/plugin.py
    [project.entry-points."genlm.backends"]  from genlm.core import BackendInfo, hookimpl
    mine = "genlm_mine.plugin"
                                             @hookimpl
                                             def genlm_backend_info(): ...

                                             @hookimpl
                                             def genlm_load(model, options): ...

**The hooks that an engine implements declare what it can do.** There are no flags. Leave out what
the engine cannot do.

*Arguments.* An implementation may take any subset of a hook's arguments, by name; a new argument
breaks no plugin.

*Threads.* Every model has one engine thread. ``genlm_load`` and all engine hooks run on it, one at
a time, so an engine needs no locks, may keep thread-bound state, and may block. Only
``genlm_backend_info``, ``genlm_wake`` and ``genlm_read_lora`` are called on any thread.

*Requests.* There are four kinds: a query asks for one row, a
:class:`~genlm.core.types.SampleRequest` for one drawn continuation, a
:class:`~genlm.core.types.ScoreRequest` for the log-probabilities of one continuation, a
:class:`~genlm.core.types.ReductionRequest` for the result of a function of one row.

*Order and fairness.* **No request waits for ever**, even if others never stop coming. Compatible
requests are admitted in the order asked, up to ``batch_size`` of them. Incompatible requests take
turns: as soon as one waits, no further requests are admitted, and its turn comes when nothing is in
flight. With ``genlm_step``, all kinds of requests that the step takes are compatible, except that a
cold query runs alone. Without ``genlm_step``, each call has requests of one kind. Calls that are
not requests (adapters, pinned prefixes) wait for everything asked before them, and everything asked
after them waits for them.

*Trust.* Queries have been checked (see :class:`~genlm.core.types.Query`): an engine validates
nothing.

*Tensors.* What an engine returns belongs to the core, which may keep it or write into it. Rows may
lie on any device, carry no autograd graph, and are log-probabilities, float32, each row normalised
over its whole width within 1e-4.

*Errors.* An exception from an evaluation hook is not fatal: the core asks again in smaller batches
until only the query that causes it fails, so an engine must still work after it has raised. (The
conformance suite reports requests that fail together but succeed alone as a fault, unless memory
ran out.) The traceback keeps its lines, but the core clears the local variables of the engine's
frames, because these may hold large tensors; with the option ``check=True`` it leaves them. An
engine that cannot continue raises :class:`~genlm.core.errors.EngineDeadError`: everything pending
fails and the model rejects further work.

*Adapters.* :class:`~genlm.core.types.Adapter` values are never reused: binding a name again gives a
new ``version``. Use ``adapter.version`` as the key of weights and state, so that no adapter can be
mistaken for another.

*Marks.* pluggy calls the hooks, and the options of its markers have the meaning that its
documentation gives. A hook with ``firstresult`` has one implementation, the engine's.
``wrapper=True`` is rejected, because no code may run around a call of the engine.

*Wrappers.* A wrapper is an object with hooks of its own beside the engine's. The option
``wrappers`` gives wrappers to one model, and an entry point of group ``genlm.wrappers`` gives one
to every model. A wrapper **changes rows** by :func:`genlm_process_logprobs`, and **observes** calls
by :func:`genlm_call_begins` and :func:`genlm_call_ended`. It has no other hooks, so it cannot lose,
change or invent an answer while it observes. ``SystemExit`` or ``KeyboardInterrupt`` from any of
its hooks ends the model.

A misspelt hook is an error when the model loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

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
)

if TYPE_CHECKING:
    import torch

PROJECT = "genlm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- The plugin module ----------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_backend_info() -> BackendInfo:
    """Say what the backend is and whether it can run on this machine.

    Called when backends are listed, and when one must be chosen automatically. Required.

    Must be fast and must import no engine: look at installed distributions
    (``importlib.util.find_spec``) and at the platform. ``import torch`` is too much.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def genlm_load(
    model: str,
    options: Mapping[str, object],
    verify: bool | Callable[[Any], None] | None,
) -> Engine:
    """Load ``model`` and return the engine object. Required.

    Called once per model, on its engine thread, before any other hook. Import the engine here, not
    at module level.

    Args:
        model: A local path or a hub name, as the user gave it.
        options: The user's options, without those of the core (``batch_size``, ``timeout``,
            ``cache_size``, ...). Reject unknown names with
            :func:`~genlm.core.options.refuse_unknown`.
        verify: Whether to compare rows with those of the library that the model's folder is made
            for, and to reject a model whose rows differ; a function gets the report instead.
            ``None`` is the plugin's own choice. Naming the argument says that the plugin verifies:
            :func:`genlm.kit.verify.loading.load_verified` does it.

    Raises:
        Exception: any; it reaches the user unchanged.
    """
    raise NotImplementedError


# --- Evaluation: an engine implements one of the first two, or both (then the second is used) -----


@hookspec(firstresult=True)
def genlm_next_token_logprobs(queries: Sequence[Query]) -> torch.Tensor:
    """Answer a batch of queries with their next-token log-probabilities.

    Order, grouping and chunking within the call are up to the engine, but a query's row must not
    depend on the other queries beyond rounding.

    Args:
        queries: The queries: at least one, all distinct. A query with ``cold=True`` comes alone;
            answer it from its tokens only.

    Returns:
        ``[len(queries), vocab_size]`` float32 log-probabilities, row ``i`` for ``queries[i]``. The
        tensor then belongs to the core: if you reuse a buffer, return a copy (``.clone()``).

    Raises:
        Exception: the core asks again in smaller batches, until only the query that causes it
            fails.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def genlm_step(
    queries: Sequence[Query],
    samples: Sequence[SampleRequest],
    scores: Sequence[ScoreRequest],
    reductions: Sequence[ReductionRequest],
    dropped: Sequence[Request],
    width: int,
) -> Sequence[Answer]:
    """Admit new requests, drop unwanted ones, advance the engine by one step, and return what that
    step finished.

    For engines that admit requests between steps (continuous batching). The core calls it again,
    with or without new requests, until every request in flight has been answered exactly once. It
    never admits a request equal to one in flight. It is not called if nothing is in flight, nothing
    is new and nothing must be dropped.

    **Naming an argument says that the engine takes it.** An engine that names only ``queries`` gets
    only queries. Samples and scores then go to its hooks ``genlm_sample`` and
    ``genlm_sequence_logprobs``, while nothing is in flight. If it lacks these hooks, the core makes
    samples and scores from rows.

    Args:
        queries: New queries. A cold query comes alone, when nothing is in flight; answer it from
            its tokens only.
        samples: New samples. Equal ones are separate samples.
        scores: New scores.
        reductions: New functions of rows (the argument ``then`` of callers). Name this argument if
            rows are computed in another process or on another machine, so that only results travel:
            apply :func:`~genlm.core.together.results_of` where the rows are, once a step for all
            requests that have the same function. The function takes rows as wide as the tokenizer's
            vocabulary, ``-inf`` where the model lacks a token. The engine must answer all of these
            requests. If a function raises, the answer is its exception, unchanged; the exception of
            one request must not reach another. An engine that does not name ``reductions`` is asked
            for rows, and the core applies the functions to them.
        dropped: Requests in flight, of any kind, that no caller waits for any more. Drop them now
            and never answer them; an answer in this same step is ignored. An equal query may be new
            in a later step. An engine that does not name ``dropped`` computes them to the end.
        width: How many ids the tokenizer has, the same in every step. Samples must be of these ids,
            and scores normalised over them; an engine that cannot do so answers with ``None``. If
            ``vocab_size`` exceeds ``width`` (padded embeddings), rows may be ``[width]``,
            normalised over these ids: the core then has nothing to drop. An engine with padded
            embeddings that does not name ``width`` is asked for no scores and no reductions.

    Returns:
        The answers to the requests that are finished, one for each, in any order. Each
        :class:`~genlm.core.types.Answer` has the result, the request's own exception, or ``None``
        for a sample or a score with parameters that the engine does not support: the core then
        computes it from rows. A step that finished nothing returns an empty list, and does not
        count as a batch in ``Stats``.

    Raises:
        Exception: the engine must have dropped everything in flight. The core then admits the same
            requests again, one at a time, to find the one that fails; new requests wait meanwhile.

    Every other hook but ``genlm_wake`` and ``genlm_close`` is called only while nothing is in
    flight.
    """
    raise NotImplementedError


@hookspec
def genlm_wake() -> None:
    """Make the current step return early; if there is none, the next one. Optional.

    For engines that compute in another process or on another machine. With this hook,
    ``genlm_step`` may block until something is finished. Without it, ``genlm_step`` must return
    after a bounded time, because new requests are not admitted before that.

    Called on **any thread**, when something waits for the engine thread while a step may be
    running: new requests, requests to drop, a task, the end of the model. At most once for each
    step. It must return at once and must not raise. It may be called by a signal handler or by the
    garbage collector, in the middle of any line, so it must not take a lock that such a line may
    hold: put a message into a :class:`~genlm.kit.mailbox.Mailbox`, or write a byte into a
    pipe or socket.

    The step then returns the finished answers, if there are any. Unfinished work continues.
    """


# --- The hooks of wrappers: to change rows, and to observe calls ----------------------------------


@hookspec
def genlm_process_logprobs(queries: Sequence[Query], rows: torch.Tensor) -> torch.Tensor:
    """Change rows before callers get them, like a logits processor.

    Called on the engine thread with the rows that an engine has just computed: once for each batch,
    each step that finished rows, and each cold query. The changed rows are used for everything:
    callers, the cache, samples and scores. So with this hook, **the core computes samples and
    scores from rows on every engine**, one row for each token, and never asks the engine for them.

    Several wrappers apply in the order in which they were given: first those of installed
    distributions, then those of the option ``wrappers``; ``tryfirst`` and ``trylast`` change the
    order. Each wrapper gets the rows that the previous one returned. If a wrapper gives mass to
    tokens that the model lacks (ids from ``engine.vocab_size`` on), the core removes this mass and
    normalises the row again.

    A row must be a function of its query and its row alone, since rows are cached and shared. The
    hook may ask another model; asking its own model raises a
    :class:`~genlm.core.errors.ReentrancyError`.

    Args:
        queries: The contexts, at least one.
        rows: ``[len(queries), len(lm.byte_vocab)]`` float32 log-probabilities on the engine's
            device, row ``i`` for ``queries[i]``. They may be written into.

    Returns:
        Log-probabilities of the same shape, dtype and device, each row normalised; ``rows`` itself
        if nothing changes. The core checks that the first row is normalised; with ``check=True`` it
        checks all rows.

    Raises:
        Exception: the core asks again with fewer rows, until only the one that causes it fails,
            with a :class:`~genlm.core.errors.PluginError` that names the wrapper.

    Examples:
        Make every row sharper, and with it every sample and score:

        >>> from genlm.core import hookimpl, load_model_by_name
        >>> class Sharper:
        ...     @hookimpl
        ...     def genlm_process_logprobs(self, rows):
        ...         return (2 * rows).log_softmax(dim=-1)
        >>> def row_of(**options):
        ...     with load_model_by_name("mock", "mock", continuous=True, **options) as lm:
        ...         return lm.next_token_logprobs_sync([72])
        >>> bool((row_of(wrappers=[Sharper()]) == (2 * row_of()).log_softmax(dim=-1)).all())
        True
    """
    raise NotImplementedError


@hookspec
def genlm_call_begins(hook: str, arguments: Mapping[str, Any]) -> None:
    """Observe that a hook of the engine is about to be called.

    Called on the thread of that call, for every hook but ``genlm_backend_info``, ``genlm_load`` and
    ``genlm_wake``. All observers are notified. The call waits until they have returned, so an
    observer that blocks holds the engine.

    Args:
        hook: The name of the hook.
        arguments: The arguments of the call by name, read-only.

    Raises:
        Exception: it is logged (``observer.failed``, once for each observer and hook), and the call
            goes on.
    """


@hookspec
def genlm_call_ended(
    hook: str, arguments: Mapping[str, Any], result: Any, error: BaseException | None
) -> None:
    """Observe the result, or the error, of a call that :func:`genlm_call_begins` announced.

    Args:
        hook: The name of the hook.
        arguments: The arguments of the call by name, read-only.
        result: What the engine returned, sequences as tuples; ``None`` after an error. Tensors are
            the engine's own: copy a tensor (``.clone()``) before you change or keep it. With
            ``check=True``, a request whose tensor an observer has written into gets a
            :class:`~genlm.core.errors.PluginError` that names the observer. Writes through NumPy or
            ``.data`` are not noticed, because PyTorch does not count them.
        error: What the engine raised; ``None`` if it returned.

    Raises:
        Exception: as for :func:`genlm_call_begins`.

    Examples:
        Count the rows of each batch or step, on any engine:

        >>> from genlm.core import hookimpl, load_model_by_name
        >>> class Counter:
        ...     counts = []
        ...     @hookimpl
        ...     def genlm_call_ended(self, hook, result):
        ...         if hook in ("genlm_next_token_logprobs", "genlm_step"):
        ...             self.counts.append(len(result))
        >>> for continuous in (False, True):
        ...     options = {"continuous": continuous, "wrappers": [Counter()]}
        ...     with load_model_by_name("mock", "mock", options) as lm:
        ...         shape = lm.batch_next_token_logprobs_sync([[72], [73]]).shape
        >>> Counter.counts  # the continuous mock takes two steps for a row
        [2, 0, 2]
    """


# --- Sampling (optional) --------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_sample(
    queries: Sequence[Query], params: Sequence[SamplingParams]
) -> Sequence[Sequence[int]] | None:
    """Draw one continuation for each query natively.

    Without an implementation, or if it returns ``None``, the core draws from next-token rows. Equal
    queries with equal parameters are separate samples.

    The call cannot be interrupted: all other requests wait for it, and a cancelled sample still
    runs to its end. So return ``None`` for long samples, or take samples in steps
    (:func:`genlm_step`).

    Args:
        queries: The contexts, at least one.
        params: How to draw each continuation. The stop tokens are exactly
            ``params[i].stop_token_ids``: the model's own end-of-sequence token does not stop unless
            it is listed.

    Returns:
        For each query the ids drawn, without the stop token, at most ``params[i].max_tokens``;
        ``None`` if the engine does not support these parameters. An id that the tokenizer lacks
        (padded embeddings) is an error.
    """


# --- Scoring (optional) ---------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_sequence_logprobs(
    queries: Sequence[Query], continuations: Sequence[Sequence[int]], width: int
) -> Sequence[torch.Tensor] | None:
    """Score continuations.

    Without an implementation, or if it returns ``None``, the core asks for one row per token. It
    does the same for an implementation that does not name ``width``, if ``vocab_size`` exceeds
    ``width`` (padded embeddings): such scores would be normalised over ``vocab_size``.

    Args:
        queries: The contexts, at least one.
        continuations: The continuation of each context; none is empty. A context and its
            continuation without its last token fit into ``max_context``.
        width: How many ids the tokenizer has. Scores are normalised over the first ``width`` ids.

    Returns:
        For each query ``[len(continuations[i])]`` float32, the log-probability of each token of
        ``continuations[i]`` given ``queries[i]`` and the tokens before it; ``None`` if the engine
        does not score these continuations.
    """


# --- Key/value state (optional) -------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_cache_prefix(query: Query) -> bool | None:
    """Compute and pin the KV cache of a prefix, so that contexts which extend it start from there.

    A pinned prefix stays until ``genlm_clear_kv_cache``, or until its adapter is removed. A hook
    that raises may lose pinned prefixes: the core then asks for all of them again, including those
    that were not lost.

    Args:
        query: The prefix.

    Returns:
        ``True``.

    Raises:
        Exception: there is no room for the prefix.
    """


@hookspec
def genlm_clear_kv_cache() -> None:
    """Empty the KV cache and drop recurrent state, pinned prefixes included."""


# --- LoRA (optional: add and remove, both or neither; read, if that takes long) -------------------


@hookspec(firstresult=True)
def genlm_read_lora(adapter: Adapter) -> Any:
    """Fetch and check the adapter's files.

    Called on the caller's thread before ``genlm_add_lora``, while the engine works, and perhaps by
    several callers at once: it must not change the engine.

    Args:
        adapter: The adapter; its files are in ``adapter.path``.

    Returns:
        Anything; ``genlm_add_lora`` gets it as ``contents``.

    Raises:
        Exception: any; it reaches the caller unchanged.
    """


@hookspec(firstresult=True)
def genlm_add_lora(adapter: Adapter, contents: Any) -> bool | None:
    """Load the adapter's weights from ``adapter.path``, completely, now.

    When a name is bound again, the new version is added before the old one is removed.

    Args:
        adapter: The adapter.
        contents: The result of ``genlm_read_lora``; ``None`` without that hook.

    Returns:
        ``True``.

    Raises:
        Exception: nothing of the new version may remain.
    """


@hookspec(firstresult=True)
def genlm_remove_lora(adapter: Adapter) -> bool | None:
    """Drop the adapter's weights and all state computed with them.

    Args:
        adapter: The adapter. No query with it follows.

    Returns:
        ``True``.
    """


# --- The end --------------------------------------------------------------------------------------


@hookspec
def genlm_close() -> None:
    """Release everything the engine holds. The last hook, on the engine thread, called once.

    Requests may still be in flight: their callers already have an error. Drop them.
    """
