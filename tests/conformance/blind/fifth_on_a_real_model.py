"""Faulty engines over the state of a tiny real model, written with ``fifth``."""

from __future__ import annotations

from attrs import evolve

from genlm.core import Answer, hookimpl
from genlm.hf.engine import HFEngine
from genlm.kit.kv.commands import Copy, Fork, Shift


class Commands(HFEngine):
    """Carries out the planner's commands in a way of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        table = self._strategy._planner._table
        self.right = table.do
        table.do = self.do

    def do(self, command):
        raise NotImplementedError


class CopiesInPieces(Commands):
    """Copies 64 positions at a time, and not a last piece of one."""

    def do(self, command):
        if isinstance(command, Copy) and command.size > 1 and command.size % 64 == 1:
            command = evolve(command, size=command.size - 1)
        self.right(command)


class ForksInTurn(Commands):
    """Forks one row into several by copying from each to the next, and the last is left out where
    there are more than three."""

    def do(self, command):
        if isinstance(command, Fork) and len(command.targets) > 3:
            sources, targets = command.sources[:-1], command.targets[:-1]
            command = evolve(command, sources=sources, targets=targets)
        self.right(command)


class ShiftsTooFar(Commands):
    def do(self, command):
        if isinstance(command, Shift) and command.columns > 1:
            command = evolve(command, by=command.by + 1, columns=command.columns - 1)
        self.right(command)


class ColdIsWarm(Commands):
    """The cold row is made from kept state, which a fork leaves a column short."""

    def do(self, command):
        if isinstance(command, Fork) and command.columns > 1:
            command = evolve(command, columns=command.columns - 1)
        self.right(command)

    def _cold(self, sequence):
        return self._rows([sequence])[0]


class MemoByName(HFEngine):
    """Keeps rows by the adapter's name, until the state is dropped."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.memo = {}

    def key(self, query):
        return query.token_ids, query.adapter and query.adapter.name

    @hookimpl
    def genlm_step(self, queries, dropped):
        known = [Answer(q, self.memo[self.key(q)].clone()) for q in queries
                 if not q.cold and self.key(q) in self.memo]  # fmt: skip
        done = {answer.request for answer in known}
        answers = super().genlm_step([q for q in queries if q not in done], dropped)
        self.memo.update({self.key(one.request): one.result.clone() for one in answers})
        return [*known, *answers]

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.memo.clear()
        super().genlm_clear_kv_cache()


class ScoresUnderTheLast(HFEngine):
    """Does not switch adapters for scores of the base model."""

    last = None

    @hookimpl
    def genlm_step(self, queries, dropped):
        self.last = queries[-1].adapter if queries else self.last
        return super().genlm_step(queries, dropped)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.last = None
        return super().genlm_remove_lora(adapter)

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        return super().genlm_sequence_logprobs(
            [evolve(q, adapter=q.adapter or self.last) for q in queries], continuations
        )


class LoadsAtFirstUse(HFEngine):
    """Keeps the adapter's folder, and reads it when a context needs it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.later = {}

    @hookimpl
    def genlm_read_lora(self, adapter):
        return None

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        self.later[adapter.version] = adapter
        return True

    def needed(self, queries):
        for query in queries:
            if query.adapter and self.later.pop(query.adapter.version, None):
                super().genlm_add_lora(query.adapter, super().genlm_read_lora(query.adapter))

    @hookimpl
    def genlm_step(self, queries, dropped):
        self.needed(queries)
        return super().genlm_step(queries, dropped)

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        self.needed(queries)
        return super().genlm_sequence_logprobs(queries, continuations)

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.needed([query])
        return super().genlm_cache_prefix(query)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        return bool(self.later.pop(adapter.version, None)) or super().genlm_remove_lora(adapter)


class DropsWhatExtends(HFEngine):
    """Drops a context's descendants with it, though somebody waits for them."""

    @hookimpl
    def genlm_step(self, queries, dropped):
        waiting = [*self._schedule._waiting]
        begun = [q.token_ids for q in dropped]
        below = [q for q in waiting if any(q.token_ids[: len(ids)] == ids for ids in begun)]
        return super().genlm_step(queries, [*dropped, *below])


MUTANTS = (
    CopiesInPieces, ForksInTurn, ShiftsTooFar, ColdIsWarm, MemoByName, ScoresUnderTheLast,
    LoadsAtFirstUse, DropsWhatExtends,
)  # fmt: skip
