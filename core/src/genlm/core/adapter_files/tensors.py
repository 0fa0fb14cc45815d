"""Tensors of a safetensors file: their names and shapes, without loading them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from genlm.core.errors import InvalidAdapterError

if TYPE_CHECKING:
    import torch

#: The largest header that is read, in bytes.
MOST_HEADER = 32 << 20

#: Bytes per element of the types that an adapter may have.
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@frozen
class Tensor:
    """A tensor of a safetensors file, by its header.

    Attributes:
        shape: Its size in each dimension.
        dtype: The format's name of its type, such as ``"BF16"``.
        start: Where its bytes begin in the file.
        stop: Where they end.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name, without loading them.

    Raises:
        InvalidAdapterError: it is not such a file, or its header is larger than is read.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MOST_HEADER or 8 + length > size:
            raise InvalidAdapterError(
                f"{file} is not a sound safetensors file: its header has {length} bytes, the file "
                f"{size}, and at most {MOST_HEADER} are read; save the adapter again"
            )
        text = opened.read(length)
    try:
        header = json.loads(text.decode())
        header.pop("__metadata__", None)
        return {name: _tensor(value, 8 + length, size) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidAdapterError(
            f"{file} is not a sound safetensors file ({type(error).__name__}: {error!s:.100}); "
            "save the adapter again"
        ) from None


def _tensor(value: Any, offset: int, size: int) -> Tensor:
    shape, dtype = value["shape"], value["dtype"]
    start, stop = value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"shape {shape} at {start}:{stop}")
    if dtype in WIDTHS and stop - start != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"shape {shape} of {dtype} in {stop - start} bytes")
    if start > stop or offset + stop > size:
        raise ValueError(f"tensor at {start}:{stop} of a file of {size} bytes")
    return Tensor(tuple(shape), dtype, offset + start, offset + stop)


def read_tensor(file: Path, tensor: Tensor) -> torch.Tensor:
    """Load one tensor of a safetensors file."""
    import torch

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
    with file.open("rb") as opened:
        opened.seek(tensor.start)
        data = bytearray(opened.read(tensor.stop - tensor.start))
    return torch.frombuffer(data, dtype=dtypes[tensor.dtype]).view(tensor.shape)
