"""The events of a schedule: who arrives, who leaves, what changes, and when."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from genlm.core.conformance.cast import DIFFERENT

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


def schedules(adapters: bool, most: int) -> SearchStrategy[list[Event]]:
    """Schedules with changes of adapters or without, and bursts of at most ``most``. Most of their
    places for events are filled, where the lists of Hypothesis are short on average; shrinking
    empties them."""
    after = st.sampled_from((0, 1, 1, 2, 3, 5, 8))
    bursts = st.sampled_from([count for count in BURSTS if count <= most])
    events: list[SearchStrategy[Any]] = [
        st.builds(Arrival, after, st.just(kind), bursts, st.integers(0, different - 1))
        for kind, different in DIFFERENT.items()
    ]
    all_leave = st.sampled_from((False, False, False, True))
    events.append(st.builds(Leaving, after, st.integers(0, 99), all_leave))
    if adapters:
        events.append(st.builds(Rebinding, after, st.integers(0, 1), st.booleans()))
    places = st.tuples(*[st.one_of(st.none(), st.one_of(*events))] * EVENTS)
    return places.map(lambda found: [each for each in found if each is not None])
