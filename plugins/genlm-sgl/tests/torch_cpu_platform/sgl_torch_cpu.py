"""An SGLang platform for tests: the CPU in plain PyTorch, so that the real engine runs where there
is no GPU.

SGLang's own CPU support needs its compiled kernels, which no index carries. It lets other
distributions bring a platform through the entry-point group ``sglang.srt.platforms``; this is the
least such platform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any


def activate() -> str:
    """The function that the entry point names: it tells SGLang the platform's class."""
    return "sgl_torch_cpu.TorchCpuPlatform"


def __getattr__(name: str) -> Any:
    # Made on demand, because this module is imported while the module with its base classes is
    # still being imported.
    if name == "TorchCpuPlatform":
        return _platform()
    raise AttributeError(name)


@cache
def _platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

    if not hasattr(SRTPlatform, "get_kv_pool_cls"):  # early releases call these methods instead
        TorchCpuPlatform.get_mha_kv_pool_cls = _mha_kv_pool
        TorchCpuPlatform.get_paged_allocator_cls = _paged_allocator
    return TorchCpuPlatform


def _mha_kv_pool(self: object) -> type:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def _paged_allocator(self: object) -> type:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    return PagedTokenToKVPoolAllocator


@contextmanager
def without_pinned_memory() -> Iterator[None]:
    """Make requests for pinned memory ordinary ones: SGLang's LoRA layers ask for it
    unconditionally, and a PyTorch without an accelerator has none. It also stops transformers from
    loading a model, so leave the block for that."""
    import torch

    def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    changed = {
        (torch, name): unpinned(getattr(torch, name))
        for name in ("tensor", "zeros", "empty", "arange")
    }
    changed[torch.Tensor, "pin_memory"] = lambda tensor, *args, **kwargs: tensor
    original = {(owner, name): getattr(owner, name) for owner, name in changed}
    try:
        for (owner, name), function in changed.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in original.items():
            setattr(owner, name, function)
