"""The core's tests, and the conformance of engines, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tools.smollm2 import default_folder
from tools.tiny import write_adapter, write_model

#: The core's tests that start no other programs.
QUICK_TESTS = ("tests/test_batching.py", "tests/test_steps.py", "tests/test_cache.py", "tests/trie")

#: The engine options for vLLM: room for the suite's contexts; and two adapters, for which its
#: kernels need half precision.
VLLM = {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.1,
}
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}

#: The engine options for SGLang. On a CPU, its adapters need pinned memory, which only CUDA has.
SGLANG = {"context_length": 512, "max_total_tokens": 8192}

#: Tests that build or install something, or look at the site.
NEED_AN_INDEX = (
    "tests/packaging",
    "tests/site",
    "tests/clients",
    "tests/examples",
    "tests/conformance/test_new_plugin.py",
    "tests/conformance/test_writing_a_plugin.py",
)

COMMAND = "import sys; from genlm.core.cli import main; sys.exit(main())"


def tests(device: str, quick: bool) -> bool:
    """The core's tests that need no package index, those of the trie on the device too."""
    chosen = [*QUICK_TESTS] if quick else ["tests", *(f"--ignore={at}" for at in NEED_AN_INDEX)]
    return _pytest(chosen, device)


def hf_tests(device: str, quick: bool) -> bool:
    """hf's tests, with their models on the device."""
    folder = "plugins/genlm-hf/tests"
    return _pytest([f"{folder}/test_reuse.py" if quick else folder], device)


def _pytest(chosen: list[str], device: str) -> bool:
    if find_spec("xdist") is not None:
        chosen = [*chosen, "-n", str(min(os.cpu_count() or 1, 8))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.on_a_gpu", *chosen]
    environment = os.environ | {"GENLM_TEST_DEVICE": device}
    return subprocess.run(command, env=environment).returncode == 0


def conformance(backend: str, device: str, dtype: str) -> bool:
    """The suite on a small random model with two adapters, where the engine takes them."""
    if not default_folder().exists():
        print("gpu: no tokenizer for conformance; run tools/smollm2.py", file=sys.stderr)
        return False
    options: dict[str, object] = {"device": device, "dtype": dtype}
    adapters = True
    if backend == "vllm":
        adapters = dtype != "float32" or device == "cpu"
        options = {"engine_opts": VLLM | (LORA if adapters else {}) | {"dtype": dtype}}
    elif backend == "sgl":
        adapters = device != "cpu"
        options = {"engine_opts": SGLANG | {"enable_lora": adapters, "dtype": dtype}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(str(default_folder()), Path(folder) / "tiny")
        arguments = ["conformance", backend, "--model", model, "--dtype", dtype, "--quick"]
        for name, value in options.items():
            arguments += ["--option", f"{name}={json.dumps(value)}"]
        for seed, adapter in enumerate("ab" if adapters else ""):
            path = write_adapter(model, Path(folder) / adapter, seed)
            arguments += ["--adapter", f"{adapter}={path}"]
        return subprocess.run([sys.executable, "-c", COMMAND, *arguments]).returncode == 0
