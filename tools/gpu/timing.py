"""Measures how long calls take on a device, and what they launch there."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

#: The driver's calls that start a kernel, and those that wait for one or copy.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
COPIES = ("cudaMemcpyAsync",)


def on_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def finish(device: str) -> None:
    """Wait for the work queued on a device."""
    if on_cuda(device):
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: str) -> float:
    """How long a call takes, with the device's work."""
    finish(device)
    start = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - start


def median(call: Callable[[], object], device: str, repeat: int) -> float:
    """The median time of a call; the first one is not counted."""
    return statistics.median([seconds(call, device) for _ in range(repeat + 1)][1:])


def work_of(call: Callable[[], object], device: str) -> dict[str, float]:
    """The work of one call on a GPU: launched kernels and graphs, waits for the device, copies, and
    the milliseconds for which the device is busy. Empty on other devices."""
    if not on_cuda(device):
        return {}
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    finish(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
    found: Counter[str] = Counter()
    busy = 0.0
    for event in profiled.key_averages():
        found[event.key] += event.count
        if event.device_type == DeviceType.CUDA:
            busy += event.self_device_time_total
    return {
        "kernels": sum(found[name] for name in LAUNCHES),
        "waits": sum(found[name] for name in WAITS),
        "graphs": found["cudaGraphLaunch"],
        "copies": sum(found[name] for name in COPIES),
        "busy_ms": 1e-3 * busy,
    }


def waits_of(call: Callable[[], object], device: str) -> Counter[str]:
    """The lines at which Python waits for a GPU during a call; empty on other devices."""
    if not on_cuda(device):
        call()
        return Counter()
    finish(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{each.filename}:{each.lineno}" for each in caught)


def medians(**times: list[float]) -> dict[str, Any]:
    """Medians of seconds, in milliseconds; the first value of each list is not counted."""
    return {f"{name}_ms": 1e3 * statistics.median(values[1:]) for name, values in times.items()}
