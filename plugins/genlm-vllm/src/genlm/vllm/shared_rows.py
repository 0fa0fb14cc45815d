"""Memory that a worker and the process that reads its rows share on one machine: rows go through
it, and only a number is sent.

It is an anonymous file of the reader, which the worker opens by the reader's descriptor. So it has
no name that could stay behind: the kernel frees it when both have let go of it, however they end. A
worker on another machine, or one that sees other processes, does not find it, and sends bytes.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from typing import NamedTuple

import torch

#: The most bytes of rows that are shared at a time; more rows are sent in parts.
MAX_BYTES = 128 << 20

#: How many random bytes at its beginning tell the memory from another file with its path.
MARK_BYTES = 64


class Place(NamedTuple):
    """The place of shared memory.

    Attributes:
        path: Of the file.
        size: Its size, bytes.
        mark: Its first bytes.
    """

    path: str
    size: int
    mark: bytes


class SharedRows:
    """The reader's memory, which grows with the number of rows.

    Args:
        width: Entries of a row, float32.

    Attributes:
        most: How many rows it has room for at most.
    """

    def __init__(self, width: int) -> None:
        self._bytes = 4 * width
        self.most = max(MAX_BYTES // self._bytes, 1)
        self._memory: torch.Tensor | None = None
        self._place: Place | None = None
        self._file = -1

    def place_for(self, rows: int) -> Place | None:
        """Shared memory with room for the rows; ``None`` if the system gives none."""
        rows = min(1 << (rows - 1).bit_length(), self.most)  # so that it seldom grows
        size = MARK_BYTES + rows * self._bytes
        if self._place is not None and self._place.size >= size:
            return self._place
        self.close()
        try:
            file = os.memfd_create("genlm-rows")
        except (AttributeError, OSError):  # not on Linux, or a sandbox forbids it
            return None
        try:
            os.truncate(file, size)
            mark = secrets.token_bytes(MARK_BYTES)
            os.write(file, mark)
            place = Place(f"/proc/{os.getpid()}/fd/{file}", size, mark)
            self._memory = _mapped(place)
        except (OSError, RuntimeError):  # there is no memory, or no /proc
            os.close(file)
            return None
        self._file, self._place = file, place
        return place

    def read(self, rows: int, width: int) -> torch.Tensor:
        """A copy of what was put there, ``[rows, width]``."""
        assert self._memory is not None
        return self._memory[: rows * width].view(rows, width).clone()

    def close(self) -> None:
        """Let go of the memory."""
        if self._place is not None:
            os.close(self._file)
        self._memory = self._place = None


class MemoryOfReader:
    """The worker's view of the memory that its reader has named last."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._memory: torch.Tensor | None = None

    def put(self, place: Place, block: torch.Tensor) -> bool:
        """Write ``block``, ``[rows, width]`` float32, to the beginning of the memory. ``False`` if
        it is not found here, or has no room for that."""
        if place != self._place:
            _unpin(self._memory)
            self._place, self._memory = place, _found(place)
            if self._memory is not None and block.is_cuda:
                _pin(self._memory)
        if self._memory is None or len(self._memory) < block.numel():
            return False
        self._memory[: block.numel()].copy_(block.flatten())
        return True


def _found(place: Place) -> torch.Tensor | None:
    """The memory; ``None`` if its path names no file here, or another one."""
    try:
        there = os.stat(place.path)
        if not stat.S_ISREG(there.st_mode) or there.st_size != place.size:
            return None
        with open(place.path, "rb") as file:
            begins = file.read(MARK_BYTES)
        return _mapped(place) if begins == place.mark else None
    except (OSError, RuntimeError):  # gone, or of another user
        return None


def _mapped(place: Place) -> torch.Tensor:
    """The numbers after the mark, as float32."""
    memory = torch.from_file(place.path, shared=True, size=place.size // 4, dtype=torch.float32)
    return memory[MARK_BYTES // 4 :]


def _pin(memory: torch.Tensor) -> None:
    """Let a GPU copy there at the full speed of the bus. Where that fails, copies are slower."""
    pages = memory.untyped_storage()
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cuda.cudaHostRegister(pages.data_ptr(), pages.nbytes(), 0)):
        with suppress(RuntimeError):  # CUDA reports the error at the next launch, which clears it
            torch.zeros(1, device="cuda")


def _unpin(memory: torch.Tensor | None) -> None:
    if memory is not None and memory.is_pinned():
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cuda.cudaHostUnregister(memory.untyped_storage().data_ptr())
