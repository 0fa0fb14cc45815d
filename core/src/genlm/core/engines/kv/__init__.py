"""Key/value state of many contexts: what is kept, where a context starts, and what moves.

For engines that hold state themselves. All of it is bookkeeping over token ids and sizes: nothing
here knows a tensor.

**Nouns.** A *table* has *rows* of equal length in *columns*. A row holds the tail of one context,
and grows in place. A *trunk* holds positions that any number of contexts share; once it is computed
it is never written again. A context is a path of trunks and at most one row (see
:mod:`~genlm.core.engines.segments`). A *placement* says where a sequence runs: which positions are
there already, and where the others go. The *budget* counts positions: those of the whole table and
of all trunks.

**Who decides what.**

- :class:`~genlm.core.engines.kv.planner.Planner`: where sequences start, which of them wait for
  another one of their batch, what is copied and what is shared, what is pinned.
- :class:`~genlm.core.engines.kv.trunks.Trunks`: which positions of rows are kept once.
- :class:`~genlm.core.engines.kv.room.Room`: what goes when the budget is spent, and how large the
  table is.
- :class:`~genlm.core.engines.kv.sharing.Worth`: the numbers that all of this is weighed with.
- :class:`~genlm.core.engines.kv.tree.Tree` knows what there is, and decides nothing.
- :class:`~genlm.core.engines.kv.commands.Table` is the engine's. It moves bytes, says how many
  positions may be taken, and decides nothing else.

**Commands.** A plan is a sequence of frozen commands (:mod:`~genlm.core.engines.kv.commands`). The
planner gives each of them once the table has carried out the one before. So the tree says what is
there, whichever command fails. A plan that is handed over as a whole would have to be undone from
the command that failed.

**Batches.** The planner places sequences batch by batch. The engine computes a batch and commits
it, and its state is kept. What is not committed is given up: its new segments are given back, and
what was written is made zero. A context that goes on in its own row has its old key until the
commit, and nothing is read beyond the key. So a batch that fails anywhere leaves what was there
before, and an engine has nothing to undo. ``examples/numpy_plugin`` is an engine that does this, in
its ``states`` module.
"""

from genlm.core.engines.kv.commands import (
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
from genlm.core.engines.kv.placement import Placement
from genlm.core.engines.kv.planner import Planner
from genlm.core.engines.kv.sequence import TokenSequence
from genlm.core.engines.kv.sharing import Worth

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
    "Shift",
    "Table",
    "TokenSequence",
    "Worth",
]
