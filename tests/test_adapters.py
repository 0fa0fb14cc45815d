from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from genlm.core import AsyncLM, InvalidOptionError, UnknownAdapterError, UnsupportedError, hookimpl
from genlm.core.adapters import AdapterRegistry
from genlm.core.mock import ByteTokenizer, MockEngine, hashed_row
from genlm.core.runtime.request_queue import RequestQueue
from genlm.core.types import Adapter

from .conftest import busy


def expected(context, path=None):
    return hashed_row(tuple(context), None if path is None else Adapter("", path, 1), 258)


def test_adapters_never_mix_in_a_batch(mock, gate):
    lm = mock()
    lm.add_new_lora("path/a", "a")
    lm.add_new_lora("path/b", "b")

    async def ask():
        return await asyncio.gather(
            *(lm.next_token_logprobs([1, 2], lora_name=name) for name in (None, "a", "b", "a"))
        )

    base, a, b, again = asyncio.run(ask())
    assert torch.equal(base, expected([1, 2]))
    assert torch.equal(a, expected([1, 2], "path/a"))
    assert torch.equal(b, expected([1, 2], "path/b"))
    assert torch.equal(again, a)
    assert [len(batch) for batch in gate.batches] == [3]


def test_rebinding_drops_what_was_cached(mock):
    lm = mock()
    lm.add_new_lora("path/old", "a")
    old = lm.next_token_logprobs_sync([1], lora_name="a")
    lm.add_new_lora("path/new", "a")
    new = lm.next_token_logprobs_sync([1], lora_name="a")
    assert torch.equal(old, expected([1], "path/old"))
    assert torch.equal(new, expected([1], "path/new"))


def test_what_was_asked_before_a_rebinding_is_answered_by_the_old_adapter(mock, gate):
    lm = mock()
    lm.add_new_lora("path/old", "a")

    async def ask():
        asked = asyncio.ensure_future(lm.next_token_logprobs([1], lora_name="a"))
        await asyncio.sleep(0)  # asked, but still gathering
        lm.add_new_lora("path/new", "a")
        return await asked, await lm.next_token_logprobs([1], lora_name="a")

    old, new = asyncio.run(ask())
    assert torch.equal(old, expected([1], "path/old"))
    assert torch.equal(new, expected([1], "path/new"))


def test_an_old_row_that_comes_late_does_not_enter_the_cache(mock, gate):
    lm = mock()
    lm.add_new_lora("path/old", "a")

    async def ask():
        asked = await busy(lm, gate, [1], lora_name="a")
        rebinding = asyncio.ensure_future(asyncio.to_thread(lm.add_new_lora, "path/new", "a"))
        gate.open()
        await asyncio.gather(asked, rebinding)
        return await lm.next_token_logprobs([1], lora_name="a")

    assert torch.equal(asyncio.run(ask()), expected([1], "path/new"))


def test_the_default_adapter(mock):
    lm = mock()
    lm.add_new_lora("path/a", "a")
    lm.set_lora("a")
    assert torch.equal(lm.next_token_logprobs_sync([1]), expected([1], "path/a"))
    assert torch.equal(lm.next_token_logprobs_sync([1], lora_name=None), expected([1]))
    assert torch.equal(lm.batch_next_token_logprobs_sync([[1]])[0], expected([1], "path/a"))
    lm.clear_lora()
    assert torch.equal(lm.next_token_logprobs_sync([1]), expected([1]))


def test_a_removed_default_is_an_error_not_the_base_model(mock):
    lm = mock()
    lm.add_new_lora("path/a", "a")
    lm.set_lora("a")
    lm.remove_lora("a")
    with pytest.raises(
        UnknownAdapterError, match=r"default LoRA adapter 'a' has been removed; call clear_lora\(\)"
    ):
        lm.next_token_logprobs_sync([1])
    lm.clear_lora()
    assert torch.equal(lm.next_token_logprobs_sync([1]), expected([1]))


def test_unknown_adapters(mock, gate):
    lm = mock()
    lm.add_new_lora("path/a", "a")
    for use in (
        lambda: lm.next_token_logprobs_sync([1], lora_name="b"),
        lambda: asyncio.run(lm.sample([1], 1, [], lora_name="b")),
        lambda: lm.set_lora("b"),
        lambda: lm.remove_lora("b"),
        lambda: lm.next_token_logprobs_sync([1], lora_name=7),
        lambda: lm.next_token_logprobs_sync([1], lora_name=["a"]),
    ):
        with pytest.raises(UnknownAdapterError, match="registered: a;") as caught:
            use()
        assert isinstance(caught.value, ValueError)
    assert gate.batches == []


@pytest.mark.parametrize("name", [None, 5, ["a"], "", b"a"])
def test_what_cannot_be_the_name_of_an_adapter(mock, name):
    lm = mock()
    with pytest.raises(InvalidOptionError, match="cannot be the name of a LoRA adapter"):
        lm.add_new_lora("path", name)
    lm.add_new_lora("path/a", "a")
    with pytest.raises(UnknownAdapterError, match="registered: a;"):
        lm.set_lora("b")


def test_the_path_of_an_adapter():
    registry = AdapterRegistry()
    for path in ("path/a", b"path/a", Path("path/a")):
        assert registry.new("a", path).path == "path/a"
    with pytest.raises(InvalidOptionError, match=r"must be a string or a pathlib.Path; got None"):
        registry.new("a", None)


def test_no_prefix_of_an_adapter_removed_meanwhile_is_pinned(gate, monkeypatch):
    pinned = []
    queued = threading.Semaphore(0)
    put_task = RequestQueue.put_task

    def put(intake, task):
        put_task(intake, task)
        queued.release()

    class Pinning(MockEngine):
        @hookimpl
        def genlm_cache_prefix(self, query):
            pinned.append(query)
            return True

    with (
        AsyncLM(lambda: Pinning(ByteTokenizer(), on_batch=gate), backend="mock") as lm,
        ThreadPoolExecutor(3) as threads,
    ):
        lm.add_new_lora("path/a", "a")
        monkeypatch.setattr(RequestQueue, "put_task", put)
        gate.shut()
        asked = threads.submit(lm.next_token_logprobs_sync, [1])
        gate.wait_entered()
        removed = threads.submit(lm.remove_lora, "a")
        assert queued.acquire(timeout=30)
        pinning = threads.submit(lm.cache_kv, [1, 2], lora_name="a")
        assert queued.acquire(timeout=30)
        gate.open()
        removed.result()
        asked.result()
        with pytest.raises(UnknownAdapterError):
            pinning.result()
    assert pinned == []


def test_a_removed_adapter_leaves_the_engine():
    engine = MockEngine(ByteTokenizer())
    with AsyncLM(lambda: engine, backend="mock") as lm:
        lm.add_new_lora("path/a", "a")
        lm.add_new_lora("path/a2", "a")
        assert [adapter.path for adapter in engine.adapters.values()] == ["path/a2"]
        lm.remove_lora("a")
        assert not engine.adapters


def test_a_backend_without_lora_says_so():
    class Plain:
        tokenizer, vocab_size, max_context, device, model = ByteTokenizer(), 258, None, "cpu", None

        @hookimpl
        def genlm_next_token_logprobs(self, queries):
            return torch.stack([hashed_row(query.token_ids, None, 258) for query in queries])

    with AsyncLM(Plain, backend="plain") as lm:
        with pytest.raises(
            UnsupportedError,
            match=r"backend 'plain' has no LoRA: .* or was loaded without LoRA; see",
        ):
            lm.add_new_lora("path", "a")
        lm.cache_kv([1, 2])
        lm.clear_kv_cache()
        assert len(asyncio.run(lm.sample([1], 4, [], seed=0))) == 4
        assert asyncio.run(lm.sequence_logprobs([1], [2, 3])).shape == (2,)
