"""The methods of a model that draw and score continuations."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from genlm.core.adapters import UNSET, LoraName
from genlm.core.checks import integer
from genlm.core.context import contexts_of, token_ids_of
from genlm.core.errors import InvalidOptionError, InvalidQueryError
from genlm.core.hints import known_keywords
from genlm.core.rows import RowsMixin
from genlm.core.runtime.askers import blocking
from genlm.core.runtime.continuations import Continuations, all_of
from genlm.core.sampling import Particle, SamplingOptions, checked_params, seeded
from genlm.core.scoring import Score, rolling_windows
from genlm.core.types import Query, SamplingParams, TokenIds

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")


def blocking_form(
    ask: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """A method that does the same and blocks. It takes the same arguments."""

    @functools.wraps(ask, updated=())  # a mark of coroutines is not its own
    def asks(self: GenerationMixin, /, *given: P.args, **options: P.kwargs) -> T:
        self._batcher.require_open()
        own: Callable[P, Coroutine[Any, Any, T]] = getattr(self, ask.__name__)
        return blocking(own(*given, **options))

    asks.__name__, asks.__doc__ = f"{ask.__name__}_sync", f":meth:`{ask.__name__}`, blocking."
    asks.__qualname__ = f"{ask.__qualname__}_sync"
    return known_keywords(asks)


class GenerationMixin(RowsMixin):
    """What :class:`~genlm.core.lm.AsyncLM` draws and scores."""

    @known_keywords
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

    @known_keywords
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

    @known_keywords
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

    @known_keywords
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

    @known_keywords
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
        return await self._continuations.score(
            *self._scored(prompt_token_ids, continuation_token_ids, lora_name)
        )

    @known_keywords
    async def batch_sequence_logprobs(
        self,
        prompt_token_ids_list: Iterable[Iterable[int]],
        continuation_token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
    ) -> list[Score]:
        """The log-probability of each continuation given the prompt in its place, and whether it is
        the greedy one: multiple choice, as lm-evaluation-harness asks for it.

        Prompts and continuations that are equal are computed once. ``[prompt] * len(answers)``
        scores several answers of one prompt.

        Examples:
            >>> import asyncio
            >>> from genlm.core import load_model_by_name
            >>> async def best(lm, question, answers):
            ...     ids = [lm.encode(answer) for answer in answers]
            ...     scores = await lm.batch_sequence_logprobs([lm.encode(question)] * len(ids), ids)
            ...     return max(zip(scores, answers))[1]
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     asyncio.run(best(lm, "Two and two are", [" four", " a dog"]))
            ' four'

        Raises:
            InvalidQueryError: a continuation is empty or has an invalid token id, or there are more
                prompts than continuations, or fewer.
        """
        prompts = contexts_of(prompt_token_ids_list)
        continuations = contexts_of(continuation_token_ids_list)
        if len(prompts) != len(continuations):
            raise InvalidQueryError(
                f"there are {len(prompts)} prompts and {len(continuations)} continuations; give "
                "each continuation its prompt: [prompt] * n for n of one prompt"
            )
        pairs = [
            self._scored(prompt, continuation, lora_name)
            for prompt, continuation in zip(prompts, continuations, strict=True)
        ]
        judge = self._continuations.judge
        return await all_of(judge(query, continuation) for query, continuation in pairs)

    @known_keywords
    async def rolling_logprobs(
        self,
        token_ids: Iterable[int],
        max_length: int | None = None,
        context_len: int = 1,
        lora_name: LoraName = UNSET,
    ) -> torch.Tensor:
        """The log-probability of each token of a text after its first, however long it is:
        ``[len(token_ids) - 1]`` float32. ``exp(-mean)`` of them is the perplexity.

        A text longer than a context is scored in windows, each token once. The first token only
        gives context: put one before the text, such as the tokenizer's beginning of a sequence.

        Args:
            token_ids: The text, of any length.
            max_length: The most tokens of a context; ``None`` is :attr:`max_context`.
            context_len: The least context of a token after the first window. 1 is the rule of
                lm-evaluation-harness; more is closer to the text as a whole, and costs
                ``max_length / (max_length - context_len + 1)`` times as much.
            lora_name: The adapter.

        Examples:
            >>> import asyncio
            >>> from genlm.core import load_model_by_name
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     ids = [257, *lm.encode("Once upon a time")]
            ...     whole = asyncio.run(lm.rolling_logprobs(ids))
            ...     parts = asyncio.run(lm.rolling_logprobs(ids, max_length=8, context_len=4))
            >>> whole.shape, parts.shape
            (torch.Size([16]), torch.Size([16]))

        Raises:
            InvalidQueryError: the text is empty or has an invalid token id.
            InvalidOptionError: ``max_length`` is more than the model takes, or ``context_len`` more
                than ``max_length``.
        """
        import torch

        ids = token_ids_of("text", token_ids, self._known)
        limit = self._engine.max_context
        given = integer("max_length", max_length, least=1, optional=True) or limit
        if limit is not None and given is not None and given > limit:
            raise InvalidOptionError(
                f"max_length={given} exceeds the {limit} tokens that the model takes; give at most "
                "these, or None"
            )
        least = integer("context_len", context_len, least=1)
        if given is not None and least > given:
            raise InvalidOptionError(
                f"context_len={least} exceeds the {given} tokens of a window; give at most these"
            )
        windows = rolling_windows(len(ids), given or max(len(ids), least), least)
        score = self._continuations.score
        scores = await all_of(
            score(self._query(ids[begin:first], lora_name, end - first), ids[first:end])
            for begin, first, end in windows
        )
        return torch.cat(scores) if scores else torch.empty(0, device=self._engine.device)

    # --- blocking ---------------------------------------------------------------------------------

    sample_sync = blocking_form(sample)
    """:meth:`sample`, blocking."""

    batch_sample_sync = blocking_form(batch_sample)
    """:meth:`batch_sample`, blocking."""

    sample_particles_sync = blocking_form(sample_particles)
    """:meth:`sample_particles`, blocking."""

    sequence_logprobs_sync = blocking_form(sequence_logprobs)
    """:meth:`sequence_logprobs`, blocking."""

    batch_sequence_logprobs_sync = blocking_form(batch_sequence_logprobs)
    """:meth:`batch_sequence_logprobs`, blocking."""

    rolling_logprobs_sync = blocking_form(rolling_logprobs)
    """:meth:`rolling_logprobs`, blocking."""

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

    @property
    def _known(self) -> int:
        """How many ids can be scored: rows have no place for what the tokenizer lacks, nor for what
        the model lacks."""
        return min(self._engine.vocab_size, self._engine.width)

    def _scored(
        self,
        prompt_token_ids: Iterable[int],
        continuation_token_ids: Iterable[int],
        lora_name: LoraName,
    ) -> tuple[Query, TokenIds]:
        most = self._engine.max_context
        continuation = token_ids_of("continuation", continuation_token_ids, self._known, most)
        return self._query(prompt_token_ids, lora_name, room_for=len(continuation)), continuation

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
