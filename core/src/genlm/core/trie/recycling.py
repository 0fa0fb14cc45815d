"""Memory for large results that is used again once nobody holds the result."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

# Smaller blocks the allocator keeps by itself; larger ones are not worth holding.
_LEAST, _MOST = 4 << 20, 256 << 20


class Recycler:
    """Makes arrays for results, out of the last one that was given up if that fits.

    Large blocks go back to the operating system when they are freed, which then clears every page
    of the next one: for a batch of sums that takes as long as the sums. Only one block is kept.
    """

    def __init__(self) -> None:
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=1)  # its methods are atomic

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """As ``np.empty``. The memory is free again when the array, its views and all that shares
        it are gone."""
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
    """What a result's array is made of: gives the block back when the last array that refers to it
    goes."""

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
