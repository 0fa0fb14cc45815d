"""The trie's kernels: NumPy for rows in main memory, PyTorch for rows on a device."""

from genlm.core.trie.kernels.cpu import CpuKernel
from genlm.core.trie.kernels.device import DeviceKernel
from genlm.core.trie.kernels.kernel import Kernel

__all__ = ["CpuKernel", "DeviceKernel", "Kernel"]
