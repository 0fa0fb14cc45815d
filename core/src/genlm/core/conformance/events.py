"""The events of a schedule: who arrives, who leaves, what changes, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from attrs import frozen
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from genlm.core.conformance.cast import DIFFERENT

T = TypeVar("T")

#: How many events a schedule has at most.
EVENTS = 10

#: How many requests come at once: alone, few, beyond 8, beyond 64.
BURSTS = (1, 2, 4, 9, 17, 66, 80)


@frozen
class Arrival:
    """Requests of one kind arrive together."""

    after: int  # calls of the engine since the event before
    kind: str
    count: int
    first: int  # of the requests of that kind


@frozen
class Leaving:
    """A caller goes, alone or with all who came together with it, unless it has been answered."""

    after: int
    which: int  # of all that were asked
    all: bool = False


@frozen
class Rebinding:
    """The adapter :data:`~genlm.core.conformance.cast.MOVING` is bound to another, or removed and
    added."""

    after: int
    to: int
    removed: bool = False


Event = Arrival | Leaving | Rebinding


def schedules(kinds: Sequence[str], adapters: bool, most: int) -> SearchStrategy[list[Event]]:
    """Schedules of some kinds of requests, with changes of adapters or without, and bursts of at
    most ``most``."""
    after = st.sampled_from((0, 1, 1, 2, 3, 5, 8))
    bursts = st.sampled_from([count for count in BURSTS if count <= most])
    events: list[SearchStrategy[Any]] = [
        st.builds(Arrival, after, st.just(kind), bursts, st.integers(0, DIFFERENT[kind] - 1))
        for kind in kinds
    ]
    all_leave = st.sampled_from((False, False, False, True))
    events.append(st.builds(Leaving, after, st.integers(0, 99), all_leave))
    if adapters:
        events.append(st.builds(Rebinding, after, st.integers(0, 1), st.booleans()))
    return filled_slots(st.one_of(*events), EVENTS)


def filled_slots(one: SearchStrategy[T], slots: int) -> SearchStrategy[list[T]]:
    """Lists that fill most of ``slots``, where the lists of Hypothesis are short on average.
    Shrinking empties the slots."""
    filled = st.tuples(*[st.one_of(st.none(), one)] * slots)
    return filled.map(lambda found: [each for each in found if each is not None])
