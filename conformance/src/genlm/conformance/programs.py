"""Random programs, through the hooks of an engine: contexts that go on, fork, are cut, share a
prompt or are new; samples and scores of them; kept state and adapters that come and go. Every
answer is compared.

There are two random testers, by intent. A program calls hooks itself, one after the other, and what
it asks follows from what was answered: contexts go on from drawn tokens, for thousands of steps. So
it cannot be made simpler, and reaches states that no list of requests does. A schedule
(:mod:`genlm.conformance.schedule`) asks a model through the core, with callers that leave and
adapters that move; it draws from a fixed list of requests, whose result alone is asked once, and
Hypothesis makes it simpler. One generator for both would lose either the simplification or the
contexts that follow from answers."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import define, field

from genlm.conformance.compare import Violation, check
from genlm.core.errors import EngineError
from genlm.core.tokenization import decode_vocab
from genlm.core.types import (
    Adapter,
    Answer,
    Query,
    Request,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TokenIds,
    query_of,
)

if TYPE_CHECKING:
    import torch

#: The most tokens of all new requests of a step, unless there is only one request.
MAX_NEW_TOKENS = 6000

#: How many contexts go on in a step.
STEP_SIZES = (1, 2, 5, 5, 12, 40)

#: Within this many steps every request in flight must be answered.
MAX_STEPS = 20_000

#: The most tokens that are scored, the numbers of tokens to score and to draw, and the most places
#: that are compared.
MAX_SCORED_TOKENS = 70
SCORED_TOKENS = (1, 2, 5, MAX_SCORED_TOKENS)
DRAWN_TOKENS = (1, 2, 5, 5, 20, 100)
COMPARED_PLACES = 8

#: The versions of adapters. No version is used twice, also not by another program.
VERSIONS = itertools.count(1)


def call(engine: Any, hook: str, **given: Any) -> Any:
    """Call a hook of an engine as the core does: with those of the arguments that it names.
    Without such a hook nothing is called, and the result is ``None``."""
    own = getattr(engine, hook, None)
    if own is None:
        return None
    named = inspect.signature(own).parameters
    return own(**{name: value for name, value in given.items() if name in named})


@define(eq=False, kw_only=True)
class Program:
    """A random program that calls an engine's hooks as the core does, and compares the answers. The
    same engine and the same state of ``source`` give the same program.

    By default rows are compared with the engine's own cold rows. A subclass may override
    :meth:`expected` to compare them with other rows, and :meth:`ways` to change the actions.

    Args:
        engine: An object with the hooks of an engine.
        source: The random generator that makes all choices.
        longest: The longest context, in tokens.
        tokens: The token ids that contexts are made of.
        first: The context that the first extensions start from; if it is empty, three random
            tokens.
        adapters: The folders of LoRA adapters, by the names to bind them to.
        chunk: The engine's chunk size, in tokens. Some prefixes end at or next to its multiples.
        most: The most contexts that one step extends.
        atol: The absolute tolerance of log-probabilities, in nats.
        share: The share of answers that are compared, from 0 to 1.
        may_lack_room: Whether the engine may reject a prefix to pin for lack of room.
        seeds: Whether some samples have a seed. A seeded sample must be the same when it is drawn
            alone, but rounding may change one sample in many thousands.
    """

    engine: Any
    source: random.Random
    longest: int
    tokens: Sequence[int] = range(256)
    first: Sequence[int] = ()
    adapters: Mapping[str, str] = field(factory=dict)
    chunk: int = 16
    most: int = 40
    atol: float = 5e-4
    share: float = 1.0
    may_lack_room: bool = False
    seeds: bool = False
    #: The number of operations and of comparisons, by kind.
    counts: Counter[str] = field(factory=Counter, init=False)
    #: The requests in flight, in the order asked.
    in_flight: dict[Request, None] = field(factory=dict, init=False)
    #: The adapters that are bound now, by name.
    bound: dict[str, Adapter] = field(factory=dict, init=False)
    _known: list[Query] = field(factory=list, init=False)
    _answered: list[Answer] = field(factory=list, init=False)
    _width: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._known.append(self._begin())

    # --- hooks for subclasses ---------------------------------------------------------------------

    def ways(self) -> dict[Callable[[], None], int]:
        """The possible actions, each with its weight in the random choice."""
        return {
            self.step: 60, self.drained: 12, self.score: 8, self.draw: 8, self.cold: 4,
            self.pin: 3, self.clear: 2, self.adapt: 5,
        }  # fmt: skip

    def expected(self, query: Query) -> torch.Tensor:
        """The right row of a context, ``[vocab_size]``. Called only while nothing is in flight."""
        row: torch.Tensor = self.alone(Query(query.context, query.adapter, cold=True))
        return row

    def compare_row(self, query: Query, row: torch.Tensor, of: slice = slice(None)) -> None:
        """Compare the row of a context with the right row.

        Args:
            query: The context and the adapter.
            row: The row, or the part of it that ``of`` selects.
            of: The entries to compare.

        Raises:
            Violation: the row differs by more than ``atol``.
        """
        right = self.expected(query)[of].double()
        given = row.double()
        if not given.allclose(right, rtol=0.0, atol=self.atol, equal_nan=True):
            off = float((given - right).abs().nan_to_num(math.inf).max())
            raise Violation(
                f"{query}: a log-probability differs by {off:.3g} from its cold row (tolerance "
                f"{self.atol:g})"
            )

    def adapter(self) -> tuple[str, str] | None:
        """An adapter to bind now: a name and a folder; ``None`` if there are no adapters."""
        return self.source.choice([*self.adapters.items()]) if self.adapters else None

    def fresh(self, count: int) -> TokenIds:
        """``count`` random tokens."""
        return tuple(self.source.choices(self.tokens, k=count))

    def width(self) -> int:
        """How many token ids may be drawn: the size of the tokenizer's vocabulary. Rows may be
        wider."""
        if not self._width:
            self._width = len(decode_vocab(self.engine.tokenizer)[0])
        return self._width

    def look(self) -> None:
        """Check conditions that must hold at any time. Called after each action; checks nothing by
        default."""

    # --- the actions ------------------------------------------------------------------------------

    def run(self, times: int) -> None:
        """Perform ``times`` random actions, then finish all requests in flight."""
        ways = self.ways()
        for _ in range(times):
            (way,) = self.source.choices([*ways], [*ways.values()])
            way()
            self.look()
        self.drained()

    def step(self) -> None:
        """Action: make a step with new requests, and drop some requests in flight."""
        may_leave = self.in_flight if self._takes("dropped") else ()
        leaving = [one for one in may_leave if self.source.random() < 0.1]
        for one in leaving:
            del self.in_flight[one]
        self.advance(self.some(), leaving)

    def drained(self) -> None:
        """Action: make steps until nothing is in flight, then compare the answers. Hooks that the
        core calls only while nothing is in flight call this method first."""
        for _ in range(MAX_STEPS):
            if not self.in_flight:
                break
            self.advance()
        check(
            not self.in_flight,
            f"{len(self.in_flight)} requests were not answered within {MAX_STEPS} steps",
        )
        answered, self._answered = self._answered, []
        # The longest comes first: a subclass may learn the rows of all its prefixes on the way.
        for one in sorted(answered, key=lambda one: -query_of(one.request).length):
            if self.source.random() < self.share:
                self._compare(one.request, one.result)

    def score(self) -> None:
        """Action: ask for scores, in a step if the engine takes scores in its steps."""
        some = [
            ScoreRequest(
                Query(one.context.first(max(self.longest - MAX_SCORED_TOKENS, 1)), one.adapter),
                self.fresh(min(self.source.choice(SCORED_TOKENS), self.longest)),
            )
            for one in self._few()
        ]
        if self.source.random() < 0.5:
            some += self._candidates(some[-1], self.source.choice([1, 3, 9]))
        if self._takes("scores"):
            self.advance(some)
            return
        self.drained()
        queries, tails = [one.query for one in some], [one.continuation for one in some]
        given = {"continuations": tails, "width": self.engine.vocab_size}  # Rows are as wide.
        scores = call(self.engine, "genlm_sequence_logprobs", queries=queries, **given)
        for request, score in zip(some, scores or [None] * len(some), strict=True):
            self._compare(request, score)

    def draw(self) -> None:
        """Action: ask for samples, if the engine takes samples in its steps."""
        if self._takes("samples"):
            room = [(one, self.longest - one.length) for one in self._few()]
            self.advance([SampleRequest(one, self._params(most)) for one, most in room if most])

    def cold(self) -> None:
        self.drained()
        one = self.source.choice(self._known)
        self.compare_row(one, self.alone(Query(one.context, one.adapter, cold=True)))

    def pin(self) -> None:
        self.drained()
        with suppress(*[EngineError] * self.may_lack_room):
            call(self.engine, "genlm_cache_prefix", query=self.source.choice(self._known))
            self.counts["pins"] += 1

    def clear(self) -> None:
        self.drained()
        call(self.engine, "genlm_clear_kv_cache")

    def adapt(self) -> None:
        """Action: bind a name, perhaps again, or remove an adapter."""
        self.drained()
        if self.bound and self.source.random() < 0.4:
            name = self.source.choice([*self.bound])
            self._now_bound(name, None)
        elif (found := self.adapter()) is not None:
            new = Adapter(*found, next(VERSIONS))
            contents = call(self.engine, "genlm_read_lora", adapter=new)
            call(self.engine, "genlm_add_lora", adapter=new, contents=contents)
            self._now_bound(new.name, new)

    def leave(self) -> None:
        """Remove all bound adapters, so that the engine can be used by another program."""
        for name in [*self.bound]:
            self._now_bound(name, None)

    def _now_bound(self, name: str, new: Adapter | None) -> None:
        old = self.bound.pop(name, None)
        if new is not None:
            self.bound[name] = new
        if old is not None:
            call(self.engine, "genlm_remove_lora", adapter=old)
        now = [
            Query(one.context, new) if old is not None and one.adapter == old else one
            for one in self._known
            if new is not None or old is None or one.adapter != old
        ]
        self._known = now or [self._begin()]

    # --- asking -----------------------------------------------------------------------------------

    def advance(self, new: Iterable[Request] = (), dropped: Sequence[Request] = ()) -> None:
        """Make one step with the new requests that are not in flight yet."""
        new_requests = [one for one in dict.fromkeys(new) if one not in self.in_flight]
        if not (new_requests or dropped or self.in_flight):
            return
        self.in_flight.update(dict.fromkeys(new_requests))
        for answer in self._step(new_requests, dropped):
            if answer.request in self.in_flight:
                del self.in_flight[answer.request]
                self._answered.append(answer)
                self._go_on(answer)
            else:
                # A request that is dropped may be answered in the same step.
                what = f"{query_of(answer.request)} was answered, and is not in flight"
                check(answer.request in dropped, what)

    def alone(self, request: Request) -> Any:
        """The engine's answer to a request while no other request is in flight."""
        answers = self._step([request], ())
        for _ in range(MAX_STEPS):
            if answers:
                return answers[0].result
            answers = self._step((), ())
        raise Violation(f"{query_of(request)} was not answered within {MAX_STEPS} steps, alone")

    def some(self) -> list[Query]:
        """Queries for the next step: known contexts extended, forked, cut short or under another
        adapter, prefixes of one prompt, the last positions of a draft, and new contexts."""
        source, room = self.source, MAX_NEW_TOKENS
        asked: dict[Query, None] = {}
        for known in source.choices(self._known[-60:], k=min(source.choice(STEP_SIZES), self.most)):
            one = self._grown(known)
            room -= one.length
            if room > 0 or not asked:
                asked[one] = None
        # Some steps ask for prefixes of one prompt, some of them a whole number of chunks.
        if source.random() < 0.15:
            whole = source.choice([*asked])
            for count in range(1, 5):
                stop = count * self.chunk + source.choice([0, 0, 1, -1])
                if 0 < stop <= whole.length:
                    asked[Query(whole.context.first(stop), whole.adapter)] = None
        # Others ask for the last places of one prompt.
        if source.random() < 0.15:
            whole = source.choice([*asked])
            for stop in range(max(whole.length - source.choice([1, 4, 20]), 1), whole.length):
                asked[Query(whole.context.first(stop), whole.adapter)] = None
        if source.random() < 0.3:
            length = source.choices([1, 2, 20, 100, 513, self.longest], [4, 4, 8, 4, 2, 1])[0]
            asked[Query(self.fresh(min(length, self.longest)), self._any_bound())] = None
        self._known = [*self._known[-200:], *asked]
        return [*asked]

    def _grown(self, one: Query) -> Query:
        """An extension of a query, perhaps from an earlier position or under another adapter. Its
        context may record which context it extends."""
        cut = self.source.choice([one.length] * 6 + [self.source.randint(1, one.length)])
        context = one.context if cut == one.length else one.context.first(cut)
        more = self.source.choice([0, 1, 1, 1, 1, 1, 2, 3, 9, 40])
        if tail := self.fresh(more)[: self.longest - cut]:
            context = context.followed_by(tail)
        adapter = self._any_bound() if self.source.random() < 0.3 else one.adapter
        return Query(context.token_ids if self.source.random() < 0.3 else context, adapter)

    def _begin(self) -> Query:
        return Query(tuple(self.first) or self.fresh(3))

    def _few(self) -> list[Query]:
        return self.source.choices(self._known, k=self.source.choice([1, 1, 3]))

    def _candidates(self, one: ScoreRequest, count: int) -> list[ScoreRequest]:
        """Others that begin as its continuation does."""
        cuts = self.source.choices(range(len(one.continuation)), k=count)
        ends = [self.fresh(self.source.randint(1, len(one.continuation) - cut)) for cut in cuts]
        return [
            ScoreRequest(one.query, one.continuation[:cut] + end)
            for cut, end in zip(cuts, ends, strict=True)
        ]

    def _any_bound(self) -> Adapter | None:
        return self.source.choice([None, *self.bound.values()])

    def _params(self, most: int) -> SamplingParams:
        count = min(self.source.choice(DRAWN_TOKENS), most)
        if self.seeds and self.source.random() < 0.5:
            return SamplingParams(count, seed=self.source.randrange(1000))
        return SamplingParams(count, temperature=0.0)

    def _takes(self, argument: str) -> bool:
        """Whether the engine takes something in its steps."""
        step = getattr(self.engine, "genlm_step", None)
        return step is not None and argument in inspect.signature(step).parameters

    def _step(self, new: Sequence[Request], dropped: Sequence[Request]) -> Sequence[Answer]:
        kinds: dict[type, list[Any]] = {Query: [], SampleRequest: [], ScoreRequest: []}
        for one in new:
            kinds[type(one)].append(one)
        queries, samples, scores = kinds.values()
        if not hasattr(self.engine, "genlm_step"):
            rows = call(self.engine, "genlm_next_token_logprobs", queries=queries)
            return [Answer(query, row) for query, row in zip(queries, rows, strict=True)]
        answers: Sequence[Answer] = call(
            self.engine,
            "genlm_step",
            queries=queries,
            samples=samples,
            scores=scores,
            dropped=dropped,
            width=getattr(self.engine, "vocab_size", None),  # a user of a model has none
        )
        return answers

    # --- comparing answers ------------------------------------------------------------------------

    def _go_on(self, answer: Answer) -> None:
        """Continue from drawn tokens."""
        request, drawn = answer.request, answer.result
        if isinstance(request, SampleRequest) and isinstance(drawn, Sequence) and drawn:
            self._known.append(request.query.extended(tuple(drawn)))

    def _compare(self, request: Request, result: Any) -> None:
        if isinstance(result, BaseException):
            raise result
        if result is None:  # declined
            return
        self.counts["answers"] += 1
        if isinstance(request, Query):
            self.compare_row(request, result)
        elif isinstance(request, SampleRequest):
            self._compare_draw(request, [*result])
        elif isinstance(request, ScoreRequest):
            self._compare_score(request, result)

    def _compare_score(self, request: ScoreRequest, scores: torch.Tensor) -> None:
        tokens = request.continuation
        check(
            len(scores) == len(tokens), f"a score of {len(tokens)} tokens has {len(scores)} numbers"
        )
        for at in self._places(len(tokens)):
            before = request.query.extended(tokens[:at]) if at else request.query
            self.compare_row(before, scores[at : at + 1], slice(tokens[at], tokens[at] + 1))

    def _compare_draw(self, request: SampleRequest, drawn: Sequence[int]) -> None:
        query, params = request.query, request.params
        what = f"{query}: a draw with {params} is {drawn}"
        check(len(drawn) == params.max_tokens, f"{what}, which has {len(drawn)} tokens")
        if params.seed is not None:
            alone = self.alone(SampleRequest(query, params))
            check(list(drawn) == list(alone), f"{what}; alone it is {alone}")
            return
        for at in self._places(len(drawn)):
            row = self.expected(query.extended(tuple(drawn[:at])) if at else query)
            best = row[: self.width()].max()
            behind = float(best - row[drawn[at]])
            check(
                behind <= self.atol,
                f"{what}: token {drawn[at]}, number {at} of the draw, is not the most likely one: "
                f"its log-probability is {behind:.3g} lower (tolerance {self.atol:g})",
            )

    def _places(self, length: int) -> list[int]:
        return self.source.sample(range(length), min(length, COMPARED_PLACES))
