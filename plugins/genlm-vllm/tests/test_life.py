"""Models that are loaded and closed in one process, which lists what they leave behind; and what
existed before them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import transformers

from genlm.vllm.loading import load

from .driven import SMALL

LIFE = textwrap.dedent(
    """
    import asyncio, gc, os, sys, tempfile, threading, weakref
    import psutil, torch
    from genlm.vllm import AsyncVirtualLM
    from tests.left_behind import random_states

    small = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4,
             "kv_cache_memory_bytes": 64 << 20}
    plain, experts = sys.argv[1:]

    def load(path, **options):
        return AsyncVirtualLM.from_name(path, {**small, **options}, cache_size=0)

    def row(lm):
        return lm.next_token_logprobs_sync([5, 6, 7])

    def files(*folders):
        return {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}

    def held():
        process = psutil.Process()
        return {
            "files": {
                name
                for name in files(tempfile.gettempdir(), "/dev/shm")
                if not name.startswith(("/dev/shm/sglang", "/dev/shm/plasma"))  # of other programs
            },
            "open files": {file.path for file in process.open_files()},
            "processes": {child.pid for child in process.children(recursive=True)},
            "threads": {thread.name for thread in threading.enumerate()},
            "native threads": {
                name
                for task in os.listdir("/proc/self/task")
                if (name := open(f"/proc/self/task/{task}/comm").read().strip()) != "python"
            },
            "sockets": {each.laddr for each in process.net_connections("all")},
        }

    def check_nothing_is_left():
        for kind, names in held().items():
            assert names <= before[kind], f"{kind} left: {names - before[kind]}"

    class Local:
        pass

    def import_vllm():
        local = Local()
        from vllm.engine import arg_utils
        return weakref.ref(local)

    import vllm
    before = held()
    before["threads"].add("tqdm_monitor")  # one for all progress bars of a process

    # Load a model with experts while a model without experts is open.
    *states, of_torch = random_states()
    local = import_vllm()
    one = load(plain)
    *after, drawn_from = random_states()
    assert after == states, "a program's seeds hold"
    assert drawn_from != of_torch, "draws differ from run to run"
    expected = row(one)
    two = load(experts)
    of_experts = row(two)
    assert torch.equal(row(one), expected)
    one.close()
    assert torch.equal(row(two), of_experts), "process groups stay while a model needs them"
    two.close()
    check_nothing_is_left()
    gc.collect()
    assert local() is None, "frames of the program are freed"

    # After a load that fails, and with experts first.
    try:
        load(plain, kv_cache_memory_bytes=1000)  # found at the end
    except Exception:
        check_nothing_is_left()
    else:
        raise AssertionError("it was to fail")
    one = load(experts)
    assert torch.equal(row(one), of_experts)

    # The process ends in the middle of a draw.
    begun, never = threading.Event(), threading.Event()

    def hold(*args):
        begun.set()
        never.wait(3)  # exit hooks run meanwhile; nothing tells when

    one.underlying_model.register_forward_pre_hook(hold)

    def draw():
        try:
            asyncio.run(one.sample([5, 6, 7], 200, []))
        except Exception as error:
            print("DRAW", type(error).__name__, flush=True)

    threading.Thread(target=draw, daemon=True).start()
    begun.wait()
    """
)


def test_closed_models_and_ended_processes_leave_nothing(small_path, make_tiny, tmp_path):
    """A model with experts needs a process group that vLLM makes only if the first has experts. The
    step under way at the end ends before vLLM is taken down; the sample's caller is told."""
    experts = make_tiny("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    done = subprocess.run(
        [sys.executable, "-c", LIFE, small_path, experts],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("DRAW")]
    assert said in ([], ["DRAW ModelClosedError"]), done.stdout[-2000:]
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]
    assert left == []


def test_objects_older_than_a_load_are_collected_once(engine, small_path, monkeypatch):
    class Knot:
        pass

    def there():
        return any(each is before for each in gc.get_objects())

    before, seen = [], []
    knot = Knot()
    knot.itself, garbage = knot, weakref.ref(knot)
    del knot
    # vLLM calls this after loading: it collects garbage once more, and freezes the rest.
    monkeypatch.setattr(
        "vllm.v1.engine.core.freeze_gc_heap", lambda: seen.append((there(), garbage()))
    )
    gc.disable()  # only explicit collections remain
    try:
        another = load(small_path, {"engine_opts": SMALL})
    finally:
        gc.enable()
    assert seen == [(False, None)]
    another.genlm_close()
    assert there()


def test_copies_of_a_closed_models_tokenizer_are_freed(engine, tiny_path):
    """vLLM makes them for its threads, and holds them by the method of the chat template."""
    kind, counts = transformers.PreTrainedTokenizerBase, []
    for _ in range(2):
        load(tiny_path, {"engine_opts": SMALL}).genlm_close()
        gc.collect()
        counts.append(sum(issubclass(type(each), kind) for each in gc.get_objects()))
    assert counts[0] == counts[1]
