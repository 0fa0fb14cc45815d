"""Faults that show at certain lengths and batch sizes, after long histories, or inside the engine.

Those that real engines had stand in ``blind/``; a clause that has one there has no other here.
"""

from __future__ import annotations

import threading

from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine

from ..blind import of_the_mock
from .registry import breaks

breaks("large_batch")(of_the_mock.GraphTooSmall)
breaks("contract_is_kept_throughout")(of_the_mock.SharedOutputBuffer)
breaks("many_adapters")(of_the_mock.ThirdAdapterEvictsTheFirst)
breaks("error_inside_the_engine")(of_the_mock.NaNStaysInTheBlock)
breaks("options_together")(of_the_mock.NucleusOfWhatWasCut)
breaks("several_stop_tokens")(of_the_mock.OnlyOneStopToken)
breaks("draws_of_full_length")(of_the_mock.EndTokenAlwaysStops)
breaks("successive_tokens_are_independent")(of_the_mock.EveryTokenTheSameQuantile)
breaks("two_models_in_one_process")(of_the_mock.OneModelClearsTheOther)
breaks("nothing_grows")(of_the_mock.LeaksEveryRow)
breaks("bytes_of_text")(of_the_mock.BytesAboveAsciiAsText)
breaks("rows_at_every_length", max_context=1024)(of_the_mock.RotaryBaseOfTheCachedKeys)
breaks("scores_at_every_length", max_context=1024)(of_the_mock.ScoresAcrossChunks)


@breaks("scores_at_every_length", max_context=1024)
class LongScoresFromTheEnd(ContinuousMockEngine):
    """A score that reaches beyond 512 tokens takes every place for one beyond: as a rope that
    changes there does, where the whole text is one forward."""

    def _score(self, query, continuation):
        if query.length + len(continuation) > 512:
            query = evolve(query, token_ids=(0, *query.token_ids[1:]))
        return super()._score(query, continuation)


@breaks("row_depends_on_every_token")
class FirstTokenForgotten(MockEngine):
    """A long context is evaluated without its first token, in cold rows too."""

    def row(self, query):
        if len(query.token_ids) > 48:
            query = evolve(query, token_ids=(0, *query.token_ids[1:]))
        return super().row(query)


@breaks("tokens_from_all_over_the_vocabulary")
class LastTokenOutOfTheTable(MockEngine):
    """The last token of the vocabulary has no place in the table of a batch."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        last = self.vocab_size - 1
        if len(queries) > 1:
            queries = [
                evolve(query, token_ids=tuple(i if i != last else 0 for i in query.token_ids))
                for query in queries
            ]
        return super().genlm_next_token_logprobs(queries)


@breaks("growing_particles")
class ThirdSiblingGetsTheFirst(MockEngine):
    """Of several contexts in a batch of more than six that fork from one long parent, the third
    gets the first's row."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        children: dict[tuple[int, ...], list[int]] = {}
        for i, query in enumerate(queries):
            siblings = children.setdefault(query.token_ids[:-1], [])
            siblings.append(i)
            if len(query.token_ids) > 22 and len(siblings) == 3 and len(queries) > 6:
                rows[i] = rows[siblings[0]]
        return rows


@breaks("two_long_contexts_in_turn")
class LongContextChangesTheTables(MockEngine):
    """A context as long as the model takes changes tables that short ones use, until key/value
    state is dropped."""

    changed = False

    def row(self, query):
        self.changed |= len(query.token_ids) == self.max_context
        if self.changed and len(query.token_ids) <= 3:
            query = evolve(query, token_ids=(*query.token_ids, 0))
        return super().row(query)

    @hookimpl
    def genlm_clear_kv_cache(self):
        super().genlm_clear_kv_cache()
        self.changed = False


@breaks("oracle_has_not_changed")
class DriftsWithEveryAdapter(MockEngine):
    """Adding and removing adapters changes the base model, a little each time."""

    removed = 0

    def row(self, query):
        row = super().row(query)
        return (row * (1 + 1e-3 * self.removed)).log_softmax(-1)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.removed += 1
        return super().genlm_remove_lora(adapter)


@breaks("nothing_is_left_after_close")
class ThreadOutlivesTheModel(MockEngine):
    """A worker thread is not stopped."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        threading.Thread(target=threading.Event().wait, daemon=True, name="worker").start()
