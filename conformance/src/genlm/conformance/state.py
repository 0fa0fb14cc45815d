"""Clauses on batches, and on state kept between requests: neither may show in an answer."""

from __future__ import annotations

from hypothesis import strategies as st

from genlm.conformance.advice import advise
from genlm.conformance.compare import check
from genlm.conformance.contexts import BATCH_SIZES
from genlm.conformance.properties import for_all
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds


class StateClauses:
    """A row depends neither on its companions nor on what is kept."""

    @advise(
        "requests are sorted or grouped for a batch, and the rows are not put back in order",
        "large_batch",
        "adapters_in_one_batch",
    )
    def test_batch_answers_in_order(self, live: Subject) -> None:
        """Row ``i`` of a batch is the cold row of context ``i``: in any order, of any lengths, with
        duplicates, in one call and gathered from separate coroutines."""

        @for_all(live, contexts=live.contexts.several())
        def batch_answers_in_order(contexts: list[TokenIds]) -> None:
            rows = live.run(live.lm.batch_next_token_logprobs(contexts))
            check(
                len(rows) == len(contexts),
                f"a batch of {len(contexts)} contexts has {len(rows)} rows",
            )
            live.expect.rows(rows, contexts, how=f"in a batch of {len(contexts)}")
            live.lm.clear_cache()
            live.check_rows(contexts, how=f"gathered with {len(contexts) - 1} others")

    @advise(
        "batches above some size are cut, padded or computed differently", "batch_answers_in_order"
    )
    def test_large_batch(self, live: Subject) -> None:
        """In batches of many sizes up to 300, of contexts of unequal lengths, each row is that of
        its context. (At a low effort some rows of the largest batch are compared.) An empty batch
        has no rows."""
        largest = max(BATCH_SIZES)
        most = live.scaled(largest, 70)
        contexts = live.contexts.many(largest)
        compared = {*contexts[:most]}
        source = live.random("batches")
        for size in (size for size in BATCH_SIZES if size <= most or size == largest):
            live.lm.clear_cache()
            batch = source.sample(contexts[: max(size, most)], min(size, len(contexts)))
            for row, context in zip(live.gather(batch), batch, strict=True):
                if context in compared:
                    live.expect.row(row, context, how=f"in a batch of {size}")
        nothing = live.run(live.lm.batch_next_token_logprobs([]))
        check(
            tuple(nothing.shape) == (0, len(live.lm.byte_vocab)),
            f"the rows of an empty batch have the shape {tuple(nothing.shape)}, not "
            f"(0, {len(live.lm.byte_vocab)})",
        )

    @advise(
        "contexts are identified by their ends, or requests of a batch by the tokens after a "
        "shared prefix",
        "equal_ends_behind_different_beginnings",
    )
    def test_same_tail_under_different_prefixes(self, live: Subject) -> None:
        """Contexts with equal ends and different beginnings have different rows, with their
        prefixes pinned or not."""

        @for_all(
            live,
            prefixes=live.contexts.distinct(),
            tail=live.contexts.tails(),
            pinned=st.booleans(),
        )
        def same_tail_under_different_prefixes(
            prefixes: list[TokenIds], tail: TokenIds, pinned: bool
        ) -> None:
            for prefix in prefixes if pinned else []:
                live.lm.cache_kv(prefix)
            contexts = [prefix + tail for prefix in prefixes]
            live.check_rows(
                contexts, how="asked together with contexts that end in the same tokens"
            )

    @advise(
        "kept state belongs to other tokens, or is read in another precision",
        "extended_context",
        "dropped_state",
    )
    def test_warm_row_equals_cold_row(self, live: Subject) -> None:
        """A context that is asked for again has its cold row, from the output cache or from state
        that the engine has kept."""

        @for_all(live, examples=12, contexts=live.contexts.several())
        def warm_row_equals_cold_row(contexts: list[TokenIds]) -> None:
            for context in contexts:
                live.check_row(context, how="asked for the first time")
                live.check_row(context, how="asked for again")
            live.lm.clear_cache()
            for context in contexts:
                live.check_row(context, how="asked for again without the row cache")

    @advise(
        "the position of a new token is not the number of tokens before it, or state of too "
        "many tokens is kept",
        "contexts_grow_across_every_length",
    )
    def test_extended_context(self, live: Subject) -> None:
        """A context that grows token by token has its cold row at every length."""

        @for_all(live, examples=14, context=live.contexts.any(), tokens=live.contexts.tails(most=4))
        def extended_context(context: TokenIds, tokens: TokenIds) -> None:
            for end in range(len(tokens) + 1):
                grown = context + tokens[:end]
                live.check_row(grown, how=f"after {end} extensions")

    @advise(
        "state is overwritten while another context still reads it",
        "growing_particles",
        "forks_at_every_length",
    )
    def test_forked_contexts(self, live: Subject) -> None:
        """Contexts that fork from a shared prefix do not change each other's rows, nor those of the
        prefix."""

        @for_all(
            live,
            examples=14,
            stem=live.contexts.any(),
            tails=st.lists(live.contexts.tails(), min_size=2, max_size=3),
        )
        def forked_contexts(stem: TokenIds, tails: list[TokenIds]) -> None:
            live.check_row(stem)
            for tail in tails:
                live.check_row(stem + tail, how="forked from a context that was asked for before")
            live.lm.clear_cache()
            live.check_row(stem, how="after others had forked from it")

    @advise(
        "a pin changes shared state, or pinning again is rejected, although the core pins again "
        "after a failed call",
        "prompt_pinned_twice_is_cleared_once",
    )
    def test_pinned_prefix(self, live: Subject) -> None:
        """Contexts that begin with a pinned prefix, and the prefix itself, have their cold rows
        each time they are asked for, also after the prefix is pinned again."""
        live.needs("genlm_cache_prefix")

        @for_all(
            live,
            prefix=live.contexts.any(),
            tails=st.lists(live.contexts.tails(), min_size=2, max_size=3),
        )
        def pinned_prefix(prefix: TokenIds, tails: list[TokenIds]) -> None:
            for tail in [*tails, ()]:
                live.lm.cache_kv(prefix)  # The core pins a prefix again after a failed call.
                live.check_row(prefix + tail, how=f"with the prefix {list(prefix)} pinned")

    @advise(
        "clear_kv_cache drops the state but not the index that finds it",
        "warm_row_equals_cold_row",
    )
    def test_dropped_state(self, live: Subject) -> None:
        """After ``clear_kv_cache`` contexts have their cold rows, also those that begin with a
        formerly pinned prefix."""

        @for_all(live, examples=12, contexts=live.contexts.distinct(), tail=live.contexts.tails())
        def dropped_state(contexts: list[TokenIds], tail: TokenIds) -> None:
            for context in contexts:
                live.lm.cache_kv(context)
            live.gather(contexts)
            live.model.clear()
            for context in [*contexts, *(context + tail for context in contexts)]:
                live.check_row(context, how="after clear_kv_cache")
