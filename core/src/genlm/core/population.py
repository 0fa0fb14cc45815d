"""A population: particles that grow together, in tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from genlm.core.checks import integer, safe_repr
from genlm.core.context import Context, token_ids_of
from genlm.core.drawer import CPU_CHUNK_NUMBERS, on_cpu
from genlm.core.errors import InvalidInputError
from genlm.core.together import NUMBERS_PER_CALL, Then, Thens, each_of, results_of
from genlm.core.vectors import as_tensor, is_integral

if TYPE_CHECKING:
    import torch

    from genlm.core.rows import RowsMixin

R = TypeVar("R")


class Population:
    """``n`` contexts that begin with one prompt and grow together, a token at a time. Made by
    :meth:`~genlm.core.lm.AsyncLM.population`.

    Every array is a tensor on the engine's device whose first dimension is ``n``. The row of a
    particle that has ended is log-probability 0 at its last token, and ``-inf`` elsewhere. So such
    a particle draws that token again, with weight 1, and a program needs no special case for it.

    The rows are those of :meth:`~genlm.core.lm.AsyncLM.batch_next_token_logprobs`, with its cache,
    adapters and wrappers. Equal particles are computed once. Only one coroutine at a time may use a
    population. A request that fails or is cancelled does not change the population.

    Attributes:
        n: The number of particles.
        device: The PyTorch device of its tensors.
        prompt: The context that all particles begin with.
        length: ``[n]`` int64: the number of tokens of each particle, prompt included.
        ended: ``[n]`` bool: which particles have ended.

    Examples:
        Sequential Monte Carlo over texts of the letters a and b:

        >>> import asyncio, torch
        >>> from genlm.core import load_model_by_name
        >>> from genlm.core.resampling import log_mean_weight, systematic
        >>> allowed = torch.tensor([97, 98])
        >>> async def smc(lm, n, steps):
        ...     source = torch.Generator().manual_seed(0)
        ...     particles = lm.population([72], n)
        ...     log_weights, log_constant = torch.zeros(n), 0.0
        ...     for _ in range(steps):
        ...         rows = (await particles.logprobs())[:, allowed]
        ...         drawn = rows.exp().multinomial(1, generator=source)[:, 0]
        ...         log_weights += rows.logsumexp(-1)
        ...         particles.extend(allowed[drawn])
        ...         log_constant += log_mean_weight(log_weights)
        ...         uniform = float(torch.rand((), generator=source))
        ...         particles.select(systematic(log_weights, uniform))
        ...         log_weights = torch.zeros(n)
        ...     return particles, log_constant
        >>> with load_model_by_name("mock", backend="mock") as lm:
        ...     particles, log_constant = asyncio.run(smc(lm, n=50, steps=3))
        >>> particles.tokens.shape, bool((particles.tokens[:, 1:] <= 98).all())
        (torch.Size([50, 4]), True)
    """

    def __init__(self, lm: RowsMixin, prompt: Context, n: int, lora_name: str | None) -> None:
        import torch

        self._lm, self._lora_name = lm, lora_name
        self.n, self.prompt = integer("n", n, least=1), prompt
        self.device = torch.device(lm._engine.device)
        ids = torch.tensor(prompt.token_ids, device=self.device)
        self._tokens = ids.expand(self.n, -1).clone()
        self._longest = prompt.length  # of the longest particle
        self.length = torch.full((self.n,), prompt.length, device=self.device)
        self.ended = torch.zeros(self.n, dtype=torch.bool, device=self.device)
        # The same state on the host, where requests are made: contexts and, for ended particles,
        # their last token.
        self._contexts = [prompt] * self.n
        self._last: list[int | None] = [None] * self.n

    @property
    def tokens(self) -> torch.Tensor:
        """``[n, longest]`` int64: the ids of each particle, prompt included, and 0 beyond its
        length. The token with which a particle has ended is not among them."""
        return self._tokens[:, : self._longest]

    @property
    def continuations(self) -> list[list[int]]:
        """The ids of each particle after the prompt."""
        ids = self._tokens[:, self.prompt.length :].tolist()
        return [
            own[: len(each) - self.prompt.length]
            for own, each in zip(ids, self._contexts, strict=True)
        ]

    # --- rows -------------------------------------------------------------------------------------

    @overload
    async def logprobs(self, *, then: None = None) -> torch.Tensor: ...

    @overload
    async def logprobs(self, *, then: Thens[R]) -> list[R]: ...

    async def logprobs(self, *, then: Thens[Any] | None = None) -> Any:
        """The rows of all particles, ``[n, len(lm.byte_vocab)]`` float32, which belong to the
        caller; with ``then``, the list of the functions' results.

        Args:
            then: As for :meth:`~genlm.core.lm.AsyncLM.batch_next_token_logprobs`: one for all
                particles, or one for each.
        """
        if then is not None:
            return await self._made(each_of(then, self.n))
        rows, places = await self._asked(0, self.n)
        return self._rows(rows, places, 0)

    async def parts(self) -> AsyncIterator[tuple[slice, torch.Tensor]]:
        """The rows of all particles in parts: pairs of a slice of the particles and their rows.

        For populations whose rows together are too many for the memory: 10,000 rows of 49,152
        tokens take 2 GB. Each part has at most 256 MiB of rows, but at least one row. On a CPU,
        parts fit into the CPU's cache, because larger parts are slower to compute with.
        """
        width = len(self._lm.byte_vocab)
        most = max(1, NUMBERS_PER_CALL // width)
        some = max(1, CPU_CHUNK_NUMBERS // width) if on_cpu(self.device) else most
        for begin in range(0, self.n, most):
            end = min(begin + most, self.n)
            rows, places = await self._asked(begin, end)
            for start in range(begin, end, some):
                part = slice(start, min(start + some, end))
                own = places[start - begin : part.stop - begin]
                yield part, self._rows(rows, own, start)

    async def _asked(self, begin: int, end: int) -> tuple[torch.Tensor, list[int]]:
        """The rows of different contexts, and the place of each particle's row among them."""
        wanted: dict[Context, int] = {}
        own = zip(self._contexts[begin:end], self._last[begin:end], strict=True)
        places = [
            wanted.setdefault(context, len(wanted)) if last is None else 0 for context, last in own
        ]
        rows = await self._lm.batch_next_token_logprobs([*wanted], self._lora_name)
        return rows, places

    def _rows(self, rows: torch.Tensor, places: list[int], start: int) -> torch.Tensor:
        """The rows of the particles from ``start`` on, including ended particles."""
        import torch

        last = self._last[start : start + len(places)]
        over = [(at, token) for at, token in enumerate(last) if token is not None]
        if len(over) == len(places):
            rows = rows.new_empty(len(places), len(self._lm.byte_vocab))
        elif places != [*range(len(rows))]:
            rows = rows.index_select(0, torch.tensor(places, device=rows.device))
        if over:
            at, tokens = torch.tensor(over, device=rows.device).T
            rows[at] = -torch.inf
            rows[at, tokens] = 0.0
        return rows

    async def _made(self, thens: Sequence[Then[R]]) -> list[R]:
        live = [at for at, last in enumerate(self._last) if last is None]
        asked = self._lm.batch_next_token_logprobs(
            [self._contexts[at] for at in live], self._lora_name, then=[thens[at] for at in live]
        )
        made: dict[int, Any] = dict(zip(live, await asked, strict=True))
        over = [at for at in range(self.n) if at not in made]
        for at, result in zip(over, self._made_of_ended(thens, over), strict=True):
            if isinstance(result, Exception):
                raise result
            made[at] = result
        return [made[at] for at in range(self.n)]

    def _made_of_ended(self, thens: Sequence[Then[R]], over: Sequence[int]) -> list[Any]:
        """The results for the rows of ended particles."""
        import torch

        points: dict[int | None, torch.Tensor] = {}
        for token in {self._last[at] for at in over}:
            points[token] = torch.full((len(self._lm.byte_vocab),), -torch.inf, device=self.device)
            points[token][token] = 0.0
        return results_of([thens[at] for at in over], [points[self._last[at]] for at in over])

    # --- growing ----------------------------------------------------------------------------------

    def extend(self, token_ids: Any, ended: Any = None) -> None:
        """Add a token to every particle that has not ended, or end the particle with it. Waits for
        the device once.

        Args:
            token_ids: ``[n]`` The tokens. Tokens for particles that have ended are ignored.
            ended: ``[n]`` bool: which particles end with their token, which then does not become
                part of them; ``None`` ends none. A particle that has ended stays ended.

        Raises:
            InvalidInputError: an argument does not have ``n`` elements, ``token_ids`` are not
                integers, or ``ended`` are not booleans.
            InvalidQueryError: a token is not a token id of the model.
        """
        import torch

        ids = self._vector("token_ids", token_ids, torch.long)
        over = (
            self.ended if ended is None else self.ended | self._vector("ended", ended, torch.bool)
        )
        drawn, gone = torch.stack([ids, over.long()]).tolist()  # the only wait for the device
        token_ids_of(
            "extension",
            [token for token, last in zip(drawn, self._last, strict=True) if last is None],
            self.prompt.vocab_size,
            least=0,
        )
        self._grow_to(self._longest + 1)
        grows = ~over
        place = self.length[:, None]
        old = self._tokens.gather(1, place)
        self._tokens.scatter_(1, place, torch.where(grows[:, None], ids[:, None], old))
        self.length, self.ended = self.length + grows, over
        self._longest += 1
        for at, (token, end) in enumerate(zip(drawn, gone, strict=True)):
            if not end:
                self._contexts[at] = self._contexts[at].followed_by((token,))
            elif self._last[at] is None:
                self._last[at] = token

    def select(self, ancestors: Any) -> None:
        """Resample: replace each particle ``i`` by a copy of particle ``ancestors[i]``. Waits for
        the device once.

        Args:
            ancestors: ``[n]`` Indices of particles, such as those of
                :mod:`genlm.core.resampling`.

        Raises:
            InvalidInputError: ``ancestors`` does not have ``n`` elements, or an element is not in
                ``range(n)``.
        """
        import torch

        chosen = self._vector("ancestors", ancestors, torch.long)
        places = chosen.tolist()
        if min(places) < 0 or max(places) >= self.n:
            raise InvalidInputError(
                f"ancestors must be indices of particles, 0 to {self.n - 1}; got {min(places)} to "
                f"{max(places)}"
            )
        self._tokens = self._tokens.index_select(0, chosen)
        self.length, self.ended = self.length[chosen], self.ended[chosen]
        self._contexts = [self._contexts[at] for at in places]
        self._last = [self._last[at] for at in places]

    def _grow_to(self, columns: int) -> None:
        """Make room for this many tokens of each particle, and for some more, so that not every
        token needs a copy."""
        import torch

        if (missing := columns - self._tokens.shape[1]) > 0:
            room = max(missing, self._tokens.shape[1] // 2)
            self._tokens = torch.nn.functional.pad(self._tokens, (0, room))

    def _vector(self, name: str, given: Any, dtype: torch.dtype) -> torch.Tensor:
        """``[n]`` numbers that the program has given, on the device."""
        import torch

        vector = as_tensor(given)
        wanted = vector is not None and (
            vector.dtype == torch.bool if dtype == torch.bool else is_integral(vector)
        )
        if vector is None or vector.shape != (self.n,) or not wanted:
            kind = "booleans" if dtype == torch.bool else "integers"
            raise InvalidInputError(
                f"{name} must be {self.n} {kind}, one for each particle; got {safe_repr(given)}"
            )
        return vector.to(self.device, dtype)
