"""The errors of libraries when memory has run out."""

from __future__ import annotations

import pytest
import torch

from genlm.core.errors import EngineError
from genlm.kit.memory import is_out_of_memory, lower


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes."),
        RuntimeError("unable to mmap 7 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("MPS backend out of memory (MPS allocated: 7 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("[malloc] Unable to allocate 7 bytes."),
        RuntimeError("[metal::malloc] 7 bytes, greater than the maximum allowed buffer size"),
        RuntimeError("Command buffer execution failed: Insufficient Memory (00000008)"),
    ],
    ids=str,
)
def test_memory_has_run_out(error: Exception) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(EngineError, match=r"memory ran out .*; lower batch"), lower("batch_size"):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), ValueError("not enough memory")])
def test_other_errors_are_unchanged(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, lower("batch_size"):
        raise error
    assert raised.value is error
