"""What to run first on a GPU: tests of the core and the trie, conformance of hf, quick figures.

Every figure is beside a floor of the same run: a step beside the raw model's, the trie beside a
copy on the device. ``--device cpu`` goes through the same code, so that it can be tried anywhere;
it is then ``--quick``, which takes small models and few contexts, unless ``--no-quick`` is given.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from benchmarks.trie import enlarged
from genlm.core import EngineError
from genlm.core.mock import ByteTokenizer
from genlm.core.tokenization import Token, decode_vocab
from genlm.core.trie.device import proven_reducer
from genlm.core.trie.nodes import Nodes, SortedItems
from genlm.core.trie.plan import Plan
from genlm.core.trie.reducer import TorchReducer
from genlm.core.trie.weights import SUM
from genlm.hf import AsyncTransformer
from genlm.hf.runner import CACHE_NAMES
from tools.shapes import SHAPES, VOCABULARY, model_of
from tools.smollm2 import default_folder

STAGES = ("tests", "conformance", "trie", "steps")

#: The core's tests that start no other programs.
QUICK_TESTS = ("tests/test_batching.py", "tests/test_steps.py", "tests/test_cache.py", "tests/trie")

#: SmolLM2's vocabulary, and one as large as that of Qwen 2.5.
SIZES = (49_152, 151_665)

#: The most tokens in one raw forward, so that a long prefill fits into memory.
RAW_TOKENS = 1 << 15

#: How much of a prompt contexts have of their own, where they share one: tokens.
OWN = 4

#: How far rows in float32 may be from the raw model's, nats.
ATOL = 1e-3


@frozen
class Size:
    """How much is measured; quick, or all."""

    shapes: str
    contexts: str
    lengths: str
    repeat: int
    trie_rows: int


QUICK = Size("tiny,tiny-gemma2,tiny-mamba,135m", "1,8", "20,100", 5, 8)
FULL = Size("135m,1b,8b,gemma2,mamba", "1,8,32,128,512", "20,1000", 10, 128)


class WideTokenizer(ByteTokenizer):
    """A vocabulary as wide as that of a real model."""

    def __len__(self) -> int:
        return VOCABULARY

    def token_bytes(self) -> list[bytes]:
        return [token_id.to_bytes(3, "big") for token_id in range(VOCABULARY)]


def finish(device: str) -> None:
    """Wait for what is queued on a device."""
    if torch.device(device).type == "cuda":
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


# --- steps ----------------------------------------------------------------------------------------


class Raw:
    """The model as transformers has it, with a cache of its own: the floor."""

    def __init__(self, model: Any, contexts: list[list[int]]) -> None:
        self._model = model
        takes = inspect.signature(model.forward).parameters
        self._name = next(name for name in CACHE_NAMES if name in takes)
        self._cache: Any = None
        ids = torch.tensor(contexts, device=model.device)
        # A recurrent model continues its cache by single tokens alone.
        width = ids.shape[1] if model._is_stateful else max(RAW_TOKENS // len(ids), 1)
        for start in range(0, ids.shape[1], width):
            self.rows = self._forward(ids[:, start : start + width])

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {} if self._cache is None else {self._name: self._cache}
        result = self._model(ids, use_cache=True, logits_to_keep=1, **options)
        self._cache = getattr(result, self._name)
        rows: torch.Tensor = result.logits[:, -1].float().log_softmax(-1)
        return rows

    def extend(self, tokens: list[int]) -> None:
        """One token more for every context."""
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        self.rows = self._forward(ids)


def step_figures(
    model: Any, contexts: int, length: int, repeat: int, *, shared: bool
) -> dict[str, float]:
    """A step in which each context grows by one token, ours and transformers' own.

    Returns:
        Milliseconds of both, their ratio, what the core takes of ours for each request
        (microseconds), and how far any of the rows are apart (nats).
    """
    source, device = random.Random(contexts * length), str(model.device)

    def tokens(count: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(count)]

    prompt = tokens(length - OWN) if shared else []
    grown = [prompt + tokens(length - len(prompt)) for _ in range(contexts)]
    raw, apart = Raw(model, grown), 0.0
    mine, floor, core = [], [], []
    with AsyncTransformer(model, WideTokenizer(), cache_size=0) as lm:
        rows: Any = None

        def ours() -> None:
            nonlocal rows
            rows = lm.batch_next_token_logprobs_sync(grown)

        def compare() -> float:
            return max(float((a - b).abs().max()) for a, b in zip(rows, raw.rows, strict=True))

        ours()
        apart = compare()
        for _ in range(repeat + 1):  # in turn, so that a busy machine disturbs both
            new = tokens(contexts)
            for context, token in zip(grown, new, strict=True):
                context.append(token)
            in_engine = lm.stats.engine_seconds
            mine.append(seconds(ours, device))
            core.append(mine[-1] - (lm.stats.engine_seconds - in_engine))
            floor.append(seconds(lambda new=new: raw.extend(new), device))  # type: ignore[misc]
            apart = max(apart, compare())
    times = statistics.median(mine[1:]), statistics.median(floor[1:])
    return {
        "ours_ms": 1e3 * times[0],
        "raw_ms": 1e3 * times[1],
        "times_raw": times[0] / times[1],
        # On a GPU that is with waiting for the device, which the engine leaves to its callers.
        "core_us_per_request": 1e6 * statistics.median(core[1:]) / contexts,
        "rows_apart": apart,
    }


# --- the trie -------------------------------------------------------------------------------------


def trie_words(size: int) -> list[bytes]:
    """The bytes of a vocabulary: SmolLM2's if it is here, joined up to the size."""
    if not default_folder().exists():
        return enlarged(WideTokenizer().token_bytes(), size)
    from transformers import AutoTokenizer

    vocabulary, _ = decode_vocab(AutoTokenizer.from_pretrained(default_folder()))
    return enlarged([bytes(word) for word in vocabulary], size)


def trie_figures(words: list[bytes], device: str, rows: int, repeat: int) -> dict[str, Any]:
    """Sums over the trie, in PyTorch's own functions and, on CUDA, in the fused kernel: what of a
    copy's speed they reach, and their relative error in float32."""
    items = SortedItems.of(Token.vocabulary(words))
    plan = Plan.of(items.order, Nodes.of(items))
    ways: dict[str, Any] = {"plain": TorchReducer(plan, device)}
    if torch.device(device).type == "cuda":
        fused = proven_reducer(plan, device, ways["plain"])
        ways |= {"fused": fused} if fused else {}
    width = plan.nodes + plan.items
    source = torch.rand(rows, width, device=device)
    target = torch.empty_like(source)
    copied = median(lambda: target.copy_(source), device, repeat)
    bandwidth = 2 * 4e-9 * source.numel() / copied
    weights = torch.rand(rows, plan.items, device=device)
    exact = ways["plain"].reduce(SUM, weights.double())
    # Read once and written once, which no sum can do without.
    needed = 4e-9 * rows * (plan.items + width)
    figures: dict[str, Any] = {"copy_GB_per_s": bandwidth, "ways": list(ways)}
    for name, way in ways.items():
        took = median(lambda way=way: way.reduce(SUM, weights), device, repeat)  # type: ignore[misc]
        sums = way.reduce(SUM, weights).double()
        figures |= {
            f"{name}_ms": 1e3 * took,
            f"{name}_GB_per_s": needed / took,
            f"{name}_share_of_copy": needed / took / bandwidth,
            f"{name}_relative_error": float(((sums - exact) / exact).abs().nan_to_num().max()),
        }
    return figures


# --- tests and conformance ------------------------------------------------------------------------


def tests(device: str, quick: bool) -> bool:
    """The core's tests, those of the trie on the device too."""
    chosen = QUICK_TESTS if quick else ("tests",)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {"GENLM_TEST_DEVICE": device}
    return subprocess.run(command, env=environment).returncode == 0


def conformance(device: str, dtype: str) -> bool:
    """The suite on a small random model with two adapters."""
    from tools.tiny import write_adapter, write_model

    if not default_folder().exists():
        print("gpu: no tokenizer for conformance; run tools/smollm2.py", file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(str(default_folder()), Path(folder) / "tiny")
        command = "import sys; from genlm.core.cli import main; sys.exit(main())"
        arguments = ["conformance", "hf", "--model", model, "--dtype", dtype, "--quick"]
        arguments += ["--option", f'device="{device}"', "--option", f'dtype="{dtype}"']
        for seed, adapter in enumerate("ab"):
            path = write_adapter(model, Path(folder) / adapter, seed)
            arguments += ["--adapter", f"{adapter}={path}"]
        return subprocess.run([sys.executable, "-c", command, *arguments]).returncode == 0


# --- the command ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--quick", action=argparse.BooleanOptionalAction, help="default on a CPU")
    add("--stages", default=",".join(STAGES), help="default: %(default)s")
    add("--shapes", help=f"some of {', '.join(SHAPES)}")
    add("--contexts", help=f"default: {FULL.contexts}; quick: {QUICK.contexts}")
    add("--lengths", help=f"default: {FULL.lengths}; quick: {QUICK.lengths}")
    add("--repeat", type=int, help=f"default: {FULL.repeat}; quick: {QUICK.repeat}")
    add("--out", type=Path, default=Path("build/gpu.json"))
    options = parser.parse_args()
    options.on_cpu = torch.device(options.device).type == "cpu"
    if options.quick is None:
        options.quick = options.on_cpu
    size = QUICK if options.quick else FULL
    for name in ("shapes", "contexts", "lengths", "repeat"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(size, name))
    options.trie_rows = size.trie_rows
    for name, known in (("stages", STAGES), ("shapes", SHAPES)):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(
                f"--{name} must be some of {', '.join(known)}; got {', '.join(sorted(unknown))}"
            )
    return options


def main() -> None:
    options = arguments()
    device, on_cpu = options.device, options.on_cpu
    if not on_cpu and not torch.cuda.is_available():
        print("gpu: skipped, since PyTorch sees no CUDA device; --device cpu tries the same code")
        return
    name = "CPU" if on_cpu else torch.cuda.get_device_name(device)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "figures": []}
    # A trie takes "cpu" for NumPy's kernel; with a number it is the one of accelerators.
    for_trie = "cpu:0" if device == "cpu" else device

    def record(**figures: Any) -> None:
        print(json.dumps(figures), flush=True)
        result["figures"].append(figures)

    sound, stages = True, options.stages.split(",")
    if "tests" in stages:
        sound &= (passed := tests(for_trie, options.quick))
        record(what="tests", passed=passed)
    if "conformance" in stages:
        for dtype in ("float32",) if on_cpu else ("float32", "bfloat16"):
            sound &= (passed := conformance(device, dtype))
            record(what="conformance", dtype=dtype, passed=passed)
    if "trie" in stages:
        for size in SIZES[:1] if options.quick else SIZES:
            words = trie_words(size)
            for rows in (1, options.trie_rows):
                figures = trie_figures(words, for_trie, rows, options.repeat)
                record(what="trie", tokens=size, rows=rows, **figures)
                sound &= on_cpu or "fused" in figures["ways"]
    if "steps" in stages:
        precision = torch.float32 if on_cpu else torch.bfloat16
        for shape in options.shapes.split(","):
            sound &= steps(model_of(shape, device, precision), shape, options, record)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(options.out)
    sys.exit(not sound)


def steps(model: Any, shape: str, options: argparse.Namespace, record: Callable[..., None]) -> bool:
    """Every step of one model; whether its rows in float32 are the raw model's."""
    sound = True
    for length in map(int, options.lengths.split(",")):
        for contexts in map(int, options.contexts.split(",")):
            for shared in (False, True) if contexts > 1 else (False,):
                case = {"shape": shape, "contexts": contexts, "length": length, "shared": shared}
                try:
                    figures = step_figures(model, contexts, length, options.repeat, shared=shared)
                except (torch.OutOfMemoryError, EngineError) as error:
                    record(what="step", **case, failed=f"{type(error).__name__}: {error}")
                    sound &= isinstance(error, torch.OutOfMemoryError)
                else:
                    record(what="step", **case, **figures)
                    sound &= model.dtype != torch.float32 or figures["rows_apart"] < ATOL
    return sound


if __name__ == "__main__":
    main()
