"""Seconds to import, to list the backends, and to load a model

Each in a new process, with Python's own start, which is the floor. A loaded hf model has run
already: the plugin tries its forward pass first, which reads all weights into memory. genlm-backend
reads them for the first row.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.protocol import Bench, main

PLUGIN = "hf"


def measure(bench: Bench, case: str, code: str) -> None:
    bench.time(
        case,
        lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True),
        unit="s",
        repeat=5,
    )


def ours(bench: Bench) -> None:
    measure(bench, "import the library", "import genlm.core")
    measure(bench, "list the backends", "from genlm.core.cli import main; main(['backends'])")
    measure(bench, "import the trie", "import genlm.core.trie")
    measure_load(bench, "genlm.core")
    code = "import sys, genlm.core; print(*{'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    heavy = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    of_them = "Engines and tensor libraries imported by `import genlm.core`"
    bench.note(f"{of_them}: {heavy or 'none'}.")


def theirs(bench: Bench) -> None:
    measure(bench, "import the library", "import genlm.backend")
    measure(bench, "import the trie", "import genlm.backend.trie")
    measure_load(bench, "genlm.backend")


def floor(bench: Bench) -> None:
    for case in ("import the library", "list the backends", "import the trie"):
        measure(bench, case, "pass")


def measure_load(bench: Bench, package: str) -> None:
    load = (
        f"from {package} import load_model_by_name; "
        f"lm = load_model_by_name({bench.model!r}, backend='hf')"
    )
    row = "import asyncio; asyncio.run(lm.next_token_logprobs([1, 2, 3]))"
    measure(bench, "import the library, load hf", load)
    measure(bench, "import the library, load hf, ask one row", f"{load}; {row}")


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
