"""Steps of constant shape, recorded and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from attrs import define, field, frozen

from genlm.core.checks import describe_error
from genlm.core.logs import get_logger
from genlm.core.types import Adapter
from genlm.hf.graphs import Recorder, Recording
from genlm.hf.layout import Chunks
from genlm.hf.runner import Runner
from genlm.hf.static_layout import StaticInputs
from genlm.hf.watch import ModelWatch
from genlm.kit.memory import is_out_of_memory
from genlm.kit.segments import Slot

logger = get_logger()

#: The width of a step is a multiple of this many columns.
COLUMN_MULTIPLE = 64

#: From this step on, a shape has a step of constant shape. The next one is recorded: the first
#: forward may allocate memory that later forwards use.
STEPS_BEFORE_RECORDING = 3


@frozen
class StaticShape:
    """The shape of a step.

    Attributes:
        rows: How many tokens, a power of two.
        width: How many columns of each slot are read.
    """

    rows: int
    width: int

    @classmethod
    def of(cls, runner: Runner, rows: int, length: int) -> StaticShape:
        """The smallest shape for ``rows`` contexts of at most ``length`` tokens."""
        width = -(-length // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        return cls(1 << (rows - 1).bit_length(), min(width, runner.pool.columns))


class StaticStep:
    """A step of one shape.

    Args:
        runner: Runs the step.
        shape: Its shape.
        adapter: The adapter of all rows.

    Attributes:
        is_recorded: Whether the step is replayed from a recording.
    """

    def __init__(self, runner: Runner, shape: StaticShape, adapter: Adapter | None) -> None:
        self._runner, self._shape, self._adapter = runner, shape, adapter
        self._inputs = StaticInputs(shape.rows, runner.device)
        self._recording: Recording | None = None

    @property
    def is_recorded(self) -> bool:
        return self._recording is not None

    def record(self, recorder: Recorder) -> None:
        """Record the step, so that it is replayed from now on.

        Raises:
            Exception: the step cannot be recorded.
        """
        self._recording = recorder.record(self._forward)

    def run(
        self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> torch.Tensor:
        """One step: ``[len(ids), vocab_size]`` logits.

        Args:
            ids: The tokens, at most as many as the shape has rows.
            positions, slots: The position and the slot of each token.
        """
        self._inputs.fill(ids, positions, slots)
        if self._recording is None:
            return self._forward()[: len(ids)]
        self._recording.replay()
        return self._recording.result[: len(ids)].clone()  # the next replay overwrites the result

    def _forward(self) -> torch.Tensor:
        return self._runner.static(self._inputs, self._shape.width, self._adapter)


#: A shape, and the version of an adapter.
Key = tuple[StaticShape, int]


@define(eq=False)
class StaticSteps:
    """Runs forwards. Steps that add one token to each of some slots, all with one adapter, have a
    constant shape. A frequent shape is recorded, and replayed from then on.

    A recording contains the addresses of the model's weights and of the pool. So all recordings are
    dropped when the pool is resized, an adapter is added or removed, or a tensor of the model is
    replaced. A recording does not call hooks: while the user has set hooks on the model, everything
    is computed chunk by chunk.

    Attributes:
        runner: Runs forwards.
        recorder: Records the steps; ``None`` if the device has no recorder.
        most: The most bytes of recordings. A shape whose recording exceeds it is not recorded
            again.
    """

    runner: Runner
    recorder: Recorder | None
    most: int
    _steps: dict[Key, StaticStep] = field(factory=dict, init=False)
    _came: Counter[Key] = field(factory=Counter, init=False)
    _refused: set[Key] = field(factory=set, init=False)
    _failed: bool = field(default=False, init=False)
    _made: tuple[int, int] = field(default=(-1, -1), init=False)
    _watch: ModelWatch = field(init=False)

    def packed(
        self,
        chunks: Chunks,
        tokens: Sequence[int],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Run chunks, as :meth:`Runner.packed` does."""
        self._drop_what_is_old()
        step = self._step(chunks, tokens, adapters, wanted)
        if step is None:
            return self.runner.packed(chunks, tokens, adapters, wanted)
        # Rows run in the wanted order, so that they need not be reordered.
        slots = [segment.index for segment in chunks.segments if isinstance(segment, Slot)]
        columns = (tokens, chunks.starts, slots)
        return step.run(*([column[at] for at in wanted] for column in columns))

    def drop(self) -> None:
        """Drop all recordings, and free their memory."""
        self._steps.clear()
        if self.recorder is not None:
            self.recorder.forget()

    def _drop_what_is_old(self) -> None:
        made = (self.runner.changes, self.runner.pool.resizes)
        if self._made[0] != made[0]:
            self._watch = ModelWatch(self.runner.modules)
        if self._made != made or self._watch.has_changed():
            self.drop()
        self._made = made

    def _step(
        self,
        chunks: Chunks,
        tokens: Sequence[int],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> StaticStep | None:
        """The step that computes chunks; ``None`` if no step of constant shape can, or the shape is
        still rare."""
        count, adapter = len(tokens), adapters[0]
        is_plain = (
            len(chunks.segments) == len(wanted) == count
            and isinstance(chunks.segments[-1], Slot)  # trunks come last
            and not any(chunks.bases)
            and adapters.count(adapter) == count
        )
        if self._failed or not is_plain or self.runner.hooks.are_foreign:
            return None
        shape = StaticShape.of(self.runner, count, max(chunks.stops))
        key = (shape, 0 if adapter is None else adapter.version)
        if key in self._refused:
            return None
        self._came[key] += 1
        if self.recorder is not None and self._came[key] < STEPS_BEFORE_RECORDING:
            return None
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = StaticStep(self.runner, shape, adapter)
        elif self.recorder is not None and not step.is_recorded:
            self._record(step, self.recorder, key)
        return self._steps.get(key)

    def _record(self, step: StaticStep, recorder: Recorder, key: Key) -> None:
        """Record a step. If its memory runs out, all recordings are dropped, and this shape is
        computed chunk by chunk from now on. After any other failure, all shapes are."""
        rows, columns = key[0].rows, key[0].width
        try:
            step.record(recorder)
        except Exception as error:  # from the driver, or from code that a graph cannot hold
            self._failed = not is_out_of_memory(error)
            if self._failed:
                why = describe_error(error)
                logger.warning("kv.step_not_recorded", rows=rows, columns=columns, reason=why)
        else:
            if recorder.nbytes <= self.most:
                logger.debug("kv.step_recorded", rows=rows, columns=columns)
                return
        self._refused.add(key)
        self.drop()
