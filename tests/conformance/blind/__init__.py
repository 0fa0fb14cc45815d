"""Engines that were written without sight of the suite, from the hooks alone: five sound ones, and
faults of them that a user would notice.

A fault that was among them is left out, because the contract allows it: a greedy sample that takes
the likeliest token of a row in float16. There two tokens tie only if their log-probabilities are
less than a thousandth apart, as long as the likeliest one has more than a seventh of the mass.

Each base is of its own kind: a batch engine with snapshots (:mod:`.chain`), a continuous one with
blocks (:mod:`.slots`), one that looks only 48 tokens back (:mod:`.window`), a recurrent network in
PyTorch (:mod:`.gru`) and one whose rows come from another process (:mod:`.worker`). How many of
the faults the suite catches is measured by ``nox -s mutants -- blind.``.
"""

from .chain import Chain
from .gru import Recurrent
from .registry import BLIND
from .slots import Slots
from .window import Window
from .worker import Worker

#: The bases, by the name of their kind.
SOUND = {
    "chain": Chain,
    "slots": Slots,
    "window": Window,
    "gru": Recurrent,
    "worker": Worker,
}

__all__ = ["BLIND", "SOUND"]
