"""A step of vLLM on one of its model runners, in a process of its own: ``python -m
tools.gpu.runners v2 --device cuda``.

vLLM's own decoding is the floor; beside it live sessions that run, and the same paused. Where
Python waits for the device in the middle of a step is listed, and is a fault if the code is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

#: For each length of contexts in tokens, how many contexts a step has.
STEPS = {20: (1, 8, 32, 128, 512), 1000: (128,)}
QUICK_STEPS = {20: (1, 4)}

#: How many steps are measured, and how many run before them.
MEASURED_STEPS, WARM_STEPS = 8, 4
QUICK_REPEAT = 2

#: The most mass that may differ between a row and the cold row, in half precision.
MAX_MOVED_MASS = 0.05


def prepare(runner: str, on_cpu: bool) -> None:
    """Set what vLLM and Triton read when they are imported. On a CPU the runner V2 takes Triton's
    interpreter, and vLLM's version in PyTorch of one kernel that does not run there."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if on_cpu and runner == "v2":
        os.environ["TRITON_INTERPRET"] = "1"
        inactive = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
        import_module("triton.backends").backends["cpu"] = inactive
        import vllm.v1.sample.ops.topk_topp_sampler as top_k_top_p

        top_k_top_p.HAS_TRITON = False


class Steps:
    """Steps of one loaded model, whose contexts are of random tokens."""

    def __init__(self, engine: Any, device: str, repeat: int) -> None:
        self.engine, self._device, self._repeat = engine, device, repeat
        self._source = random.Random(1)

    def tokens(self, n: int) -> list[int]:
        return [self._source.randrange(100, self.engine.vocab_size) for _ in range(n)]

    def ask(self, queries: list[Any], samples: list[Any]) -> dict[Any, Any]:
        """The rows of the queries; samples may continue."""
        width = self.engine.vocab_size
        answers = self.engine.genlm_step(queries, samples, [], [], width)
        rows = {answer.request: answer.result for answer in answers}
        while not all(query in rows for query in queries):
            answers = self.engine.genlm_step([], [], [], [], width)
            rows |= {answer.request: answer.result for answer in answers}
        return rows

    def new(self, n: int, length: int) -> list[Any]:
        from genlm.core.types import Query

        return [Query(tuple(self.tokens(length))) for _ in range(n)]

    def grown(self, queries: list[Any]) -> list[Any]:
        return [query.extended((token,)) for query in queries for token in self.tokens(1)]

    def seconds(self, call: Callable[[], object]) -> float:
        from tools.gpu.timing import seconds

        return seconds(call, self._device)

    def sessions(self, n: int, length: int) -> dict[str, Any]:
        """Milliseconds of a step in which each context grows by a token, and how far rows are from
        cold ones; and how far those of two contexts are."""
        from genlm.core.types import Query
        from genlm.vllm.engine import distance

        queries, times, rows = self.new(n, length), [], {}
        self.ask(queries, [])
        for _ in range(WARM_STEPS + self._repeat):
            queries = self.grown(queries)
            times.append(self.seconds(lambda asked=queries: rows.update(self.ask(asked, []))))  # type: ignore[misc]
        apart = max(
            distance(rows[query], self.engine.evaluate_alone(Query(query.token_ids, cold=True)))
            for query in queries[:3]
        )
        others = distance(rows[queries[0]], rows[queries[-1]])
        self.engine.genlm_clear_kv_cache()
        return {"ms": 1e3 * statistics.median(times[WARM_STEPS:]), "apart": apart, "others": others}

    def decoding(self, n: int, length: int) -> dict[str, Any]:
        """The same of ``LLM.generate``, which gives no rows."""
        import vllm

        llm = self.engine._core._llm
        usual, times = llm.llm_engine.step, []

        def step() -> Any:
            given: list[Any] = []
            times.append(self.seconds(lambda: given.append(usual())))
            return given[0]

        llm.llm_engine.step = step
        params = vllm.SamplingParams(
            max_tokens=WARM_STEPS + self._repeat, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": self.tokens(length)} for _ in range(n)]
        llm.generate(prompts, params, use_tqdm=False)
        llm.llm_engine.step = usual
        return {"ms": 1e3 * statistics.median(times[WARM_STEPS:])}

    def waits(self, n: int) -> Counter[str]:
        """The lines at which Python waits for the device in a step: with rows alone, and with rows
        and samples."""
        from genlm.core.types import SampleRequest, SamplingParams
        from tools.gpu.timing import waits_of

        queries, found = self.new(n, 20), Counter[str]()
        self.ask(queries, [])
        for drawn in (0, 4):
            params = SamplingParams(max_tokens=50)
            samples = [SampleRequest(query, params) for query in self.new(drawn, 20)]
            queries = self.grown(queries)
            self.ask(queries, samples)
            queries = self.grown(queries)
            found += waits_of(lambda asked=queries: self.ask(asked, []), self._device)  # type: ignore[misc]
        self.engine._forget()
        return found


def figures(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], bool]]:
    """The figures, and whether the check passed."""
    import torch
    import vllm

    from genlm.vllm.loading import load
    from tools.shapes import model_of
    from tools.tiny import write_tokenizer

    on_cpu, sizes = options.device == "cpu", QUICK_STEPS if options.quick else STEPS
    most = max(max(each) for each in sizes.values())
    engine_opts: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 2 * most + 2,
        "max_num_batched_tokens": 16_384,
        "dtype": "float32" if on_cpu else "bfloat16",
    }
    engine_opts |= (
        {"kv_cache_memory_bytes": 64 << 20} if on_cpu else {"gpu_memory_utilization": 0.8}
    )
    with tempfile.TemporaryDirectory() as folder:
        # Random weights are loaded, because with vLLM's own dummy weights all rows are alike, and
        # no fault would show.
        dtype = torch.float32 if on_cpu else torch.bfloat16
        model_of("small" if options.quick else "1b", options.device, dtype).save_pretrained(folder)
        write_tokenizer(folder)
        began = time.perf_counter()
        engine = load(folder, {"engine_opts": engine_opts, "live_sessions": True})
        steps = Steps(engine, options.device, QUICK_REPEAT if options.quick else MEASURED_STEPS)
        loaded = {"seconds": time.perf_counter() - began, "runs": engine._core.sessions_run}
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        yield {"what": "loaded", **loaded, **versions}, engine._core.sessions_run
        ways: dict[str, Callable[[int, int], dict[str, Any]]] = {
            "LLM.generate": steps.decoding,
            "running": steps.sessions,
            "paused": steps.sessions,
        }
        for way, measured in ways.items():
            engine._forget()
            if way == "paused":
                engine._core.pause_sessions()
            if way != "LLM.generate":
                waits = steps.waits(4 if options.quick else 32)
                ours = {place for place in waits if "genlm" in place}
                yield {"what": "waits", "way": way, "at": dict(waits.most_common(12))}, not ours
            for length, contexts in sizes.items():
                for n in contexts:
                    found = measured(n, length)
                    case = {"what": "step", "way": way, "contexts": n, "length": length}
                    yield case | found, found.get("apart", 0.0) <= MAX_MOVED_MASS
        engine.genlm_close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runner", choices=["v1", "v2"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    prepare(options.runner, options.device == "cpu")
    sound = True
    for found, well in figures(options):
        print(json.dumps({**found, "runner": options.runner}), flush=True)
        sound &= well
    raise SystemExit(not sound)


if __name__ == "__main__":
    main()
