"""Captures full next-token rows, through vLLM's own hook for custom logits processors.

vLLM has two model runners, each with its own logits-processor interface: V1
(``vllm.v1.sample.logits_processor.LogitsProcessor``) and, from 0.31 on, V2
(``vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor``). Their methods do not collide, so
one class serves both.

A request names its row by ``SamplingParams.extra_args[ROW_KEY]``. The last row written under a key
counts, since the step that completes a request is the last one. So chunked prefill, preemption and
recomputation are harmless.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from genlm.vllm.transfer import to_device

ROW_KEY = "genlm_row"  # str: keep the row under this key
DRAW_KEY = "genlm_draw"  # str: note under this key whether a row of this draw is NaN

#: How many numbers of the state are searched for NaN together.
PART_NUMBERS = 1 << 20


class RowStore:
    """The rows of the requests in flight, by key. Lives where the model runs, on the thread that
    steps it.

    Attributes:
        width: How many entries of a row are kept; ``None`` is all.
    """

    def __init__(self) -> None:
        self.width: int | None = None
        self._rows: dict[str, torch.Tensor] = {}
        self._largest: dict[str, torch.Tensor] = {}  # of draws, the sum over their tokens

    def put(self, keys: Sequence[str], block: torch.Tensor) -> None:
        """Keep row ``i`` of ``block``, ``[len(keys), vocab_size]`` float32, under ``keys[i]``."""
        self._rows.update(zip(keys, block[:, : self.width].unbind(), strict=True))

    def take(self, keys: Iterable[str]) -> list[torch.Tensor | None]:
        """Remove and return the rows under ``keys``; ``None`` for a row that was never captured."""
        return [self._rows.pop(key, None) for key in keys]

    def note(self, keys: Sequence[str], logits: torch.Tensor) -> None:
        """Note the logits from which a token of each of some draws is drawn,
        ``[len(keys), vocab_size]``."""
        largest = logits.amax(dim=-1).unbind()  # NaN if one of them is
        for key, one in zip(keys, largest, strict=True):
            self._largest[key] = self._largest[key] + one if key in self._largest else one

    def were_broken(self, keys: Iterable[str]) -> list[bool]:
        """For each draw, whether logits that were noted for it had NaN, or infinity. They are
        forgotten."""
        found = [self._largest.pop(key, None) for key in keys]
        if not (noted := [one for one in found if one is not None]):
            return [False] * len(found)
        finite = iter(torch.stack(noted).isfinite().tolist())  # the device is waited for once
        return [one is not None and not next(finite) for one in found]

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is kept under ``keys``. Nothing is read, so no device is waited for."""
        for key in keys:
            self._rows.pop(key, None)
            self._largest.pop(key, None)

    def clear(self) -> None:
        self._rows.clear()
        self._largest.clear()


class RowCapture:
    """A logits processor that copies rows. It changes nothing."""

    store: RowStore

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        # By slot. In V1, a slot is a row of the batch; in V2, it is the slot of a request.
        self._keys: dict[int, str] = {}
        self._draws: set[str] = set()  # those of these keys that are of draws

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Both interfaces: anything is valid."""

    def is_argmax_invariant(self) -> bool:
        """V1: ``False``. Otherwise greedy batches would skip this processor, and others would show
        it logits scaled by temperature."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: follow the requests as the batch is rearranged, in the order that the interface
        requires."""
        if batch_update is None:
            return
        for slot in batch_update.removed:
            self._keys.pop(slot, None)
        for slot, params, _prompt, _output in batch_update.added:
            self.add_request(slot, params)
        for source, target, direction in batch_update.moved:
            moved, displaced = self._keys.pop(source, None), self._keys.pop(target, None)
            if moved is not None:
                self._keys[target] = moved
            if displaced is not None and direction.name == "SWAP":
                self._keys[source] = displaced

    def add_request(self, slot: int, params: Any) -> bool:
        """V2: a request enters a slot. Returns whether :meth:`apply` must see its logits."""
        key = (params.extra_args or {}).get(ROW_KEY)
        if key is None:
            return self._add_draw(slot, params)
        self._keys[slot] = key
        return True

    def _add_draw(self, slot: int, params: Any) -> bool:
        key = (params.extra_args or {}).get(DRAW_KEY)
        if key is None:
            self._keys.pop(slot, None)
            return False
        self._keys[slot] = key
        self._draws.add(key)
        return True

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:
        """Both: ``logits`` is ``[requests, vocab_size]`` float32, before temperature; only V2 gives
        ``context``."""
        if not self._keys:
            return logits
        slots = range(logits.shape[0]) if context is None else context.idx_mapping_np.tolist()
        found = [*map(self._keys.get, slots)]
        if self._draws:
            found = self._without_draws(found, logits)
        keys, chosen = _chosen(found, logits)
        if keys:
            self.store.put(keys, torch.log_softmax(chosen, dim=-1, dtype=torch.float32))
        return logits

    def _without_draws(self, found: list[str | None], logits: torch.Tensor) -> list[str | None]:
        """The keys of rows, after the logits of draws have been noted."""
        self._draws.intersection_update(self._keys.values())  # the others have ended
        drawn = [key if key in self._draws else None for key in found]
        keys, chosen = _chosen(drawn, logits)
        if keys:
            self.store.note(keys, chosen)
        return [None if key in self._draws else key for key in found]


def _chosen(found: Sequence[str | None], logits: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    """The keys that are not ``None``, and their logits."""
    keys = [key for key in found if key is not None]
    if keys and len(keys) < logits.shape[0]:
        rows = [row for row, key in enumerate(found) if key is not None]
        logits = logits.index_select(0, to_device(rows, logits.device))
    return keys, logits


def clean_state(worker: Any) -> None:
    """Overwrite the NaN in a worker's state, of which nothing is used any more. Attention passes
    over columns behind the end of a context by a weight of zero, and zero times NaN is NaN."""
    for cache in tree_leaves(worker.model_runner.kv_caches):
        whole = cache.new_empty(0).set_(cache.untyped_storage())  # in the order of memory
        if whole.device.type != "cpu":
            whole.zero_()  # the device would be waited for once a part
            continue
        for part in whole.split(PART_NUMBERS):
            # Only what must be overwritten: memory that was never used takes no room.
            if part.dtype.itemsize == 1 or not bool(part.sum().isfinite()):
                part.zero_()


def hide_padding(model: Any, width: int) -> None:
    """Take all mass from token ids from ``width`` on, in a model's logits, from which vLLM makes
    rows, samples and the log-probabilities of prompts."""
    # Otherwise a closed model would keep itself alive.
    own: Any = weakref.WeakMethod(model.compute_logits)

    def compute_logits(*args: Any, **options: Any) -> torch.Tensor | None:
        logits: torch.Tensor | None = own()(*args, **options)
        if logits is not None:  # which only the first of some workers has
            logits[..., width:] = -torch.inf
        return logits

    model.compute_logits = compute_logits


def capture_into(rows: RowStore) -> type:
    """The class for vLLM's option ``logits_processors``. It fills ``rows``, and has every interface
    of the installed vLLM."""
    from genlm.vllm.internals import logits_processor_interfaces

    return type("GenlmRowCapture", (RowCapture, *logits_processor_interfaces()), {"store": rows})
