"""Tensors of a safetensors file: their names and shapes, without loading them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from genlm.core.errors import InvalidAdapterError

if TYPE_CHECKING:
    import torch

#: The largest header that is read, in bytes.
MAX_HEADER_BYTES = 32 << 20

#: The longest name of a tensor or module, in characters, and the most dimensions of a tensor.
MAX_NAME_CHARACTERS, MAX_DIMENSIONS = 512, 8

#: The types of tensors that an adapter may have, under the format's names.
DTYPES = ("F64", "F32", "F16", "BF16")


@frozen
class Tensor:
    """A tensor of a safetensors file, by its header.

    Attributes:
        name: The name in the file.
        shape: The size of each dimension.
        dtype: The type, as the format names it, such as ``"BF16"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name, without loading them.

    Raises:
        InvalidAdapterError: it is not a safetensors file, or its header is too large.
    """
    from safetensors import SafetensorError, safe_open

    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise _unsound(file, f"its header has {length} bytes; at most {MAX_HEADER_BYTES} are read")
    try:  # the library reads no number of more than 64 bits, and checks sizes against the file
        with safe_open(file, framework="np") as tensors:
            names = tensors.keys()
            return {name: _tensor(file, name, tensors.get_slice(name)) for name in names}
    except SafetensorError as error:
        raise _unsound(file, f"{error!s:.200}") from None


def _tensor(file: Path, name: str, found: Any) -> Tensor:
    shape = tuple(found.get_shape())
    if len(name) > MAX_NAME_CHARACTERS or len(shape) > MAX_DIMENSIONS:
        raise _unsound(
            file,
            f"its tensor {name[:40]!r} has {len(shape)} dimensions and a name of {len(name)} "
            f"characters; at most {MAX_DIMENSIONS} dimensions and {MAX_NAME_CHARACTERS} characters "
            "are read",
        )
    return Tensor(name, shape, found.get_dtype())


def _unsound(file: Path, reason: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"{file} is not a sound safetensors file: {reason}; save the adapter again"
    )


def require_finite(file: Path, tensors: Iterable[Tensor]) -> None:
    """Raise an error for weights that are not finite, as of a training run that has diverged: some
    rows would be NaN, and others meaningless.

    Raises:
        InvalidAdapterError: a tensor holds NaN or infinity.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for tensor in tensors:
            # Checked in float32, because engines compute in it.
            if not opened.get_tensor(tensor.name).float().isfinite().all():
                raise InvalidAdapterError(
                    f"{file} has NaN or infinite numbers in {tensor.name}; train the adapter "
                    "again, or take an earlier checkpoint of it"
                )


def read_tensor(file: Path, tensor: Tensor) -> torch.Tensor:
    """Load one tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        loaded: torch.Tensor = tensors.get_tensor(tensor.name)
        return loaded
