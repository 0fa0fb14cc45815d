"""What a mutant is, and the list of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from attrs import frozen

from genlm.core import AsyncLM
from genlm.core.conformance import ConformanceSuite
from genlm.core.mock import ByteTokenizer, MockEngine


@frozen
class Mutant:
    """A fault.

    Attributes:
        breaks: The clause that is about this fault.
        may_break: Further clauses that this very fault makes false.
        load: Loads the faulty model, given wrappers.
    """

    breaks: str
    may_break: frozenset[str]
    load: Callable[[Sequence[object]], AsyncLM]


#: All of them, by name.
MUTANTS: dict[str, Mutant] = {}

#: A fault in the oracle makes every comparison false.
ALL = frozenset(clause.removeprefix("test_") for clause in ConformanceSuite.clauses)

#: The clause that does everything may notice any fault that shows in answers.
ANYTHING = "any_order_of_operations"

COMPANY = (
    "batch_answers_in_order",
    "gathered_questions_equal_single_ones",
    "large_batch",
    "same_tail_under_different_prefixes",
    "cancelled_caller_leaves_others_alone",
    "failing_question_fails_alone",
    "reset_fails_what_is_pending",
    "loops_one_after_the_other",
    "several_threads",
    "adapters_in_one_batch",
    "dropped_state",
    "blocking_call_inside_a_running_loop",
    "row_belongs_to_its_caller",
    "close_fails_what_is_pending",
    "scores_agree_with_rows",
)

#: A wrong row shows in what is drawn from it.
DRAWS = (
    "seed_fixes_the_draw",
    "stop_token_ends_the_draw",
    "top_k_and_top_p",
    "temperature_zero_is_argmax",
    "adapter_in_sampling",
    "frequencies_agree_with_rows",
    "scores_agree_with_rows",
)

ADAPTERS = (
    "adapters_in_one_batch",
    "adapters_in_turn",
    "adapter_in_sampling",
    "default_adapter",
    "rebound_adapter",
    "removed_adapter",
    "scores_agree_with_rows",
    "adapter_that_fails_to_load",
)


def breaks(
    clause: str, *may_break: str, also_in_state_machine: bool = True
) -> Callable[[type], type]:
    """Register a faulty engine or a faulty ``AsyncLM``."""

    def register(faulty: type) -> type:
        also = {*may_break, *([ANYTHING] if also_in_state_machine else [])} - {clause}
        load = functools.partial(_load, faulty)
        MUTANTS[faulty.__name__] = Mutant(clause, frozenset(also), load)
        return faulty

    return register


def _load(faulty: type, wrappers: Sequence[object]) -> AsyncLM:
    if issubclass(faulty, AsyncLM):
        engine = functools.partial(MockEngine, ByteTokenizer(), max_context=64)
        return faulty(engine, backend="mock", wrappers=wrappers)
    return AsyncLM(
        lambda: faulty(ByteTokenizer(), max_context=64), backend="mock", wrappers=wrappers
    )
