"""Key/value state of many contexts: what is kept, where a context starts, and what is moved.

For engines that hold state themselves. All of it only records token ids and sizes: nothing here
uses a tensor.

**Nouns.** A *table* has *slots* of equal length in *columns*. A slot holds the tail of one context,
and grows in place. A *trunk* holds positions that any number of contexts share; after it is
computed it is never written again. A context is a path of trunks and at most one slot (see
:mod:`~genlm.kit.segments`). A *placement* says where a sequence runs: which positions are
already there, and where the others go. The *budget* counts positions: those of the whole table and
of all trunks.

**Who decides what.**

- :class:`~genlm.kit.kv.planner.Planner`: where sequences start, which of them wait for
  another one of their batch or are computed with it, and what is copied, shared and pinned.
- :class:`~genlm.kit.kv.trunks.Trunks`: which positions of slots become trunks.
- :class:`~genlm.kit.kv.capacity.Capacity`: what is dropped when the budget is spent, and how large
  the table is.
- :class:`~genlm.kit.kv.sharing.SharingCosts`: the numbers for all these decisions.
- :class:`~genlm.kit.kv.scored.ScoredRows`: which rows are computed for scores that are asked
  together.
- :class:`~genlm.kit.kv.tree.Tree` records what is kept, and decides nothing.
- :class:`~genlm.kit.kv.commands.Table` is the engine's. It moves bytes, says how many
  positions may be taken, and decides nothing else.
- :mod:`~genlm.kit.kv.history` keeps the last commands, in words, for the conformance suite.

**Commands.** A plan is a sequence of frozen commands (:mod:`~genlm.kit.kv.commands`). The
planner gives each command after the table has carried out the one before. So the tree is right even
if a command fails. A plan given as a whole would have to be undone from the command that failed.

**Batches.** The planner places sequences batch by batch. The engine computes a batch and commits
it, and its state is kept. What is not committed is given up: its new segments are freed, and what
was written is made zero. A context that continues in its own slot keeps its old key until the
commit, and nothing is read beyond the key. So a batch that fails anywhere leaves the earlier state,
and an engine has nothing to undo. ``examples/numpy_plugin`` is an engine that does this, in its
``states`` module.
"""

from genlm.kit.kv.commands import (
    Blank,
    Command,
    Copy,
    Fork,
    Join,
    NewTrunk,
    Resize,
    Shift,
    Table,
)
from genlm.kit.kv.placement import Placement
from genlm.kit.kv.planner import Planner
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import SharingCosts

__all__ = [
    "Blank",
    "Command",
    "Copy",
    "Fork",
    "Join",
    "NewTrunk",
    "Placement",
    "Planner",
    "Resize",
    "SharingCosts",
    "Shift",
    "Table",
    "TokenSequence",
]
