"""Compile the kernel of a trie to machine code for a GPU, which needs none; the interpreter takes
programs that the compiler does not. ``test_triton.py`` runs this in a process of its own.

    python tests/trie/compile_triton.py 75 90
"""

from __future__ import annotations

import sys
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from genlm.core.trie import cuda as kernels

KERNEL = kernels.combine_pairs


def main(capabilities):
    count = 0
    for capability, dtype, is_sum in product(capabilities, ("fp32", "fp64"), (True, False)):
        constants = {"IS_SUM": is_sum, "BLOCK": kernels.BLOCK, "ROWS": kernels.ROWS}
        types = {name: "i32" for name in KERNEL.arg_names} | {"work": f"*{dtype}", "other": "*i32"}
        types |= {name: "constexpr" for name in constants}
        source = ASTSource(KERNEL, types, constants)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
        count += 1
    print(f"compiled {count} kernels")


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
