"""The methods of a model that draw and score continuations."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar, Unpack

from genlm.core.adapters import UNSET, LoraName
from genlm.core.checks import integer
from genlm.core.context import contexts_of, token_ids_of
from genlm.core.drawer import TokenDrawer
from genlm.core.errors import InvalidOptionError, InvalidQueryError, UnsupportedError
from genlm.core.hints import ARGUMENTS, known_keywords
from genlm.core.rows import RowsMixin
from genlm.core.runtime.askers import all_of, blocking
from genlm.core.sampling import Particle, SamplingOptions, checked_params, seeded
from genlm.core.scoring import MIN_GREEDY_LOGPROB, Score, rolling_windows
from genlm.core.types import Query, SampleRequest, SamplingParams, ScoreRequest, TokenIds

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")

#: How many prefixes of one continuation are requested at a time if the engine does not score
#: itself. Each may take as much KV cache as the whole context.
MAX_PREFIXES_AT_ONCE = 32

#: Queries, each with a continuation.
Continuations = Sequence[tuple[Query, TokenIds]]

#: Queries, each with the parameters of a sample.
Draws = Sequence[tuple[Query, SamplingParams]]


def blocking_form(
    ask: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """A method that does the same and blocks. It takes the same arguments."""

    @functools.wraps(ask, updated=())  # the attribute that marks coroutines is not copied
    def asks(self: GenerationMixin, /, *given: P.args, **options: P.kwargs) -> T:
        self._batcher.require_open()
        own: Callable[P, Coroutine[Any, Any, T]] = getattr(self, ask.__name__)
        return blocking(own(*given, **options), self._batcher.result_of)

    asks.__name__, asks.__doc__ = f"{ask.__name__}_sync", f":meth:`{ask.__name__}`, blocking."
    asks.__qualname__ = f"{ask.__qualname__}_sync"
    return known_keywords(asks)


class Drawing(AsyncGenerator[int, None]):
    """The ids of a sample, as they are drawn."""

    def __init__(self, tokens: AsyncGenerator[int, None]) -> None:
        self._tokens = tokens

    async def asend(self, value: None) -> int:
        return await self._tokens.asend(value)

    async def athrow(self, *error: Any) -> int:
        return await self._tokens.athrow(*error)

    async def aclose(self) -> None:  # the inherited method fails if the sample has ended
        await self._tokens.aclose()

    def __await__(self) -> NoReturn:
        raise UnsupportedError(
            f"a stream works neither with await nor with a plain for: {ARGUMENTS['stream']}"
        )

    __iter__ = __await__


class GenerationMixin(RowsMixin):
    """The methods of :class:`~genlm.core.lm.AsyncLM` that draw and score: by the engine if it can,
    otherwise from rows."""

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
                ``None`` means :attr:`eos_token_ids`, and ``[]`` means no stop token.
            temperature: Divides the log-probabilities; 0 takes the most likely token each time.
            seed: Makes the result reproducible, whatever else is asked at the same time.
            lora_name: The adapter.
            top_k: Draw among the ``top_k`` most likely tokens.
            top_p: Draw among the fewest most likely tokens that have at least this share of the
                mass that ``top_k`` leaves.
            min_p: Draw among tokens at least this fraction as likely as the most likely one.

        Stop strings, penalties and beam search can be built on top of a model: the page "What to
        build on top" shows how.

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
            InvalidOptionError: an argument is out of range or unknown (a ``ValueError``).
        """
        params = self._params(max_tokens, eos_token_ids, temperature, seed, top_k, top_p, min_p)
        query = self._query(prompt_token_ids, lora_name, room_for=params.max_tokens)
        return (await self._drawn([(query, params)]))[0]

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
        """Draw one continuation for each prompt.

        The call raises the error of a sample that fails. To keep the other samples, use
        ``asyncio.gather`` of :meth:`sample` with ``return_exceptions=True``.

        Args:
            prompt_token_ids_list: The prompts.
            max_tokens: The most tokens of each continuation.
            eos_token_ids: The stop tokens, as in :meth:`sample`.
            temperature: As in :meth:`sample`.
            seed: With a seed, each position in the list has its own random stream; the first is
                that of :meth:`sample`.
            lora_name: The adapter.
            top_k: As in :meth:`sample`.
            top_p: As in :meth:`sample`.
            min_p: As in :meth:`sample`.

        Raises:
            InvalidOptionError: an argument is out of range or unknown.
        """
        params = self._params(max_tokens, eos_token_ids, temperature, seed, top_k, top_p, min_p)
        queries = self._queries(prompt_token_ids_list, lora_name, room_for=params.max_tokens)
        own = seeded(params, len(queries))
        return await self._drawn(list(zip(queries, own, strict=True)))

    @known_keywords
    def stream(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        eos_token_ids: Iterable[int] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[int, None]:
        """Draw a continuation token by token: an asynchronous iterator of ids, without the stop
        token. The tokens are drawn from rows, with one request for each token, and only when the
        loop asks for the next one. So after a ``break`` nothing more is drawn, and cancelling the
        loop cancels its request. Like any async generator, a stream cannot be continued after a
        cancellation or a timeout.

        Args:
            prompt_token_ids: The prompt.
            max_tokens: The most tokens to draw; 0 draws none.
            eos_token_ids: The stop tokens, as in :meth:`sample`.
            **options: The keywords of :meth:`sample`. With a seed, the tokens are those of
                :meth:`sample`, unless the engine draws :meth:`sample` itself.

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
            InvalidOptionError: an argument is out of range or unknown.
        """
        query, params = self._checked_draw(
            prompt_token_ids, max_tokens, eos_token_ids=eos_token_ids, **options
        )
        return Drawing(self._stream(query, params))

    @known_keywords
    async def sample_particles(
        self,
        prompt_token_ids: Iterable[int],
        n: int,
        max_tokens: int,
        eos_token_ids: Iterable[int] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Particle]:
        """Draw ``n`` continuations of one prompt, each with its log-probability under the model and
        under the proposal that it was drawn from. They are drawn from rows. If you need no
        log-probabilities, ``batch_sample([prompt] * n, max_tokens)`` is faster on engines that draw
        themselves.

        Args:
            prompt_token_ids: The prompt.
            n: The number of continuations, at least 1. With a ``seed`` each has its own random
                stream.
            max_tokens: The most tokens of each continuation.
            eos_token_ids: The stop tokens, as in :meth:`sample`.
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
            InvalidOptionError: an argument is out of range or unknown.
        """
        query, params = self._checked_draw(
            prompt_token_ids, max_tokens, eos_token_ids=eos_token_ids, **options
        )
        own = seeded(params, integer("n", n, least=1))
        return await self._particles([(query, each) for each in own])

    @known_keywords
    async def sequence_logprobs(
        self,
        prompt_token_ids: Iterable[int],
        continuation_token_ids: Iterable[int],
        lora_name: LoraName = UNSET,
    ) -> torch.Tensor:
        """The log-probability of each token of a continuation, given all tokens before it.

        Args:
            prompt_token_ids: The prompt.
            continuation_token_ids: The continuation; at least one token.
            lora_name: The adapter.

        Returns:
            ``[len(continuation_token_ids)]`` float32.

        Raises:
            InvalidQueryError: the continuation is empty or has an invalid token id.
        """
        pair = self._checked_score(prompt_token_ids, continuation_token_ids, lora_name)
        (scores,) = await self._scores([pair])
        return scores.clone()

    @known_keywords
    async def batch_sequence_logprobs(
        self,
        prompt_token_ids_list: Iterable[Iterable[int]],
        continuation_token_ids_list: Iterable[Iterable[int]],
        lora_name: LoraName = UNSET,
    ) -> list[Score]:
        """The log-probability of each continuation given its prompt, and whether greedy decoding
        gives it: multiple choice, as lm-evaluation-harness needs it.

        Equal pairs are computed once. ``[prompt] * len(answers)`` scores several answers to one
        prompt. To get the ids of an answer, encode the prompt and the answer together and leave out
        the prompt's ids: the answer encoded alone may begin with another space or a special token.

        Args:
            prompt_token_ids_list: The prompts.
            continuation_token_ids_list: The continuations, one for each prompt.
            lora_name: The adapter.

        Returns:
            The score of each pair.

        Examples:
            >>> import asyncio
            >>> from genlm.core import load_model_by_name
            >>> async def best(lm, question, answers):
            ...     prompt = lm.encode(question)
            ...     ids = [lm.encode(question + answer)[len(prompt) :] for answer in answers]
            ...     scores = await lm.batch_sequence_logprobs([prompt] * len(ids), ids)
            ...     return max(zip(scores, answers))[1]
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     asyncio.run(best(lm, "Two and two are", [" four", " a dog"]))
            ' four'

        Raises:
            InvalidQueryError: a continuation is empty or has an invalid token id, or the numbers of
                prompts and continuations differ.
        """
        prompts = contexts_of(prompt_token_ids_list)
        continuations = contexts_of(continuation_token_ids_list)
        if len(prompts) != len(continuations):
            raise InvalidQueryError(
                f"there are {len(prompts)} prompts and {len(continuations)} continuations; give "
                "each continuation its prompt, such as [prompt] * n for n continuations of one "
                "prompt"
            )
        pairs = [
            self._checked_score(prompt, continuation, lora_name)
            for prompt, continuation in zip(prompts, continuations, strict=True)
        ]
        scores = await self._native_scores(pairs)
        return await all_of(
            self._judge(*pair, own) for pair, own in zip(pairs, scores, strict=True)
        )

    @known_keywords
    async def rolling_logprobs(
        self,
        token_ids: Iterable[int],
        max_length: int | None = None,
        context_len: int = 1,
        lora_name: LoraName = UNSET,
        *,
        keep: int = 0,
    ) -> torch.Tensor:
        """The log-probability of each token of a text after its first, however long it is:
        ``[len(token_ids) - 1]`` float32. ``exp(-mean)`` of them is the perplexity.

        A text longer than ``max_length`` is scored in windows, each token once. The first token of
        the text is not scored, so put another token before the text, such as the tokenizer's
        beginning of a sequence.

        Args:
            token_ids: The text, of any length.
            max_length: The most tokens of a context; ``None`` is :attr:`max_context`.
            context_len: The fewest tokens of context that each token after the first window gets.
                lm-evaluation-harness uses 1. A larger number is closer to scoring the text as a
                whole, and costs ``max_length / (max_length - context_len + 1)`` times as much.
            lora_name: The adapter.
            keep: How many of the text's first tokens are put before every window. Use 1 for models
                that were trained with a beginning-of-sequence token in every context, such as
                Gemma. lm-evaluation-harness uses 0.

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
            InvalidOptionError: ``max_length`` is more than the model takes, or ``context_len`` and
                ``keep`` together more than ``max_length``.
        """
        import torch

        ids = token_ids_of("text", token_ids, self._scorable)
        limit = self._engine.max_context
        given = integer("max_length", max_length, least=1, optional=True) or limit
        if limit is not None and given is not None and given > limit:
            raise InvalidOptionError(
                f"max_length={given} exceeds the {limit} tokens that the model takes; give at most "
                f"{limit}, or None"
            )
        least = integer("context_len", context_len, least=1)
        kept = integer("keep", keep, least=0)
        if given is not None and least + kept > given:
            both = f"context_len={least}" + (f" and keep={kept} exceed" if kept else " exceeds")
            raise InvalidOptionError(
                f"{both} the {given} tokens of a window; give a sum of at most {given}"
            )
        windows = rolling_windows(len(ids), given or max(len(ids), least + kept), least, kept)
        scores = await self._scores(
            [
                (
                    self._query(
                        (ids[:kept] if begin else ()) + ids[begin:first], lora_name, end - first
                    ),
                    ids[first:end],
                )
                for begin, first, end in windows
            ]
        )
        none = torch.empty(0, dtype=torch.float32, device=self._engine.device)
        return torch.cat(scores) if scores else none

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

    # --- drawing ----------------------------------------------------------------------------------

    async def _drawn(self, draws: Draws) -> list[list[int]]:
        """The ids of one continuation of each query, without the stop token."""
        drawn: list[list[int] | None] = [None] * len(draws)
        if (
            draws
            and "samples" in self._engine.native
            and draws[0][1].max_tokens
            and draws[0][1].min_p is None
        ):
            drawn = await self._batcher.submit([SampleRequest(*draw) for draw in draws], list)
        left = [draw for draw, ids in zip(draws, drawn, strict=True) if ids is None]
        particles = iter(await self._particles(left))
        return [list(next(particles).token_ids) if ids is None else ids for ids in drawn]

    async def _particles(self, draws: Draws) -> list[Particle]:
        """One continuation of each query from rows, with its log-probabilities. They are drawn
        together: one call for the next rows of all that go on."""
        drawers = [TokenDrawer(params) for _, params in draws]
        queries = [query for query, _ in draws]
        drawn: list[list[int]] = [[] for _ in draws]
        stops: list[int | None] = [None for _ in draws]
        live = [i for i, (_, params) in enumerate(draws) if params.max_tokens]
        while live:
            tokens = await self._next_tokens([drawers[i] for i in live], [queries[i] for i in live])
            going_on = []
            for i, token_id in zip(live, tokens, strict=True):
                params = draws[i][1]
                if token_id in params.stop_token_ids:
                    stops[i] = token_id
                    continue
                drawn[i].append(token_id)
                if len(drawn[i]) < params.max_tokens:
                    queries[i] = queries[i].extended((token_id,))
                    going_on.append(i)
            live = going_on
        return [
            Particle(tuple(ids), stop, drawer.logprob, drawer.proposal_logprob)
            for ids, stop, drawer in zip(drawn, stops, drawers, strict=True)
        ]

    async def _stream(self, query: Query, params: SamplingParams) -> AsyncGenerator[int, None]:
        drawer = TokenDrawer(params)
        for _ in range(params.max_tokens):
            (token_id,) = await self._next_tokens([drawer], [query])
            if token_id in params.stop_token_ids:
                return
            yield token_id
            query = query.extended((token_id,))

    # --- scoring ----------------------------------------------------------------------------------

    async def _scores(self, asked: Continuations) -> list[torch.Tensor]:
        """The log-probabilities of each continuation's tokens; they are not the caller's own."""
        native = await self._native_scores(asked)
        declined = [pair for pair, own in zip(asked, native, strict=True) if own is None]
        computed = iter(await all_of(self._scores_from_rows(*pair) for pair in declined))
        return [next(computed)[0] if own is None else own for own in native]

    async def _native_scores(self, asked: Continuations) -> list[torch.Tensor | None]:
        """The scores that the engine makes itself; ``None`` in the places of the others."""
        if not asked or "scores" not in self._engine.native:
            return [None] * len(asked)
        return await self._batcher.submit([ScoreRequest(*pair) for pair in asked], list)

    async def _judge(
        self, query: Query, continuation: TokenIds, scores: torch.Tensor | None
    ) -> Score:
        """A continuation's log-probability, and whether it is the greedy one, given what the engine
        has scored."""
        if scores is None:
            scores, likeliest = await self._scores_from_rows(query, continuation)
            return Score(float(scores.double().sum()), likeliest == list(continuation))
        is_greedy = True
        for end, logprob in enumerate(scores.tolist()):
            if logprob < MIN_GREEDY_LOGPROB:
                row = (await self._rows([query.extended(continuation[:end])]))[0]
                if int(row.argmax()) != continuation[end]:
                    is_greedy = False
                    break
        return Score(float(scores.double().sum()), is_greedy)

    async def _scores_from_rows(
        self, query: Query, continuation: TokenIds
    ) -> tuple[torch.Tensor, list[int]]:
        """The scores from rows, and the most likely token in each token's place."""
        import torch

        scored: list[torch.Tensor] = []
        likeliest: list[int] = []
        for start in range(0, len(continuation), MAX_PREFIXES_AT_ONCE):
            ids = continuation[start : start + MAX_PREFIXES_AT_ONCE]
            rows = await self._rows([query.extended(ids[:end]) for end in range(len(ids))])
            scored.append(rows[range(len(ids)), ids])
            likeliest += rows.argmax(-1).tolist()
            query = query.extended(ids)
        return torch.cat(scored), likeliest

    # --- checks -----------------------------------------------------------------------------------

    def _checked_draw(
        self,
        prompt_token_ids: Iterable[int],
        max_tokens: int,
        lora_name: LoraName = UNSET,
        **options: Any,
    ) -> tuple[Query, SamplingParams]:
        params = self._params(max_tokens, **options)
        return self._query(prompt_token_ids, lora_name, room_for=params.max_tokens), params

    @property
    def _scorable(self) -> int:
        """How many ids can be scored: rows have no place for what the tokenizer lacks, nor for what
        the model lacks."""
        return min(self._engine.vocab_size, self._engine.width)

    def _checked_score(
        self,
        prompt_token_ids: Iterable[int],
        continuation_token_ids: Iterable[int],
        lora_name: LoraName,
    ) -> tuple[Query, TokenIds]:
        most = self._engine.max_context
        continuation = token_ids_of("continuation", continuation_token_ids, self._scorable, most)
        return self._query(prompt_token_ids, lora_name, room_for=len(continuation)), continuation

    def _params(
        self, max_tokens: int, eos_token_ids: Iterable[int] | None = None, *how: Any, **options: Any
    ) -> SamplingParams:
        stops = self.eos_token_ids if eos_token_ids is None else eos_token_ids
        params = checked_params(max_tokens, stops, *how, **options)
        width = len(self.byte_vocab)
        if (most := max(params.stop_token_ids, default=0)) >= width:
            raise InvalidOptionError(
                f"eos_token_ids has {most}, which is out of range; the model has ids 0 to "
                f"{width - 1}"
            )
        return params
