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

**Which hooks an engine implements is its capability declaration.** There are no flags. Leave out
what the engine cannot do.

*Arguments.* An implementation may take any subset of a hook's arguments, by name; adding one breaks
no plugin.

*Threads.* Every model has one engine thread. ``genlm_load`` and all engine hooks run on it, one at
a time, so an engine needs no locks, may keep thread-bound state, and may block.
``genlm_backend_info`` runs on any thread.

*Trust.* Queries have been checked (see :class:`~genlm.core.types.Query`): an engine validates
nothing.

*Tensors.* An engine gives away what it returns: the core may keep it or write into it. Rows may lie
on any device, carry no autograd graph, and are log-probabilities, float32, each row normalised over
its whole width within 1e-4.

*Errors.* An exception from an evaluation hook is not fatal: the core asks again in smaller batches
until only the query that causes it fails, so an engine must be sound after it has raised. An engine
that cannot go on raises :class:`~genlm.core.errors.EngineDeadError`: everything pending fails and
the model refuses further work.

*Adapters.* :class:`~genlm.core.types.Adapter` values are never reused: binding a name again gives a
new ``version``. Keep weights and key/value state by ``adapter.version`` and no adapter can ever be
mistaken for another.

A misspelt hook is an error when the model loads, not a silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

from genlm.core.types import Adapter, Answer, BackendInfo, Engine, Query, SamplingParams

if TYPE_CHECKING:
    import torch

PROJECT = "genlm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --------------------------------------------------------------------------------------------------
# The plugin module
# --------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_backend_info() -> BackendInfo:
    """Say what the backend is and whether it can run on this machine.

    Called when backends are listed, and when none was named and one must be chosen. Required.

    Must be cheap and must import no engine: look at installed distributions
    (``importlib.util.find_spec``) and at the platform. ``import torch`` is too much.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def genlm_load(model: str, options: Mapping[str, object]) -> Engine:
    """Load ``model`` and return the engine object. Required.

    Called once per model, on its engine thread, before any other hook. Import the engine here, not
    at module level.

    :param model: a local path or a hub name, as the user gave it.
    :param options: the user's options, without those of the core (``batch_size``, ``timeout``,
        ``cache_size``, ...). Refuse an unknown name with
        :class:`~genlm.core.errors.InvalidOptionError`.
    :raises Exception: any; it reaches the user as it is.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# Evaluation: an engine implements one of the two, or both (then the second is used)
# --------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_next_token_logprobs(queries: Sequence[Query]) -> torch.Tensor:
    """Answer a batch: ``[len(queries), vocab_size]`` float32 log-probabilities, row ``i`` for
    ``queries[i]``.

    The queries are distinct and at least one. Order, grouping and chunking within the call are the
    engine's affair, but a query's row must not depend on its companions beyond rounding.

    A query with ``cold=True`` comes alone; answer it from its tokens only.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def genlm_step(queries: Sequence[Query]) -> Sequence[Answer]:
    """Admit newcomers, advance the engine by one step, and return what that step finished.

    For engines that admit requests between steps (continuous batching). The core calls it again,
    with new queries or none, until every admitted query has been answered exactly once; it never
    admits a query equal to one in flight.

    With nothing in flight and ``queries`` empty it is not called. Return an
    :class:`~genlm.core.types.Answer` holding an exception for a query that failed alone. If the
    call raises instead, the engine must have dropped everything in
    flight: the core then asks again, one query at a time, to find the one that fails.

    Every other hook is called only while nothing is in flight.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# Sampling (optional)
# --------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_sample(
    queries: Sequence[Query], params: Sequence[SamplingParams]
) -> Sequence[Sequence[int]] | None:
    """Draw one continuation per query natively: token ids without the stop token, at most
    ``params[i].max_tokens``.

    Return ``None`` if these parameters are beyond the engine; without an implementation, or on
    ``None``, the core draws from next-token rows. Equal queries with equal parameters are separate
    draws. The stop tokens are exactly ``params[i].stop_token_ids``: the model's own end-of-sequence
    token does not stop unless it is listed.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# Scoring (optional)
# --------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_sequence_logprobs(
    queries: Sequence[Query], continuations: Sequence[Sequence[int]]
) -> Sequence[torch.Tensor] | None:
    """Score continuations: element ``i`` is ``[len(continuations[i])]`` float32, the
    log-probability of each token of ``continuations[i]`` given ``queries[i]`` and the tokens before
    it, normalised over ``vocab_size``.

    Continuations are not empty, and context plus continuation without its last token fits
    ``max_context``. Without an implementation, or on ``None``, the core asks one row per token.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# Key/value state (optional)
# --------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_cache_prefix(query: Query) -> bool | None:
    """Compute and pin the key/value state of ``query`` so that contexts which extend it start from
    there.

    A pinned prefix stays until ``genlm_clear_kv_cache``, or until its adapter is removed. Return
    ``True``.
    """
    raise NotImplementedError


@hookspec
def genlm_clear_kv_cache() -> None:
    """Drop all key/value state, pinned prefixes included."""


# --------------------------------------------------------------------------------------------------
# LoRA (optional: both or neither)
# --------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def genlm_add_lora(adapter: Adapter) -> bool | None:
    """Load the adapter's weights from ``adapter.path``, completely, now. Return ``True``.

    When a name is bound again the new version is added before the old one is removed. On an
    exception nothing may remain of the new version.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def genlm_remove_lora(adapter: Adapter) -> bool | None:
    """Drop the adapter's weights and every key/value state computed with them. Return ``True``.

    No query with this adapter follows.
    """
    raise NotImplementedError


# --------------------------------------------------------------------------------------------------
# The end
# --------------------------------------------------------------------------------------------------


@hookspec
def genlm_close() -> None:
    """Release everything the engine holds. The last hook, on the engine thread, called once."""
