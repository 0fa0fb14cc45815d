"""The user's forward hooks, for instance for steering, and forwards that the user sets on modules.
Both may be set and removed while the model is served."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from attrs import frozen

from genlm.hf.forward_hooks import ForwardHooks, identities
from genlm.hf.pool import SlotPool
from genlm.hf.probe import disagreement, plain_rows
from genlm.hf.reuse import Choice
from genlm.hf.runner import Runner
from genlm.hf.trials import TRIALS

#: For how many sets of hooks the effect is remembered: a program may set and remove the same hooks
#: around each request.
MAX_KNOWN_SETS = 16


@frozen
class Effect:
    """The effect of a change of hooks.

    Attributes:
        changes_rows: Whether the rows of plain forwards changed.
        why_not_reused: Why rows from reused state differ from those of plain forwards; ``None`` if
            they agree.
    """

    changes_rows: bool
    why_not_reused: str | None


class ForeignHooks:
    """The hooks inside a model that are not the plugin's, and the forwards set on its modules.

    What they do may depend on a token's place in the forward; they may change the last position,
    for instance. With reused state, tokens have other places. So for each set of them, the probe's
    contexts are computed again, in plain forwards and in the reuse mode.

    Args:
        runner: Runs forwards.
        choice: What the probe found out at load.
    """

    def __init__(self, runner: Runner, choice: Choice) -> None:
        self._runner, self._choice = runner, choice
        self._seen = _seen(runner.hooks)
        self._rows = choice.expected
        self._known: OrderedDict[Any, tuple[Any, torch.Tensor, str | None]] = OrderedDict()
        self._remember(runner.hooks.functions(), choice.expected, None)

    def effect_of_change(self) -> Effect | None:
        """The effect of hooks and forwards set or removed since the last call; ``None`` if they are
        the same."""
        hooks = self._runner.hooks
        hooks.look(self._runner.is_ours)
        seen = _seen(hooks)
        if seen == self._seen or not self._choice.contexts:
            return None
        functions = hooks.functions()
        known = self._known.get(identities(functions))
        if known is None:
            known = functions, *self._tried()
        _, rows, why = known
        self._remember(functions, rows, why)
        changed, self._rows, self._seen = not torch.equal(rows, self._rows), rows, seen
        return Effect(changed, why)

    def _remember(self, functions: Any, rows: torch.Tensor, why: str | None) -> None:
        """Remember the effect of a set of hooks. The functions are kept too: as long as they exist,
        no other function can have the same identity."""
        self._known[identities(functions)] = functions, rows, why
        self._known.move_to_end(identities(functions))
        while len(self._known) > MAX_KNOWN_SETS:
            self._known.popitem(last=False)

    def _tried(self) -> tuple[torch.Tensor, str | None]:
        """The rows of plain forwards with the current hooks, and why state cannot be reused with
        them."""
        runner, choice = self._runner, self._choice
        rows, pool = plain_rows(runner, choice.contexts), runner.pool
        runner.pool = SlotPool()  # a pool of its own, beside the kept state
        try:
            why = disagreement(
                runner, TRIALS[choice.reuse], choice.contexts, rows, choice.tolerance
            )
        # A hook may raise any exception for tensors that it does not expect.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:200]
        finally:
            runner.pool = pool
        return rows, why


def _seen(hooks: ForwardHooks) -> Any:
    """The hooks and forwards of the last look. Other modules, which may have come with an adapter
    since, make no difference."""
    return hooks.inside, identities(hooks.forwards)
