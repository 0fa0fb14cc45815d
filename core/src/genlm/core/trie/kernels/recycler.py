"""Memory for results, kept from one call to the next."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

# The allocator itself keeps smaller blocks; larger ones would occupy too much memory.
_LEAST, _MOST = 4 << 20, 256 << 20


class Recycler:
    """Makes arrays for results, in the memory of the last one that was released if that fits.

    A large block goes back to the operating system when it is freed. The system then clears every
    page of the next block, which takes as long as a batch of sums. So one block is kept.
    """

    def __init__(self) -> None:
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=1)  # its methods are atomic

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """Like ``np.empty``. The memory is free again when the array and all its views are gone."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if not _LEAST <= size <= _MOST:
            return np.empty(shape, dtype)
        try:
            block = self._spare.pop()
        except IndexError:
            block = np.empty(size, np.uint8)
        if not size <= block.nbytes <= 2 * size:
            block = np.empty(size, np.uint8)
        return np.asarray(_Lease(block, self._spare, shape, np.dtype(dtype).str))


class _Lease:
    """The base of a result's array. Gives the block back when the last array on it is gone."""

    def __init__(
        self,
        block: npt.NDArray[np.uint8],
        home: deque[npt.NDArray[np.uint8]],
        shape: tuple[int, ...],
        typestr: str,
    ):
        self._block = block
        self._home = home
        self.__array_interface__ = {
            "data": (block.ctypes.data, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }

    def __del__(self) -> None:
        self._home.append(self._block)
