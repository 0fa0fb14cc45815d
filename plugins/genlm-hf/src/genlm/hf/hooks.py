"""Forward hooks of others, as for steering, that come and go on a model in use."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from attrs import frozen

from genlm.hf.pool import SlotPool
from genlm.hf.probe import disagreement, plain_rows
from genlm.hf.reuse import Choice
from genlm.hf.runner import Runner
from genlm.hf.trials import TRIALS

#: Of how many sets of hooks is known what they do: a program may set and remove the same ones
#: around each request.
KNOWN_SETS = 16


@frozen
class Effect:
    """What a change of hooks means.

    Attributes:
        changes_rows: Whether plain forwards give other rows than before.
        why_not_reused: Why rows from reused state are not those of plain forwards; ``None`` where
            they are.
    """

    changes_rows: bool
    why_not_reused: str | None


class ForeignHooks:
    """The hooks inside of a model that are not the plugin's.

    A hook may do what depends on a token's place in the forward, such as on the last position. With
    reused state that is another place, so for each set of hooks the probe's contexts are computed
    again, in plain forwards and in the mode of reuse.

    Args:
        runner: Runs forwards.
        choice: What the probe found out at load.
    """

    def __init__(self, runner: Runner, choice: Choice) -> None:
        self._runner, self._choice = runner, choice
        self._numbers = runner.hooks.inside
        self._rows = choice.expected
        self._known: OrderedDict[Any, tuple[Any, torch.Tensor, str | None]] = OrderedDict()
        self._remember(runner.hooks.functions(), choice.expected, None)

    def effect_of_change(self) -> Effect | None:
        """What has come of hooks since the last call; ``None`` if there are the same."""
        hooks = self._runner.hooks
        hooks.look()
        numbers = hooks.inside
        if numbers == self._numbers or not self._choice.contexts:
            return None
        functions = hooks.functions()
        known = self._known.get(_key(functions))
        if known is None:
            known = functions, *self._tried()
        _, rows, why = known
        self._remember(functions, rows, why)
        changed, self._rows, self._numbers = not torch.equal(rows, self._rows), rows, numbers
        return Effect(changed, why)

    def _remember(self, functions: Any, rows: torch.Tensor, why: str | None) -> None:
        """The functions too: while they are here, no other one has the identity of one of them."""
        self._known[_key(functions)] = functions, rows, why
        self._known.move_to_end(_key(functions))
        while len(self._known) > KNOWN_SETS:
            self._known.popitem(last=False)

    def _tried(self) -> tuple[torch.Tensor, str | None]:
        """The rows of plain forwards with the hooks that are there, and why state is not reused."""
        runner, choice = self._runner, self._choice
        rows, pool = plain_rows(runner, choice.contexts), runner.pool
        runner.pool = SlotPool()  # beside what is kept
        try:
            why = disagreement(
                runner, TRIALS[choice.reuse], choice.contexts, rows, choice.tolerance
            )
        except Exception as error:  # a hook may raise anything for tensors it does not expect
            why = f"{type(error).__name__}: {error}"[:200]
        finally:
            runner.pool = pool
        return rows, why


def _key(functions: list[tuple[int, Any]]) -> tuple[tuple[int, int], ...]:
    return tuple((at, id(function)) for at, function in functions)
