"""The indices of a forward, copied to the device together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch


def on_host(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """``[len(values)]`` int64 on the host, to be copied to a device.

    For a GPU they are in pinned memory, so that the host need not wait for the copy. Each call
    allocates its own; PyTorch does not reuse pinned memory before the copy has ended.
    """
    host = torch.frombuffer(array("q", values), dtype=torch.long)
    return host.pin_memory() if device.type == "cuda" else host


class Upload:
    """Lists of integers that the host knows, copied to a device together.

    Copying a few integers takes as long as copying thousands. So all of them are collected first.
    The first list that is requested on a device takes the others along. On the CPU nothing is
    copied again.
    """

    def __init__(self) -> None:
        self._values: list[int] = []
        self._sizes: list[int] = []
        self._parts: dict[torch.device, Sequence[torch.Tensor]] = {}

    def add(self, values: Sequence[int]) -> Indices:
        """Collect some integers.

        Raises:
            RuntimeError: the collected lists have already been copied.
        """
        if self._parts:
            raise RuntimeError("the other indices have been copied; add all of them before")
        self._values.extend(values)
        self._sizes.append(len(values))
        return Indices(self, len(self._sizes) - 1, values)

    def on(self, device: torch.device) -> Sequence[torch.Tensor]:
        """The collected lists, in order, as parts of one tensor on a device."""
        parts = self._parts.get(device)
        if parts is None:
            parts = self._copied(device).split_with_sizes(self._sizes)
            self._parts[device] = parts
        return parts

    def _copied(self, device: torch.device) -> torch.Tensor:
        host = on_host(self._values, device)
        return host.to(device, non_blocking=device.type == "cuda")


class Indices:
    """Some of the integers of an :class:`Upload`.

    Attributes:
        values: The integers, on the host.
    """

    def __init__(self, upload: Upload, at: int, values: Sequence[int]) -> None:
        self.values = values
        self._upload = upload
        self._at = at

    def on(self, device: torch.device) -> torch.Tensor:
        """``[n]`` int64 on a device."""
        return self._upload.on(device)[self._at]


class Places:
    """Places along a dimension. Consecutive places are a slice, so that nothing is gathered; others
    are indices of an upload."""

    def __init__(self, places: Sequence[int], upload: Upload) -> None:
        first = places[0] if places else 0
        neighbours = slice(first, first + len(places))
        in_order = [*places] == [*range(neighbours.start, neighbours.stop)]
        self._at = neighbours if in_order else upload.add(places)

    def on(self, device: torch.device) -> slice | torch.Tensor:
        """An index for a tensor on a device."""
        return self._at if isinstance(self._at, slice) else self._at.on(device)
