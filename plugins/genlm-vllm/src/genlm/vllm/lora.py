"""LoRA: the hooks of an engine that was loaded with ``enable_lora``."""

from __future__ import annotations

from typing import Any

from genlm.core.errors import InvalidOptionError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import Adapter, Request, ScoreRequest
from genlm.vllm.engine import VllmEngine
from genlm.vllm.in_flight import InFlightRequest


class LoraEngine(VllmEngine):
    """An engine with adapters.

    On CPU, vLLM (to 0.32) applies the adapter of the last slot to requests without one that share a
    batch with requests that have one. There, the two kinds take turns.

    Args:
        max_adapters: How many adapters vLLM keeps; it would silently drop one beyond that and read
            it again from its path when it is next used, whatever is there by then.
    """

    def __init__(self, *args: Any, max_adapters: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_adapters = max_adapters
        self._adapters: set[int] = set()
        self._takes_turns = self._core.device_type == "cpu"

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        if len(self._adapters) >= self._max_adapters:
            raise InvalidOptionError(
                f"{len(self._adapters)} LoRA adapters are loaded and max_cpu_loras is "
                f"{self._max_adapters}; "
                "remove one, or load the model with a larger max_cpu_loras in engine_opts"
            )
        try:
            self._core.add_lora(adapter)
        except Exception:
            self._core.remove_lora(adapter)
            raise
        self._adapters.add(adapter.version)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self._release(self._sessions.drop(adapter))
        self._lost_pins = [query for query in self._lost_pins if query.adapter != adapter]
        self._core.remove_lora(adapter)
        self._adapters.discard(adapter.version)
        return True

    def _next_turn(self) -> list[InFlightRequest]:
        """All, or on CPU one kind: that of the oldest. While it is in flight, newcomers join it
        only if no other kind waits."""
        if not self._takes_turns or not self._waiting:
            return super()._next_turn()
        current = self._in_flight.uses_adapter
        kind = self._waiting[0].prompt.adapter is not None if current is None else current
        others = [each for each in self._waiting if (each.prompt.adapter is not None) != kind]
        if current is not None and others:
            return []
        turn = [each for each in self._waiting if (each.prompt.adapter is not None) == kind]
        self._waiting = others
        return turn

    def _is_native(self, request: Request) -> bool:
        """Scores are left to rows: vLLM (to 0.32) has its LoRA layers take a prompt's logits for
        those of a batch's last positions."""
        return not isinstance(request, ScoreRequest) and super()._is_native(request)
