"""The command: ``python -m tools.gpu``; see the package."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

import tools.gpu
from genlm.core import EngineError
from tools.gpu.checks import conformance, hf_tests, tests
from tools.gpu.program import program_figures
from tools.gpu.steps import ATOL, step_figures
from tools.gpu.tries import WAYS, trie_figures, trie_words
from tools.shapes import SHAPES, model_of
from tools.smollm2 import default_folder

#: The shapes of models whose steps are also recorded: those in which Python's launches take most of
#: the time.
RECORDED = ("135m", "1b")

#: The size of SmolLM2's vocabulary, and of one as large as Qwen 2.5's.
SIZES = (49_152, 151_665)


@frozen
class Size:
    """How much is measured; quick, or all."""

    shapes: str
    contexts: str
    lengths: str
    repeat: int
    trie_rows: int
    particles: str


QUICK = Size("tiny,tiny-gemma2,tiny-mamba,135m", "1,8", "20,100", 5, 8, "8")
FULL = Size("135m,1b,8b,gemma2,mamba", "1,32,256,1000", "20,1000", 10, 128, "32,256")

ROOT = Path(__file__).resolve().parents[2]

#: The figures of one check, and whether it passed.
Found = tuple[dict[str, Any], bool]


def check(options: argparse.Namespace) -> Iterator[Found]:
    for what, test in (("tests", tests), ("hf tests", hf_tests)):
        passed = test(options.for_trie, options.quick)
        yield {"what": what, "passed": passed}, passed


def conform(options: argparse.Namespace, backend: str = "hf") -> Iterator[Found]:
    for dtype in ("float32",) if options.on_cpu else ("float32", "bfloat16"):
        passed = conformance(backend, options.device, dtype)
        yield {"what": "conformance", "backend": backend, "dtype": dtype, "passed": passed}, passed


def conform_vllm(options: argparse.Namespace) -> Iterator[Found]:
    yield from conform(options, "vllm")


def conform_sgl(options: argparse.Namespace) -> Iterator[Found]:
    yield from conform(options, "sgl")


def sum_tries(options: argparse.Namespace) -> Iterator[Found]:
    for size in SIZES[:1] if options.quick else SIZES:
        words = trie_words(size)
        for rows in (1, options.trie_rows):
            for way in WAYS:
                figures = trie_figures(words, options.for_trie, rows, options.repeat, way)
                right = figures["relative_error"] < 2e-6
                case = {"what": "trie", "way": way, "tokens": size, "rows": rows}
                yield {**case, **figures}, right


def step(options: argparse.Namespace) -> Iterator[Found]:
    """Steps of every shape; well if rows in float32 are the raw model's."""
    for shape in options.shapes.split(","):
        dtype = getattr(torch, options.dtype)
        model = model_of(shape, options.device, dtype)
        for length in map(int, options.lengths.split(",")):
            for contexts in map(int, options.contexts.split(",")):
                for shared in (False, True) if contexts > 1 else (False,):
                    case = {"what": "step", "shape": shape, "contexts": contexts}
                    case |= {"length": length, "shared": shared}
                    try:
                        found = step_figures(model, contexts, length, options.repeat, shared=shared)
                    except (torch.OutOfMemoryError, EngineError) as error:
                        failed = f"{type(error).__name__}: {error}"
                        yield case | {"failed": failed}, isinstance(error, torch.OutOfMemoryError)
                    else:
                        exact = dtype != torch.float32 or found["rows_apart"] < ATOL
                        yield case | found, exact
        del model


def step_recorded(options: argparse.Namespace) -> Iterator[Found]:
    """Steps of constant shape, which CUDA records, and packed ones; well if rows in float32 are the
    raw model's."""
    chosen = [shape for shape in options.shapes.split(",") if shape in RECORDED]
    for shape in chosen or options.shapes.split(",")[:1]:
        dtype = getattr(torch, options.dtype)
        model = model_of(shape, options.device, dtype)
        for contexts in map(int, options.contexts.split(",")):
            for static in (True, False):
                found = step_figures(
                    model, contexts, 20, options.repeat, shared=False, static=static
                )
                case = {"what": "recorded step", "shape": shape, "contexts": contexts}
                exact = dtype != torch.float32 or found["rows_apart"] < ATOL
                yield case | {"static": static} | found, exact
        del model


def run_program(options: argparse.Namespace) -> Iterator[Found]:
    if not (default_folder() / "model.safetensors").exists():
        yield {"what": "program", "skipped": "no model; run tools/smollm2.py"}, True
        return
    for particles in map(int, options.particles.split(",")):
        figures = program_figures(options.device, options.dtype, particles)
        yield {"what": "program", "particles": particles, **figures}, True


def run_parts(options: argparse.Namespace) -> Iterator[Found]:
    """Measure the gain of parts of genlm-vllm. The check passes if the benchmark runs."""
    if not (default_folder() / "model.safetensors").exists():
        yield {"what": "vllm parts", "skipped": "no model; run tools/smollm2.py"}, True
        return
    command = [sys.executable, "-m", "benchmarks.vllm_parts", "ours"]
    command += ["--model", str(default_folder()), *(["--quick"] if options.quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if "case" in (found := json.loads(line)):
            yield {"what": "vllm parts"} | found, True
    yield {"what": "vllm parts", "passed": not done.returncode}, not done.returncode


@frozen
class Stage:
    """A part of the run, in a process of its own.

    Attributes:
        run: Returns the results; ``None`` if another module runs instead.
        seconds: The limit of the stage. After that it is ended, and its results so far are kept.
        module: The module to run, with its first arguments.
        needs: A package without which the stage is skipped.
    """

    run: Callable[[argparse.Namespace], Iterator[Found]] | None
    seconds: int
    module: tuple[str, ...] = ("tools.gpu",)
    needs: str = "torch"


#: The decisive stages come first, because a short loan of a GPU may end before the rest.
STAGES = {
    "vllm-v2": Stage(None, 240, ("tools.gpu.runners", "v2"), "vllm"),
    "vllm-v1": Stage(None, 240, ("tools.gpu.runners", "v1"), "vllm"),
    "recorded": Stage(step_recorded, 180),
    "steps": Stage(step, 420),
    "trie": Stage(sum_tries, 120),
    "program": Stage(run_program, 240),
    "vllm-parts": Stage(run_parts, 300, needs="vllm"),
    "tests": Stage(check, 560),
    "conformance": Stage(conform, 560),
    "vllm": Stage(conform_vllm, 560, needs="vllm"),
    "sgl": Stage(conform_sgl, 560, needs="sglang"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(tools.gpu.__doc__).partition("\n")[0], prog="python -m tools.gpu"
    )
    add = parser.add_argument
    add("--device", default="cuda")
    add("--quick", action=argparse.BooleanOptionalAction, help="default on a CPU")
    add("--stages", default=",".join(STAGES), help="default: %(default)s")
    add("--shapes", help=f"some of {', '.join(SHAPES)}")
    add("--contexts", help=f"default: {FULL.contexts}; quick: {QUICK.contexts}")
    add("--lengths", help=f"default: {FULL.lengths}; quick: {QUICK.lengths}")
    add("--particles", help=f"default: {FULL.particles}; quick: {QUICK.particles}")
    add("--dtype", help="of steps and the program; default: bfloat16, or float32 on a CPU")
    add("--repeat", type=int, help=f"default: {FULL.repeat}; quick: {QUICK.repeat}")
    add("--limit", type=int, help="seconds for each stage; by default each has its own")
    add("--out", type=Path, default=Path("build/gpu.json"))
    add("--inside", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.on_cpu = torch.device(options.device).type == "cpu"
    # For a trie, "cpu" means NumPy's kernel, and "cpu:0" the kernel for accelerators.
    options.for_trie = "cpu:0" if options.device == "cpu" else options.device
    options.dtype = options.dtype or ("float32" if options.on_cpu else "bfloat16")
    if options.quick is None:
        options.quick = options.on_cpu
    size = QUICK if options.quick else FULL
    for name in ("shapes", "contexts", "lengths", "particles", "repeat"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(size, name))
    options.trie_rows = size.trie_rows
    for name, known in (("stages", STAGES), ("shapes", SHAPES)):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(
                f"--{name} must be some of {', '.join(known)}; got {', '.join(sorted(unknown))}"
            )
    return options


def run(name: str, options: argparse.Namespace) -> Iterator[Found]:
    """Run one stage in a process of its own, up to its limit."""
    stage = STAGES[name]
    if find_spec(stage.needs) is None:
        yield {"what": name, "skipped": f"{stage.needs} is not installed"}, True
        return
    command = [sys.executable, "-m", *stage.module]
    if stage.run is not None:
        command += [*sys.argv[1:], "--stages", name, "--inside", name]
    else:
        command += ["--device", options.device, *(["--quick"] if options.quick else [])]
    seconds, late = options.limit or stage.seconds, threading.Event()
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, **pipe) as child:

        def end() -> None:
            late.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line), True
            else:  # the output of pytest, or of an engine
                print(line, end="", flush=True)
        code = child.wait()
        timer.cancel()
    if late.is_set():
        yield {"what": name, "ended": f"by its limit of {seconds} s"}, False
    elif code:
        yield {"what": name, "failed": f"with exit code {code}"}, False


def run_inside(name: str, options: argparse.Namespace) -> bool:
    """Run one stage in this process, and print its results. Returns whether all checks passed."""
    sound, found = True, STAGES[name].run
    assert found is not None
    for figures, well in found(options):
        print(json.dumps(figures), flush=True)
        sound &= well
    return sound


def main() -> None:
    options = arguments()
    if not options.on_cpu and not torch.cuda.is_available():
        print("gpu: skipped, since PyTorch sees no CUDA device; --device cpu tries the same code")
        return
    if options.inside:
        sys.exit(not run_inside(options.inside, options))
    name = "CPU" if options.on_cpu else torch.cuda.get_device_name(options.device)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "figures": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sound = True
    for stage in options.stages.split(","):
        for figures, well in run(stage, options):
            print(json.dumps(figures), flush=True)
            result["figures"].append(figures)
            # The results so far are kept.
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            sound &= well
    print(options.out)
    sys.exit(not sound)


if __name__ == "__main__":
    main()
