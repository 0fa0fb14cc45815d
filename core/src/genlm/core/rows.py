"""The methods of a model that give rows: they check a request, look in the cache, and ask the
batcher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from attrs import evolve

from genlm.core.adapters import UNSET, AdapterRegistry, LoraName
from genlm.core.cache import OutputCache
from genlm.core.context import Context, contexts_of, token_ids_of
from genlm.core.copies import the_copy
from genlm.core.drawer import Draw, TokenDrawer
from genlm.core.errors import InvalidInputError, InvalidQueryError
from genlm.core.hints import known_keywords
from genlm.core.known_contexts import KnownContexts
from genlm.core.runtime.askers import blocking
from genlm.core.runtime.batcher import Batcher
from genlm.core.runtime.combiners import Combiner, EachCombiner
from genlm.core.runtime.timeline import Timeline
from genlm.core.text import TextMixin
from genlm.core.together import Then, Thens, each_of, made_by_together
from genlm.core.types import Query, ReductionRequest

if TYPE_CHECKING:
    import torch

R = TypeVar("R")

#: Makes the caller's result for an engine that reduces rows itself: the only one.
the_result = itemgetter(0)


class RowsMixin(TextMixin):
    """The rows of :class:`~genlm.core.lm.AsyncLM`."""

    _batcher: Batcher
    _cache: OutputCache
    _adapters: AdapterRegistry
    _known_contexts: KnownContexts
    _timeline: Timeline

    def context(self, token_ids: Iterable[int]) -> Context:
        """A context that can be extended token by token. Every method takes it in place of token
        ids. For long contexts this is cheaper: ``context.extend(token_id)`` checks and hashes only
        the new token."""
        return self._checked(token_ids, room_for=1)

    @overload
    async def next_token_logprobs(
        self, token_ids: Iterable[int], lora_name: LoraName = UNSET, *, then: None = None
    ) -> torch.Tensor: ...

    @overload
    async def next_token_logprobs(
        self, token_ids: Iterable[int], lora_name: LoraName = UNSET, *, then: Then[R]
    ) -> R: ...

    @known_keywords
    async def next_token_logprobs(
        self,
        token_ids: Iterable[int],
        lora_name: LoraName = UNSET,
        *,
        then: Then[Any] | None = None,
    ) -> Any:
        """The row of one context, or the result of a function of it.

        Args:
            token_ids: The context.
            lora_name: The adapter.
            then: A function of rows with this caller's arguments, made by
                :class:`~genlm.core.together.together`. It runs on the row's device, on the engine
                thread, once for all callers of a step, and the caller gets its result in place of
                the row. A cached row waits for the engine thread too, so that it joins the others.

        Returns:
            ``[len(lm.byte_vocab)]`` float32 log-probabilities, or the function's result.

        Raises:
            Exception: the exception that the function raises for this caller.
            InvalidInputError: ``then`` was not made by :class:`~genlm.core.together.together`.
        """
        query = self._query(token_ids, lora_name)
        then = None if then is None else made_by_together(then)
        if then is None and (row := self._kept(query)) is not None:
            return row.clone()
        if then is not None and self._engine.reduces:
            return await self._batcher.submit((ReductionRequest(query, then),), the_result)
        return await self._batcher.submit((query,), then or the_copy)

    @overload
    async def batch_next_token_logprobs(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: None = None,
    ) -> torch.Tensor: ...

    @overload
    async def batch_next_token_logprobs(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: Thens[R],
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...

    @overload
    async def batch_next_token_logprobs(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: Thens[R],
        return_exceptions: bool,
    ) -> list[R | Exception]: ...

    @known_keywords
    async def batch_next_token_logprobs(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: Thens[Any] | None = None,
        return_exceptions: bool = False,
    ) -> Any:
        """The rows of several contexts, ``[len(token_ids_list), len(lm.byte_vocab)]`` float32, or
        the list of the results of functions of them.

        Args:
            token_ids_list: The contexts.
            lora_name: The adapter.
            then: As for :meth:`next_token_logprobs`: one for all contexts, or one for each, such as
                ``map(draw, uniforms)``.
            return_exceptions: With ``then``: an exception takes the place of its context's result.
                Otherwise the first exception ends the call.

        Raises:
            InvalidInputError: the number of ``then`` is not that of the contexts, one was not made
                by :class:`~genlm.core.together.together`, or ``return_exceptions`` is given without
                ``then``.
        """
        queries = self._queries(token_ids_list, lora_name)
        if then is None:
            refuse_exceptions(return_exceptions)
            return await self._rows(queries)
        thens = each_of(then, len(queries))
        if not queries:
            return []
        if self._engine.reduces:
            requests = [*map(ReductionRequest, queries, thens)]
            return await self._batcher.submit(requests, EachCombiner((), return_exceptions))
        return await self._batcher.submit(queries, EachCombiner(thens, return_exceptions))

    @overload
    def next_token_logprobs_sync(
        self, token_ids: Iterable[int], lora_name: LoraName = UNSET, *, then: None = None
    ) -> torch.Tensor: ...

    @overload
    def next_token_logprobs_sync(
        self, token_ids: Iterable[int], lora_name: LoraName = UNSET, *, then: Then[R]
    ) -> R: ...

    @known_keywords
    def next_token_logprobs_sync(
        self,
        token_ids: Iterable[int],
        lora_name: LoraName = UNSET,
        *,
        then: Then[Any] | None = None,
    ) -> Any:
        """:meth:`next_token_logprobs`, blocking."""
        query = self._query(token_ids, lora_name)
        then = None if then is None else made_by_together(then)
        if then is None and (row := self._kept(query)) is not None:
            return row.clone()
        if then is not None and self._engine.reduces:
            return self._batcher.ask((ReductionRequest(query, then),), the_result)
        return self._batcher.ask((query,), then or the_copy)

    @overload
    def batch_next_token_logprobs_sync(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: None = None,
    ) -> torch.Tensor: ...

    @overload
    def batch_next_token_logprobs_sync(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: Thens[R],
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...

    @overload
    def batch_next_token_logprobs_sync(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: Thens[R],
        return_exceptions: bool,
    ) -> list[R | Exception]: ...

    @known_keywords
    def batch_next_token_logprobs_sync(
        self,
        token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
        *,
        then: Thens[Any] | None = None,
        return_exceptions: bool = False,
    ) -> Any:
        """:meth:`batch_next_token_logprobs`, blocking."""
        if then is not None:
            self._batcher.require_open()
            asked = self.batch_next_token_logprobs(
                token_ids_list, lora_name, then=then, return_exceptions=return_exceptions
            )
            return blocking(asked, self._batcher.result_of)
        refuse_exceptions(return_exceptions)
        unknown, combine = self._look_up(self._queries(token_ids_list, lora_name))
        return self._batcher.ask(unknown, combine) if unknown else combine([])

    @known_keywords
    def next_token_logprobs_uncached(
        self, token_ids: Iterable[int], lora_name: LoraName = UNSET
    ) -> torch.Tensor:
        """The row of one context, ``[len(lm.byte_vocab)]`` float32, computed alone from its tokens:
        neither the output cache nor the KV cache is read. Blocks."""
        query = evolve(self._query(token_ids, lora_name), cold=True)
        row: torch.Tensor = self._batcher.ask((query,), the_copy)
        return row

    async def _rows(self, queries: Sequence[Query]) -> torch.Tensor:
        """The rows of several queries, in a tensor of their own."""
        unknown, combine = self._look_up(queries)
        return await self._batcher.submit(unknown, combine) if unknown else combine([])

    async def _next_tokens(
        self, drawers: Sequence[TokenDrawer], queries: Sequence[Query]
    ) -> list[int]:
        """A token drawn after each query."""
        known = [self._kept(query) for query in queries]
        unknown = [query for query, row in zip(queries, known, strict=True) if row is None]
        draw = Draw(drawers, known)
        return await self._batcher.submit(unknown, draw) if unknown else draw([])

    def _look_up(self, queries: Sequence[Query]) -> tuple[list[Query], Combiner[torch.Tensor]]:
        """The queries whose rows are not in the output cache, and a combiner that makes one tensor
        of all rows."""
        import torch

        kept = [self._kept(query) for query in queries]
        width, device = self._engine.width, self._engine.device

        def combine(rows: Sequence[torch.Tensor]) -> torch.Tensor:
            asked = iter(rows)
            own = [next(asked) if row is None else row for row in kept]
            if not own:
                return torch.empty(0, width, dtype=torch.float32, device=device)
            return torch.stack(own)

        return [query for query, row in zip(queries, kept, strict=True) if row is None], combine

    def _kept(self, query: Query) -> torch.Tensor | None:
        """The row of a query if the output cache has it. The caller must copy it."""
        if (row := self._cache.peek(query)) is not None and self._timeline.trace is not None:
            self._timeline.trace.hit(query)
        return row

    # --- checks -----------------------------------------------------------------------------------

    def _query(self, token_ids: Iterable[int], lora_name: LoraName, room_for: int = 1) -> Query:
        """A checked query, with room for drawing or scoring ``room_for`` tokens after it."""
        return Query(self._checked(token_ids, room_for), self._adapters.resolve(lora_name))

    def _queries(
        self, contexts: Iterable[Iterable[int]], lora_name: LoraName, room_for: int = 1
    ) -> list[Query]:
        given = contexts_of(contexts)
        adapter = self._adapters.resolve(lora_name)
        return [Query(self._checked(token_ids, room_for), adapter) for token_ids in given]

    def _checked(self, token_ids: Iterable[int], room_for: int) -> Context:
        vocab_size, limit = self._engine.vocab_size, self._engine.max_context
        if (
            type(token_ids) is Context
            and 0 < token_ids.vocab_size <= vocab_size
            and token_ids.length
        ):
            context = token_ids
        elif (known := self._known_contexts.find(token_ids, vocab_size)) is not None:
            context = known
        else:
            context = Context(token_ids_of("context", token_ids, vocab_size, limit), vocab_size)
            self._known_contexts.add(context)
        if limit is not None and context.length + (room_for or 1) > limit + 1:
            raise InvalidQueryError(_too_long(context.length, room_for, limit))
        return context


def refuse_exceptions(return_exceptions: bool) -> None:
    """Raises: InvalidInputError: rows are asked for with ``return_exceptions``."""
    if return_exceptions:
        raise InvalidInputError(
            "return_exceptions goes with then; rows are one tensor, which has no place for an "
            "exception: ask for each by next_token_logprobs, in asyncio.gather(..., "
            "return_exceptions=True)"
        )


def _too_long(length: int, room_for: int, limit: int) -> str:
    if length > limit:
        return (
            f"the context of {length} tokens exceeds the {limit} tokens that the model takes; "
            "shorten it"
        )
    return (
        f"a context of {length} tokens leaves room for {limit - length + 1} of the {room_for} "
        f"tokens to follow, since the model takes {limit}; shorten it, or ask for fewer tokens"
    )
