"""MlxEngine, the object that implements the hooks of the core on top of the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch

import mlx.core as mx
from genlm.core import Adapter, Answer, EngineError, Query, hookimpl
from genlm.core.checks import describe_error
from genlm.core.errors import GenlmError
from genlm.kit.adapter_files import AdapterFolder
from genlm.kit.kv.scored import ScoredRows, scored_sequences
from genlm.kit.memory import lower
from genlm.kit.nan_rows import NanErrors
from genlm.mlx.adapters import Adapters, read_folder
from genlm.mlx.blocks import MIN_SHARED_TOKENS, Blocks
from genlm.mlx.folders import MlxFolder
from genlm.mlx.runner import Runner, key_of, version_of
from genlm.mlx.store import Store
from mlx.utils import tree_flatten

#: Continuations of at most this many tokens are scored together. A longer one is scored by itself,
#: a few rows at a time.
MAX_TOKENS_SCORED_TOGETHER = 128

#: About the most rows in memory at once; and, in a store with a separate state for each
#: continuation, the most continuations at once, since a state may be large.
MAX_ROWS, MAX_STATES = 512, 32

#: The way to make a model of a wider range than float16.
WIDER = "mlx_lm.convert --dtype bfloat16 writes a model of a wider range"

#: In MLX's error for an array that another thread has made and not evaluated.
OF_ANOTHER_THREAD = "in current thread"


@contextmanager
def explained() -> Iterator[None]:
    """In the block, errors of MLX say what to do if memory runs out, or if weights cannot be
    computed here."""
    try:
        with lower("prefill_step_size or kv_cache_bytes"):
            yield
    except RuntimeError as error:
        if isinstance(error, GenlmError) or OF_ANOTHER_THREAD not in str(error):
            raise
        raise EngineError(
            "weights of the model were changed in another thread, and not evaluated there; MLX "
            f"evaluates an array only in the thread that made it ({describe_error(error)}); call "
            "mx.eval(model.parameters()) in that thread, and ask again"
        ) from error


class MlxEngine:
    """A model of mlx-lm. It must be made, used and closed on one thread: MLX evaluates an array on
    the thread that built it.

    Attributes:
        store: The KV cache. ``None`` if the model's caches cannot be batched; then each query is
            computed alone.
    """

    device = "cpu"  # the device of the returned rows; MLX may compute on another

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        runner: Runner,
        adapters: Adapters,
        store: Blocks | Store | None,
        *,
        vocab_size: int,
        max_context: int | None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        # The width of rows. Later, each step gives the number of ids without padding.
        self.vocab_size = self._width = vocab_size
        self.max_context = max_context
        self.eos_token_ids = eos_token_ids
        self.store = store
        self.dtype = _dtype(model)
        self._nan = NanErrors(self.dtype, WIDER, spreads=True)
        self._runner = runner
        self._waiting: list[Query] = []
        self._chunked: Query | None = None  # the chunk of the last step
        self._adapters = adapters

    # --- rows -------------------------------------------------------------------------------------

    @hookimpl
    @explained()
    def genlm_step(
        self, queries: Sequence[Query], dropped: Sequence[Query], width: int
    ) -> list[Answer]:
        """Answer the queries that need at most a chunk, and compute one chunk of the oldest longer
        query."""
        self._width = width
        gone, before = set(dropped), self._waiting
        self._waiting = []  # set here, so that an error leaves no query waiting
        # A new query may equal a dropped one, so only older queries are dropped.
        waiting = [*(query for query in before if query not in gone), *queries]
        now: list[Query] = []
        chunks: dict[Query, Query] = {}
        for query in waiting:
            if chunk := self._chunk(query):
                chunks[query] = chunk
            else:
                now.append(query)
        oldest, self._chunked = next(iter(chunks.values()), None), None
        # The chunk is computed together with the other queries, so that its state does not become
        # the least recently used. It may equal one of them, and queries must be distinct.
        asked = now if oldest is None else [*dict.fromkeys([*now, oldest])]
        rows = self.logprobs(asked)[: len(now)] if asked else torch.empty(0)
        self._waiting, self._chunked = list(chunks), oldest
        return [*map(Answer, now, self._nan.in_rows(now, rows))]

    def _chunk(self, query: Query) -> Query | None:
        """The first part of a query to compute; ``None`` if all of it fits into a chunk.

        Without a store, no state can be kept between two chunks.
        """
        size = self._runner.step_size
        if query.length <= size or self.store is None or query.cold:
            return None
        end = self.store.known(query) + size
        if query.length <= end:
            return None
        chunk = Query(query.context.first(end), query.adapter)
        # If the state of the last chunk was not kept, because it is NaN, the same chunk must not be
        # tried again.
        return chunk if chunk != self._chunked else None

    def logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        """The rows of distinct queries, float32, without the padding of the vocabulary."""
        if self.store is None or queries[0].cold:
            logits = mx.concatenate([self._runner.cold(key_of(query)) for query in queries])
            return _rows(logits[:, : self._width])
        rows = _rows(self.store.logits(queries)[:, : self._width])
        if len(queries) > 1:
            # A row may be NaN because of a later token of the same context, or of one computed with
            # it: a masked column still takes part in products, and 0 * nan is nan. So NaN rows are
            # computed again alone.
            for at in rows[:, 0].isnan().nonzero().flatten().tolist():
                rows[at] = _rows(self._runner.cold(key_of(queries[at]))[:, : self._width])[0]
        return rows

    @hookimpl
    @explained()
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]], width: int
    ) -> Sequence[torch.Tensor | EngineError]:
        scores: dict[int, torch.Tensor] = {}
        if self.store is not None:
            short = [
                at for at, one in enumerate(continuations) if len(one) <= MAX_TOKENS_SCORED_TOGETHER
            ]
            some = [queries[at] for at in short], [continuations[at] for at in short]
            scores = dict(zip(short, _scored(self.store, *some, width), strict=True))
            if len(short) > 1:  # NaN scores are computed again alone, as rows are
                scores = {at: one for at, one in scores.items() if not one.isnan().any()}
        found = [
            scores[at] if at in scores else self._score(query, tuple(continuations[at]), width)
            for at, query in enumerate(queries)
        ]
        return self._nan.in_scores(queries, continuations, found)

    def _score(self, query: Query, continuation: tuple[int, ...], width: int) -> torch.Tensor:
        """One pass over the new tokens of the context and over the continuation. If the context has
        many, they are computed first and kept: further continuations may follow it."""
        if self.store is None:
            cache, known = self._runner.empty_cache(), 0
        else:
            cache, known = self.store.branch(query)
            before = query.length - 1
            if before - known >= MIN_SHARED_TOKENS:
                self.store.logits([Query(query.context.first(before), query.adapter)])
                cache, known = self.store.branch(query)
        new = (*query.context.since(known), *continuation[:-1])
        rows = self._runner.following(cache, version_of(query), new, len(continuation))
        wanted = torch.tensor(continuation)
        scores: list[torch.Tensor] = []
        for block in (_rows(logits[:, :width]) for logits in rows):
            some, wanted = wanted[: len(block)], wanted[len(block) :]
            scores.append(block.gather(1, some[:, None])[:, 0])
        return torch.cat(scores)

    @hookimpl
    @explained()
    def genlm_cache_prefix(self, query: Query) -> bool:
        """Raises: EngineError: the row of the prefix is NaN."""
        if self.store is not None and not self.store.pin(query):
            raise self._nan.of_row(query)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        if self.store is not None:
            self.store.clear()
        mx.clear_cache()

    @hookimpl
    def genlm_read_lora(self, adapter: Adapter) -> AdapterFolder | MlxFolder:
        return read_folder(adapter.path)

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter, contents: AdapterFolder | MlxFolder) -> bool:
        self._adapters.add(adapter, contents)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self._adapters.remove(adapter.version)
        if self.store is not None:
            self.store.drop(adapter.version)
        return True

    @hookimpl
    def genlm_close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.model = self.store = None
        del self._runner, self._adapters
        mx.clear_cache()
        # Streams are cleared last. If a thread that still has streams is joined, the process may
        # abort at exit.
        mx.clear_streams()


def _scored(
    store: Blocks | Store,
    queries: Sequence[Query],
    continuations: Sequence[Sequence[int]],
    width: int,
) -> Sequence[torch.Tensor]:
    """Scores that are computed together, in groups that fit into memory."""
    wanted = ScoredRows(scored_sequences(queries, continuations), continuations)
    sizes = [*map(len, continuations)]
    scores = torch.empty(sum(sizes), dtype=torch.float32)
    ends = [*accumulate(piece.keep for piece in wanted.pieces)]
    states = MAX_STATES if isinstance(store, Blocks) else len(ends)
    for _, group in groupby(range(len(ends)), key=lambda at: (ends[at] // MAX_ROWS, at // states)):
        numbers = [*group]
        for owners, logits in store.results([wanted.pieces[at] for at in numbers]):
            rows, tokens, places = wanted.read([numbers[owner] for owner in owners])
            scores[places] = _rows(logits[:, :width])[rows, tokens]
    return torch.split(scores, sizes)


def _rows(logits: mx.array) -> torch.Tensor:
    """Log-probabilities, in memory outside MLX.

    PyTorch normalises them, because MLX's sum over a large vocabulary is 1.7e-4 off on the CPU.
    """
    return torch.from_numpy(np.array(logits)).log_softmax(dim=-1)


def _dtype(model: Any) -> str:
    """The type in which a model computes: that of most of its floating-point weights."""
    kinds = Counter(str(array.dtype) for _, array in tree_flatten(model.parameters()))
    floating = [kind for kind, _ in kinds.most_common() if "float" in kind]
    return floating[0].removeprefix("mlx.core.") if floating else "float32"
