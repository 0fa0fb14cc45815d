"""The methods of a model that draw and score continuations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from genlm.core.adapters import UNSET, LoraName
from genlm.core.checks import integer
from genlm.core.context import token_ids_of
from genlm.core.errors import InvalidOptionError
from genlm.core.runtime.batcher import Batcher
from genlm.core.runtime.blocking import blocking
from genlm.core.runtime.continuations import Continuations
from genlm.core.runtime.executor import Result
from genlm.core.runtime.keywords import known_keywords
from genlm.core.sampling import Particle, SamplingOptions, checked_params, seeded
from genlm.core.text import TextMixin
from genlm.core.types import Query, Request, SamplingParams

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")


class GenerationMixin(TextMixin):
    """What :class:`~genlm.core.lm.AsyncLM` draws and scores."""

    _batcher: Batcher[Request, Result]

    def _query(self, token_ids: Iterable[int], lora_name: LoraName, room_for: int = 1) -> Query:
        """A checked query, with room for ``room_for`` tokens after it."""
        raise NotImplementedError

    def _queries(
        self, contexts: Iterable[Iterable[int]], lora_name: LoraName, room_for: int = 1
    ) -> list[Query]:
        """Several of them."""
        raise NotImplementedError

    async def _rows(self, queries: Sequence[Query]) -> torch.Tensor:
        """The rows of queries, in one tensor."""
        raise NotImplementedError

    @known_keywords()
    async def sample(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        eos_token_ids: Iterable[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: LoraName = UNSET,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> list[int]:
        """Draw a continuation of a prompt.

        Args:
            prompt_token_ids: The prompt.
            max_tokens: The most tokens to draw; 0 draws none.
            eos_token_ids: Drawing one of these ends the continuation; it is not part of the result.
                ``None`` is :attr:`eos_token_ids`, and ``[]`` none.
            temperature: Divides the log-probabilities; 0 takes the most likely token every time.
            seed: Fixes the result, whatever else is being asked.
            lora_name: The adapter.
            top_k: Draw among the ``top_k`` most likely tokens.
            top_p: Draw among the fewest most likely tokens that have at least this share of the
                mass that ``top_k`` leaves.
            min_p: Draw among tokens at least this fraction as likely as the most likely one.

        Stop strings, penalties and beam search are for what is built on top of a model; the page
        "What is for what" says with what.

        Examples:
            >>> import asyncio
            >>> from genlm.core import load_model_by_name
            >>> async def draw(lm):
            ...     return await lm.sample(lm.encode("Hello"), max_tokens=5, top_k=50, seed=7)
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     drawn, again = asyncio.run(draw(lm)), asyncio.run(draw(lm))
            >>> len(drawn), drawn == again
            (5, True)

        Raises:
            InvalidOptionError: an argument is out of range, or there is none of that name (a
                ``ValueError``).
        """
        query, params = self._draw(
            prompt_token_ids,
            max_tokens,
            lora_name,
            eos_token_ids=eos_token_ids,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        return (await self._continuations.draw([(query, params)]))[0]

    @known_keywords()
    async def batch_sample(
        self,
        prompt_token_ids_list: Iterable[Iterable[int]],
        max_tokens: int,
        eos_token_ids: Iterable[int] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: LoraName = UNSET,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> list[list[int]]:
        """Draw one continuation for each prompt. With a ``seed`` each prompt has a stream of its
        own, by its position; the first one's is that of :meth:`sample`."""
        params = self._params(
            max_tokens,
            eos_token_ids,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        queries = self._queries(prompt_token_ids_list, lora_name, room_for=params.max_tokens)
        own = seeded(params, len(queries))
        return await self._continuations.draw(list(zip(queries, own, strict=True)))

    @known_keywords(SamplingOptions)
    def stream(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[int, None]:
        """Draw a continuation token by token: an asynchronous iterator of ids, without the stop
        token. They are drawn from rows, one request a token, and only while the loop asks for more:
        a loop that is left draws nothing further, and what a cancelled one has asked is cancelled.

        Args:
            prompt_token_ids: The prompt.
            max_tokens: The most tokens to draw; 0 draws none.
            **options: The keywords of :meth:`sample`. A seed gives what :meth:`sample` gives where
                the engine does not draw itself.

        Examples:
            >>> import asyncio
            >>> from genlm.core import load_model_by_name
            >>> async def first_words(lm):
            ...     text = b""
            ...     async for token_id in lm.stream(lm.encode("Hello"), max_tokens=50, seed=7):
            ...         text += lm.byte_vocab[token_id].byte_string
            ...         if len(text) > 5:
            ...             return text
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     len(asyncio.run(first_words(lm)))
            6

        Raises:
            InvalidOptionError: an argument is out of range, or there is none of that name.
        """
        query, params = self._draw(prompt_token_ids, max_tokens, **options)
        return self._continuations.stream(query, params)

    @known_keywords(SamplingOptions)
    async def sample_particles(
        self,
        prompt_token_ids: Iterable[int],
        n: int,
        max_tokens: int,
        **options: Unpack[SamplingOptions],
    ) -> list[Particle]:
        """Draw ``n`` continuations of one prompt, each with its log-probability under the model and
        under what it was drawn from. They are drawn from rows. Without log-probabilities,
        ``batch_sample([prompt] * n, max_tokens)`` leaves them to engines that draw faster.

        Args:
            prompt_token_ids: The prompt.
            n: How many; with a ``seed`` each has a stream of its own.
            max_tokens: The most tokens of each.
            **options: The keywords of :meth:`sample`.

        Examples:
            Importance sampling from a sharper proposal:

            >>> import asyncio
            >>> from genlm.core import load_model_by_name
            >>> async def draw(lm):
            ...     return await lm.sample_particles(
            ...         lm.encode("Hello"), 3, max_tokens=5, temperature=0.5, seed=7
            ...     )
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     particles = asyncio.run(draw(lm))
            >>> [len(particle.token_ids) for particle in particles]
            [5, 5, 5]
            >>> all(p.log_weight == p.logprob - p.proposal_logprob for p in particles)
            True

        Raises:
            InvalidOptionError: an argument is out of range, or there is none of that name.
        """
        query, params = self._draw(prompt_token_ids, max_tokens, **options)
        own = seeded(params, integer("n", n, least=1))
        return await self._continuations.particles([(query, each) for each in own])

    async def sequence_logprobs(
        self,
        prompt_token_ids: Iterable[int],
        continuation_token_ids: Iterable[int],
        lora_name: LoraName = UNSET,
    ) -> torch.Tensor:
        """The log-probability of each token of a continuation given all before it,
        ``[len(continuation)]`` float32.

        Raises:
            InvalidQueryError: the continuation is empty or has an invalid token id.
        """
        # Rows have no place for what the tokenizer lacks, nor for what the model lacks.
        known = min(self._engine.vocab_size, self._engine.width)
        most = self._engine.max_context
        continuation = token_ids_of("continuation", continuation_token_ids, known, most)
        query = self._query(prompt_token_ids, lora_name, room_for=len(continuation))
        return await self._continuations.score(query, continuation)

    # --- blocking ---------------------------------------------------------------------------------

    @known_keywords(SamplingOptions)
    def sample_sync(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        eos_token_ids: Iterable[int] | None = None,
        **options: Any,
    ) -> list[int]:
        """:meth:`sample`, blocking. The options are its keywords."""
        return self._blocking(self.sample, prompt_token_ids, max_tokens, eos_token_ids, **options)

    @known_keywords(SamplingOptions)
    def batch_sample_sync(
        self,
        prompt_token_ids_list: Iterable[Iterable[int]],
        max_tokens: int,
        eos_token_ids: Iterable[int] | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """:meth:`batch_sample`, blocking. The options are its keywords."""
        return self._blocking(
            self.batch_sample, prompt_token_ids_list, max_tokens, eos_token_ids, **options
        )

    @known_keywords(SamplingOptions)
    def sample_particles_sync(
        self,
        prompt_token_ids: Iterable[int],
        n: int,
        max_tokens: int,
        **options: Unpack[SamplingOptions],
    ) -> list[Particle]:
        """:meth:`sample_particles`, blocking."""
        return self._blocking(self.sample_particles, prompt_token_ids, n, max_tokens, **options)

    def sequence_logprobs_sync(
        self,
        prompt_token_ids: Iterable[int],
        continuation_token_ids: Iterable[int],
        lora_name: LoraName = UNSET,
    ) -> torch.Tensor:
        """:meth:`sequence_logprobs`, blocking."""
        return self._blocking(
            self.sequence_logprobs, prompt_token_ids, continuation_token_ids, lora_name
        )

    def _blocking(
        self, ask: Callable[P, Coroutine[Any, Any, T]], *given: P.args, **options: P.kwargs
    ) -> T:
        self._batcher.require_open()
        return blocking(ask(*given, **options))

    # --- checks -----------------------------------------------------------------------------------

    def _draw(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        lora_name: LoraName = UNSET,
        **options: Any,
    ) -> tuple[Query, SamplingParams]:
        params = self._params(max_tokens, **options)
        return self._query(prompt_token_ids, lora_name, room_for=params.max_tokens), params

    def _params(
        self, max_tokens: int, eos_token_ids: Iterable[int] | None = None, **options: Any
    ) -> SamplingParams:
        stops = self.eos_token_ids if eos_token_ids is None else eos_token_ids
        params = checked_params(max_tokens, stops, **options)
        width = len(self.byte_vocab)
        if (most := max(params.stop_token_ids, default=0)) >= width:
            raise InvalidOptionError(
                f"eos_token_ids has {most}, which is out of range; the model has ids 0 to "
                f"{width - 1}"
            )
        return params

    @property
    def _continuations(self) -> Continuations:  # not kept: it would keep the model alive
        return Continuations(self._engine, self._batcher, self._rows)
