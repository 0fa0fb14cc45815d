"""What a step of vLLM takes on the host: lines of Python, and CPU time, on its model runner V2

V2 is the default on GPUs. Here its kernels run in Triton's interpreter, on a CPU. Time in kernels
and in the model's forward is left out, so what remains is what the host does while a GPU computes.
A Llama of two layers with 2,048 tokens, 128 contexts of 20 tokens, which grow by one a step.
``extend``: each of them. ``fork``: every second one, twice; all end in the same block. ``fork,
uneven``: the same of contexts of 20 to 139 tokens. Lines are for a row: this repository's, and
vLLM's. Times are of steps by turns, in one process; ``LLM.generate`` gives no rows.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "vllm"

CONTEXTS, TOKENS, VOCABULARY = 128, 20, 2048
#: How many steps are measured in a turn, behind those that are not, and how many turns there are.
STEPS, WARM_STEPS, TURNS = 5, 2, 3


class Lines:
    """Counts the lines of Python that run in a step, by function: ours and vLLM's."""

    OF = {"ours": "/genlm/", "vLLM": "site-packages/vllm/"}  # noqa: RUF012

    def __init__(self) -> None:
        self.by_function: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def of(self, whose: str) -> int:
        return sum(lines for (who, _), lines in self.by_function.items() if who == whose)

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        found = [who for who, path in self.OF.items() if path in code.co_filename]
        if not found:
            return None
        function = found[0], f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_qualname}"

        def ran(frame: Any, event: str, argument: Any) -> Any:
            self.by_function[function] += event == "line"
            return ran

        return ran


class Host:
    """CPU time of this thread outside the parts that a GPU would compute."""

    def __init__(self) -> None:
        self._left_out, self._depth = 0.0, 0

    def without(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time and lines are not counted."""

        def left_out(*given: Any, **named: Any) -> Any:
            trace, began = sys.gettrace(), time.thread_time()
            sys.settrace(None)
            self._depth += 1
            try:
                return usual(*given, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._left_out += time.thread_time() - began
                sys.settrace(trace)

        return left_out

    def milliseconds(self, step: Callable[[], Any]) -> tuple[float, Any]:
        """The time of a step, and its result."""
        self._left_out, began = 0.0, time.thread_time()
        result = step()
        return 1e3 * (time.thread_time() - began - self._left_out), result


class Model:
    """A loaded model, and the contexts that a program asks it for.

    Args:
        folder: Its folder.
        host: The clock.
    """

    def __init__(self, folder: str, host: Host) -> None:
        from triton.runtime.interpreter import GridExecutor

        from genlm.vllm.loading import load

        engine_opts = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 2 * CONTEXTS + 2,
            "max_num_batched_tokens": 16_384,
            "kv_cache_memory_bytes": 64 << 20,
        }
        self.engine: Any = load(folder, {"engine_opts": engine_opts, "live_sessions": True})
        self._host, self._source = host, random.Random(1)
        GridExecutor.__call__ = host.without(GridExecutor.__call__)
        self.engine.model.forward = host.without(self.engine.model.forward)

    def ids(self, n: int) -> tuple[int, ...]:
        return tuple(self._source.choices(range(100, VOCABULARY), k=n))

    def new(self, lengths: range | tuple[int, ...] = (TOKENS,)) -> list[Any]:
        from genlm.core.types import Query

        return [Query(self.ids(lengths[at % len(lengths)])) for at in range(CONTEXTS)]

    def extended(self, queries: list[Any]) -> list[Any]:
        return [query.extended(self.ids(1)) for query in queries]

    def forked(self, queries: list[Any]) -> list[Any]:
        return self.extended([query for query in queries[::2] for _ in range(2)])

    def ask(self, queries: list[Any]) -> None:
        width, asked = self.engine.vocab_size, queries
        answered = 0
        while answered < len(queries):
            answered += len(self.engine.genlm_step(asked, [], [], [], width))
            asked = []

    def steps(self, follow: Callable[[list[Any]], list[Any]], n: int) -> list[float]:
        """The milliseconds of steps of new contexts, without the first ones."""
        queries, times = self.new(), []
        self.ask(queries)
        for _ in range(WARM_STEPS + n):
            queries = follow(queries)
            times.append(self._host.milliseconds(lambda asked=queries: self.ask(asked))[0])  # type: ignore[misc]
        self.engine.genlm_clear_kv_cache()
        return times[WARM_STEPS:]

    def generated(self, n: int) -> list[float]:
        """The same of ``LLM.generate``."""
        from vllm import SamplingParams

        self.engine.genlm_clear_kv_cache()
        llm, times = self.engine._core._llm, []
        usual = llm.llm_engine.step

        def step() -> Any:
            spent, given = self._host.milliseconds(usual)
            times.append(spent)
            return given

        llm.llm_engine.step = step
        params = SamplingParams(
            max_tokens=2 + WARM_STEPS + n, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": [*self.ids(TOKENS)]} for _ in range(CONTEXTS)]
        llm.generate(prompts, params, use_tqdm=False)
        llm.llm_engine.step = usual
        return times[
            1 + WARM_STEPS : -1
        ]  # the prompts are before, and in the last step requests end

    def lines(self, follow: Callable[[list[Any]], list[Any]], queries: list[Any]) -> Lines:
        """The lines of a step of these contexts, once they have grown a few times."""
        self.ask(queries)
        for _ in range(WARM_STEPS):
            queries = follow(queries)
            self.ask(queries)
        queries, lines = follow(queries), Lines()
        with lines.counted():
            self.ask(queries)
        self.engine.genlm_clear_kv_cache()
        return lines


def ours(bench: Bench) -> None:
    from tools.gpu.runners import prepare

    prepare("v2", on_cpu=True)
    from transformers import AutoModelForCausalLM

    from tools.shapes import SHAPES
    from tools.tiny import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES["small"]()
        config.vocab_size = VOCABULARY
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        write_tokenizer(folder)
        model = Model(folder, Host())
        cases = {
            "extend": (model.extended, model.new()),
            "fork": (model.forked, model.new()),
            "fork, uneven": (model.forked, model.new(range(TOKENS, 140))),
        }
        for case, (follow, queries) in cases.items():
            lines = model.lines(follow, queries)
            for whose in Lines.OF:
                bench.record(f"{case}, {whose}", lines.of(whose) / CONTEXTS, unit="lines")
        times: dict[str, list[float]] = {"LLM.generate": [], "extend": []}
        for _ in range(1 if bench.quick else TURNS):
            times["LLM.generate"] += model.generated(STEPS)
            times["extend"] += model.steps(model.extended, STEPS)
        for way, values in times.items():
            bench.record(way, values, unit="ms")
        ratio = median(times["extend"]) / median(times["LLM.generate"])
        bench.record("extend over LLM.generate", ratio, unit="times")
        model.engine.genlm_close()


if __name__ == "__main__":
    main(ours=ours)
