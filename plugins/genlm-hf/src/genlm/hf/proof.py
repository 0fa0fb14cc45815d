"""The proof that a new adapter leaves the base model's rows unchanged, and gives rows of its
own."""

from __future__ import annotations

import torch

from genlm.core.checks import describe_error
from genlm.core.errors import EngineDeadError, GenlmError, InvalidAdapterError, UnsupportedError
from genlm.core.types import Adapter
from genlm.hf.runner import Runner
from genlm.kit.memory import is_out_of_memory

#: How much two rows of one context may differ: this many nats, or this many times the difference
#: between two forwards, whichever is larger.
MIN_TOLERANCE_NATS, NOISE_MARGIN = 1e-3, 8.0


class BaseRow:
    """A row of the base model, computed before an adapter is added and again afterwards.

    PEFT wraps layers of the model. This may change the layers' results, because some quantised
    layers do more than hold tensors.

    Args:
        runner: Runs forwards.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._row = self._compute()
        noise = float((self._compute() - self._row).abs().nan_to_num(0.0).max())
        self._tolerance = max(MIN_TOLERANCE_NATS, NOISE_MARGIN * noise)

    def is_unchanged(self) -> bool:
        """Whether the model still gives this row."""
        try:
            row = self._compute()
        except Exception:  # a damaged layer may raise any exception
            return False
        return torch.allclose(row, self._row, rtol=0.0, atol=self._tolerance, equal_nan=True)

    def error(self, adapter: Adapter) -> GenlmError:
        """The error to raise after an adapter that changed the base model has been removed."""
        what = f"LoRA adapter {adapter.path} changes the rows of this base model"
        if self.is_unchanged():
            return UnsupportedError(
                f"{what} while it is loaded, so it was removed again; merge it into the model, or "
                "load the model without quantisation"
            )
        return EngineDeadError(
            f"{what}, even after it was removed; load the model again, without quantisation if you "
            "need adapters"
        )

    def check(self, adapter: Adapter) -> None:
        """Raises: InvalidAdapterError: with this adapter a forward fails, or gives NaN where the
        base model does not."""
        try:
            row = self._compute(adapter)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = f"a forward with it fails ({describe_error(error)})"
        else:
            if self._row.isnan().any() or not row.isnan().any():
                return
            why = "its rows are NaN, perhaps because weights exceed the range of the model's dtype"
        raise InvalidAdapterError(
            f"LoRA adapter {adapter.path} cannot be applied: {why}; train it again, or take an "
            "earlier checkpoint of it"
        )

    def _compute(self, adapter: Adapter | None = None) -> torch.Tensor:
        logits = self._runner.plain([[0, 1, 2, 3]], [adapter])
        return logits[0].float().log_softmax(-1)
