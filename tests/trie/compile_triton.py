"""Compile every kernel of a trie to machine code for a GPU, which needs none; the interpreter takes
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

TILE = {"BLOCK": kernels.BLOCK, "ROWS": kernels.ROWS}
FLAGS = {
    kernels.combine_pairs: ("IS_FIRST", "IS_SUM"),
    kernels.combine_rest: ("IS_SUM",),
    kernels.gather: (),
}
ROWS, INDICES = ("weights", "made", "result"), ("first", "other", "values", "starts", "place")


def compiled(kernel, capability, dtype, constants):
    types = {name: "i32" for name in kernel.arg_names}
    types |= {name: f"*{dtype}" for name in ROWS if name in types}
    types |= {name: "*i32" for name in INDICES if name in types}
    types |= {name: "constexpr" for name in constants}
    source = ASTSource(kernel, types, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm


def main(capabilities):
    count = 0
    for kernel, flags in FLAGS.items():
        choices = product(capabilities, ("fp32", "fp64"), product((True, False), repeat=len(flags)))
        for capability, dtype, values in choices:
            constants = {"stride": 1, **dict(zip(flags, values, strict=True)), **TILE}
            assert compiled(kernel, capability, dtype, constants)["cubin"]
            count += 1
    print(f"compiled {count} kernels")


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
