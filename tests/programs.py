"""Random programs for an engine that keeps state, through its hooks; a reference knows the
answers."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from attrs import define, field

from genlm.core import Adapter, Query

from .engines import add_lora, rows_of

Tokens = tuple[int, ...]

#: A context, and the name of the adapter that it is asked with.
Asked = tuple[str | None, Tokens]

#: The most tokens of a step that come anew.
MOST_NEW = 6000


@contextmanager
def constants(values: Mapping[str, Sequence[Any]], source: random.Random) -> Iterator[str]:
    """Other values of constants (``module.NAME``) for some time; says which."""
    with ExitStack() as patches:
        chosen = {path: source.choice(possible) for path, possible in values.items()}
        for path, value in chosen.items():
            module, _, name = path.rpartition(".")
            patches.enter_context(patch.object(importlib.import_module(module), name, value))
        yield str(chosen)


@define(eq=False, kw_only=True)
class Program:
    """Contexts that grow, fork, are cut and share prompts; adapters and state that come and go.

    Attributes:
        engine: What is asked.
        source: Everything follows from it.
        longest: The longest context.
        tokens: How many there are.
        names: Of adapters.
        refused: What is raised for an adapter that the engine does not take.
        chunk: Prefixes of one prompt are asked around its multiples.
        checked: The rows and scores that were compared.
    """

    engine: Any
    source: random.Random
    longest: int
    tokens: int = 256
    names: Sequence[str] = ()
    refused: tuple[type[Exception], ...] = ()
    chunk: int = 16
    checked: int = field(default=0, init=False)
    bound: dict[str, Adapter] = field(factory=dict, init=False)
    in_flight: dict[Query, Asked] = field(factory=dict, init=False)
    _known: list[Asked] = field(factory=lambda: [(None, (5, 6, 7))], init=False)
    _versions: int = field(default=0, init=False)

    # --- what an engine's own program says --------------------------------------------------------

    def compare(
        self, asked: Sequence[Asked], given: Sequence[torch.Tensor], columns: Sequence[slice]
    ) -> None:
        """Compare rows, or some columns of them, with those of a reference."""
        raise NotImplementedError

    def folder_of(self, name: str) -> str | None:
        """An adapter to bind to a name now; ``None`` where there is none."""
        raise NotImplementedError

    def ways(self) -> dict[Callable[[], None], int]:
        """What may happen, and how often."""
        return {
            self.step: 60, self.drained: 12, self.score: 8, self.cold: 4, self.pin: 3,
            self.clear: 2, self.adapt: 5,
        }  # fmt: skip

    # --- what may happen --------------------------------------------------------------------------

    def run(self) -> None:
        """One random thing."""
        ways = self.ways()
        (way,) = self.source.choices([*ways], [*ways.values()])
        way()

    def step(self) -> None:
        """Newcomers, some that leave, and a step."""
        dropped = [query for query in self.in_flight if self.source.random() < 0.1]
        for query in dropped:
            del self.in_flight[query]
        new = {self._query(*one): one for one in self._batch()}
        new = {query: one for query, one in new.items() if query not in self.in_flight}
        self.in_flight |= new
        if new or dropped or self.in_flight:
            self._advance([*new], dropped)

    def drained(self) -> None:
        """Steps until nothing is in flight: other things happen only then."""
        for _ in range(20_000):
            if not self.in_flight:
                return
            self._advance([], [])
        raise AssertionError(f"{len(self.in_flight)} queries are never answered")

    def score(self) -> None:
        self.drained()
        some = self.source.choices(self._known, k=self.source.choice([1, 1, 3]))
        some = [(name, context[: max(self.longest - 80, 1)]) for name, context in some]
        tails = [self._tokens(self.source.choice([1, 2, 5, 70])) for _ in some]
        queries = [self._query(*one) for one in some]
        given = self.engine.genlm_sequence_logprobs(queries, tails)
        for (name, context), tail, scores in zip(some, tails, given, strict=True):
            asked = [(name, (*context, *tail[:at])) for at in range(len(tail))]
            columns = [slice(token, token + 1) for token in tail]
            self._compare(asked, scores[:, None], columns)

    def cold(self) -> None:
        self.drained()
        one = self.source.choice(self._known)
        query = self._query(*one)
        cold = Query(query.token_ids, query.adapter, cold=True)
        self._compare([one], rows_of(self.engine, [cold]))

    def pin(self) -> None:
        self.drained()
        self.engine.genlm_cache_prefix(self._query(*self.source.choice(self._known)))

    def clear(self) -> None:
        self.drained()
        self.engine.genlm_clear_kv_cache()

    def adapt(self) -> None:
        """Bind a name anew, or remove it."""
        self.drained()
        if not self.names:
            return
        name = self.source.choice(self.names)
        old = self.bound.get(name)
        if old is not None and self.source.random() < 0.5:
            self.engine.genlm_remove_lora(self.bound.pop(name))
        elif folder := self.folder_of(name):
            self._versions += 1
            new = Adapter(name, folder, self._versions)
            with suppress(*self.refused):
                add_lora(self.engine, new)
                self.bound[name] = new
                if old is not None:
                    self.engine.genlm_remove_lora(old)
        self._known = [one for one in self._known if one[0] is None or one[0] in self.bound]

    # --- what is asked ----------------------------------------------------------------------------

    def _advance(self, new: Sequence[Query], dropped: Sequence[Query]) -> None:
        answers = self.engine.genlm_step(new, dropped)
        asked = [self.in_flight.pop(answer.request) for answer in answers]
        self._compare(asked, [answer.result for answer in answers])

    def _compare(
        self, asked: Sequence[Asked], given: Any, columns: Sequence[slice] | None = None
    ) -> None:
        self.compare(asked, given, columns or [slice(None)] * len(asked))
        self.checked += len(asked)

    def _batch(self) -> list[Asked]:
        """Contexts that go on, fork, are cut, share a prompt, or are new."""
        source = self.source
        asked: dict[Asked, None] = {}
        room = MOST_NEW
        for name, context in source.choices(
            self._known[-60:], k=source.choice([1, 2, 5, 5, 12, 40])
        ):
            one = name, self._grown(context)
            room -= len(one[1])
            if room > 0 or not asked:
                asked[one] = None
        if source.random() < 0.15:  # prefixes of one prompt, some a whole number of chunks
            name, context = source.choice([*asked])
            for count in range(1, 5):
                stop = count * self.chunk + source.choice([0, 0, 1, -1])
                if 0 < stop <= len(context):
                    asked[name, context[:stop]] = None
        if source.random() < 0.3:
            name = source.choice([None, None, *self.bound])
            lengths = [1, 2, 20, 100, 513, self.longest]
            length = source.choices(lengths, [4, 4, 8, 4, 2, 1])[0]
            asked[name, self._tokens(min(length, self.longest))] = None
        self._known = [*self._known[-200:], *asked]
        return [*asked]

    def _grown(self, context: Tokens) -> Tokens:
        cut = self.source.choice([len(context)] * 6 + [self.source.randint(1, len(context))])
        more = self.source.choice([0, 1, 1, 1, 1, 1, 2, 3, 9, 40])
        return (*context[:cut], *self._tokens(more))[: self.longest]

    def _tokens(self, n: int) -> Tokens:
        return tuple(self.source.choices(range(self.tokens), k=n))

    def _query(self, name: str | None, context: Tokens) -> Query:
        return Query(context, None if name is None else self.bound[name])
