from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from genlm.core import (
    AsyncLM,
    InvalidOptionError,
    ModelClosedError,
    UnknownAdapterError,
    UnsupportedError,
    hookimpl,
)
from genlm.core.adapters import AdapterRegistry
from genlm.core.mock import ByteTokenizer, MockEngine, hashed_row
from genlm.core.types import Adapter

from .conftest import PATIENCE
from .doubles import Elsewhere, Plain


def expected(context, path=None):
    return hashed_row(tuple(context), None if path is None else Adapter("", path, 1), 258)


@pytest.fixture
def lm(mock):
    """A mock with one adapter."""
    lm = mock()
    lm.add_new_lora("path/a", "a")
    return lm


def test_removing_an_adapter_keeps_other_cached_rows(lm, gate):
    lm.next_token_logprobs_sync([1])
    lm.remove_lora("a")
    lm.next_token_logprobs_sync([1])
    assert gate.batches == [[(1,)]]


async def test_request_made_before_a_rebinding_uses_the_old_adapter(mock):
    lm = mock()
    lm.add_new_lora("path/old", "a")
    asked = asyncio.ensure_future(lm.next_token_logprobs([1], lora_name="a"))
    await asyncio.sleep(0)  # requested, but still being gathered
    lm.add_new_lora("path/new", "a")
    assert torch.equal(await asked, expected([1], "path/old"))


def test_a_removed_default_is_an_error_not_the_base_model(lm):
    lm.set_lora("a")
    assert torch.equal(lm.next_token_logprobs_sync([1]), expected([1], "path/a"))
    assert torch.equal(lm.next_token_logprobs_sync([1], lora_name=None), expected([1]))
    lm.remove_lora("a")
    with pytest.raises(
        UnknownAdapterError, match=r"default LoRA adapter 'a' has been removed; call clear_lora\(\)"
    ):
        lm.next_token_logprobs_sync([1])
    lm.clear_lora()
    assert torch.equal(lm.next_token_logprobs_sync([1]), expected([1]))


class Watched(str):
    """A name that runs other code while it is looked up, as another thread might."""

    meanwhile = None

    def __hash__(self):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().__hash__()


@pytest.mark.parametrize(
    ("changes", "answered_by"),
    [
        (("clear", "remove"), None),
        (("remove", "clear"), None),
        (("choose b", "remove"), "path/b"),
        (("remove", "choose b"), "path/b"),
    ],
    ids=["clear, remove", "remove, clear", "choose, remove", "remove, choose"],
)
def test_changed_default_adapter_does_not_break_a_call_without_a_name(mock, changes, answered_by):
    lm = mock()
    name = Watched("a")
    lm.add_new_lora("path/a", name)
    lm.add_new_lora("path/b", "b")
    lm.set_lora(name)
    calls = {
        "clear": lm.clear_lora,
        "remove": lambda: lm.remove_lora("a"),
        "choose b": lambda: lm.set_lora("b"),
    }

    def meanwhile():
        for change in changes:
            calls[change]()

    name.meanwhile = meanwhile
    assert torch.equal(lm.next_token_logprobs_sync([1]), expected([1], answered_by))
    assert name.meanwhile is None, "the name was never looked up"


def test_unknown_adapter_is_rejected(lm, gate):
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


def test_list_of_adapters_cannot_be_written_to(lm):
    with pytest.raises(TypeError, match="does not support item"):
        lm.adapters["b"] = lm.adapters["a"]
    assert list(lm.adapters) == ["a"]


@pytest.mark.parametrize("name", [None, 5, ["a"], "", b"a"])
def test_invalid_adapter_name_is_rejected(mock, name):
    with pytest.raises(InvalidOptionError, match="cannot be the name of a LoRA adapter"):
        mock().add_new_lora("path", name)


def test_adapters_get_a_string_path_and_a_new_version():
    """Engines take version 0 for the base model."""
    registry = AdapterRegistry()
    made = [registry.new("a", path) for path in ("path/a", b"path/a", Path("path/a"))]
    assert [(each.path, each.version) for each in made] == [("path/a", n) for n in (1, 2, 3)]
    with pytest.raises(InvalidOptionError, match=r"must be a string or a pathlib.Path; got None"):
        registry.new("a", None)


class Pinning(Elsewhere):
    """An engine that takes adapters, and records the prompts to pin."""

    def __init__(self):
        super().__init__()
        self.asked_to_pin = []

    @hookimpl
    def genlm_add_lora(self, adapter):
        return True

    genlm_remove_lora = genlm_add_lora

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.asked_to_pin.append(query)
        return True


def test_prefix_of_a_removed_adapter_is_not_pinned():
    engine = Pinning()
    with AsyncLM(lambda: engine, backend="mock") as lm, ThreadPoolExecutor(3) as threads:
        lm.add_new_lora("path/a", "a")
        asked = threads.submit(lm.next_token_logprobs_sync, [1])
        engine.next_step()
        removed = threads.submit(lm.remove_lora, "a")
        engine.next_step()  # the removal waits, and has woken the previous step
        pinning = threads.submit(lm.cache_kv, [1, 2], lora_name="a")
        engine.next_step()  # the pinning waits behind the removal
        engine.finish()
        removed.result()
        asked.result()
        with pytest.raises(UnknownAdapterError, match="was removed or bound again while"):
            pinning.result()
    assert engine.asked_to_pin == []


async def test_a_draw_whose_adapter_is_removed_meanwhile_is_an_error(lm):
    stream = lm.stream([1], 3, eos_token_ids=[], lora_name="a")
    await anext(stream)
    await asyncio.to_thread(lm.remove_lora, "a")
    with pytest.raises(UnknownAdapterError, match="was removed or bound again while"):
        await anext(stream)


def test_a_removed_adapter_leaves_the_engine():
    engine = MockEngine(ByteTokenizer())
    with AsyncLM(lambda: engine, backend="mock") as lm:
        lm.add_new_lora("path/a", "a")
        lm.add_new_lora("path/a2", "a")
        assert [adapter.path for adapter in engine.adapters.values()] == ["path/a2"]
        lm.remove_lora("a")
        assert not engine.adapters


def test_backend_without_lora_is_an_error():
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


class Reading(MockEngine):
    """An engine that reads the files of an adapter in a separate hook."""

    @hookimpl
    def genlm_read_lora(self, adapter):
        if adapter.path == "nowhere":
            raise OSError("no file nowhere")
        return f"contents of {adapter.path}", threading.get_ident()

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        if adapter.path == "large":
            raise OSError("no memory")
        self.added = contents
        return super().genlm_add_lora(adapter)


def test_an_adapter_is_read_on_the_callers_thread_while_the_engine_works(gate):
    engine = Reading(ByteTokenizer(), on_batch=gate)
    with AsyncLM(lambda: engine, backend="reading") as lm, ThreadPoolExecutor(1) as pool:
        gate.shut()
        row = pool.submit(lm.next_token_logprobs_sync, [1])
        gate.wait_entered()
        with pytest.raises(OSError, match="no file nowhere"):
            lm.add_new_lora("nowhere", "a")  # the engine is in the middle of a batch
        gate.open()
        row.result(PATIENCE)
        with pytest.raises(OSError, match="no memory"):
            lm.add_new_lora("large", "a")
        assert not lm.adapters
        lm.add_new_lora("somewhere", "a")
        assert engine.added == ("contents of somewhere", threading.get_ident())
        assert torch.equal(
            lm.next_token_logprobs_sync([1], lora_name="a"), expected([1], "somewhere")
        )
    with pytest.raises(ModelClosedError):
        lm.add_new_lora("nowhere", "a")
