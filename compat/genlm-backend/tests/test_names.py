"""Every import path of genlm-backend 0.3 is there, or says what to use instead."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import genlm.core
import genlm.hf
from genlm.core import BackendUnavailableError, UnsupportedError

#: The public names that 0.3.1 defines in each of its modules, and the names of 0.0.
NAMES = {
    "genlm.backend": (
        "load_model_by_name AsyncVirtualLM AsyncTransformer decode_vocab Token TokenCharacterTrie "
        "ParallelTokenCharacterTrie AsyncTokenCharacterTrie tokenization cache llm trie"
    ),
    "genlm.backend.llm": (
        "load_model_by_name AsyncLM AsyncVirtualLM AsyncTransformer AsyncMlxLM "
        "AsyncSGLTransformer MockAsyncLM base vllm hf mlx sgl"
    ),
    "genlm.backend.llm.base": "AsyncLM MockAsyncLM decode_vocab",
    "genlm.backend.llm.vllm": "AsyncLM AsyncVirtualLM HAS_VLLM",
    "genlm.backend.llm.hf": "AsyncLM AsyncTransformer Query TokenTrie",
    "genlm.backend.llm.mlx": "AsyncLM AsyncMlxLM HAS_MLX",
    "genlm.backend.llm.sgl": "AsyncLM AsyncSGLTransformer HAS_SGL",
    "genlm.backend.cache": "OutputCache TokenTrie DynamicTokenTrie",
    "genlm.backend.tokenization": "decode_vocab Token bytes token vocab",
    "genlm.backend.tokenization.bytes": (
        "ByteVocabError ByteDecoderError get_byte_vocab check_byte_decoder"
    ),
    "genlm.backend.tokenization.token": "Token",
    "genlm.backend.tokenization.vocab": "ByteVocabError get_byte_vocab Token decode_vocab",
    "genlm.backend.trie": (
        "TokenCharacterTrie ParallelTokenCharacterTrie AsyncTokenCharacterTrie base parallel "
        "async_impl"
    ),
    "genlm.backend.trie.base": "TokenCharacterTrie Token",
    "genlm.backend.trie.parallel": "ParallelTokenCharacterTrie TokenCharacterTrie",
    "genlm.backend.trie.async_impl": (
        "AsyncTokenCharacterTrie ParallelTokenCharacterTrie TokenCharacterTrie"
    ),
    "genlm_backend.llm": "AsyncLM AsyncVirtualLM AsyncTransformer MockAsyncLM",
    "genlm_backend.cache": "OutputCache TokenTrie",
    "genlm_backend.tokenization": "decode_vocab",
    "genlm_backend.trie": "TokenCharacterTrie",
}
GONE = {
    "genlm.backend.llm.base": "UNKNOWN_ADAPTER BatchAbandoned batch_abandoned fail_futures",
    "genlm.backend.llm.vllm": "UNKNOWN_ADAPTER BackendScheduler",
    "genlm.backend.llm.hf": "UNKNOWN_ADAPTER",
    "genlm.backend.llm.mlx": "UNKNOWN_ADAPTER",
    "genlm.backend.llm.sgl": "UNKNOWN_ADAPTER",
    "genlm.backend.tokenization.bytes": (
        "get_byte_tokens_from_byte_decoder get_byte_tokens_from_sp"
    ),
    "genlm.backend.tokenization.vocab": "bytes_to_strs",
}
ENGINES = ("torch", "transformers", "vllm", "mlx", "sglang")
SOURCES = Path(str(importlib.import_module("genlm.backend").__file__)).parents[2]


@pytest.mark.parametrize("module", NAMES)
def test_every_former_name_exists(module: str) -> None:
    for name in NAMES[module].split():
        assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize("module", GONE)
def test_removed_name_error_names_the_replacement(module: str) -> None:
    for name in GONE[module].split():
        with pytest.raises(AttributeError, match=rf"{name} existed in genlm-backend 0\.3") as error:
            getattr(importlib.import_module(module), name)
        assert any(
            word in str(error.value) for word in ("genlm.core", "decode_vocab", "lm.", "from_name")
        )


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    module = importlib.import_module("genlm.backend.llm.base")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_old_names_give_the_classes_of_the_core_and_the_plugins() -> None:
    from genlm_backend import llm

    from genlm.backend.llm import AsyncLM, AsyncTransformer, MockAsyncLM

    assert AsyncLM is genlm.core.AsyncLM
    assert MockAsyncLM is genlm.core.MockAsyncLM
    assert AsyncTransformer is genlm.hf.AsyncTransformer
    assert llm.AsyncTransformer is AsyncTransformer


def test_importing_loads_no_engine_and_sets_nothing() -> None:
    program = (
        "import json, os, sys; before = dict(os.environ); import genlm.backend, genlm_backend.llm; "
        f"print(json.dumps([[m for m in {ENGINES} if m in sys.modules], before == os.environ]))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    assert json.loads(done.stdout) == [[], True]


@pytest.mark.parametrize(
    ("backend", "name"),
    [("vllm", "AsyncVirtualLM"), ("mlx", "AsyncMlxLM"), ("sgl", "AsyncSGLTransformer")],
)
def test_class_without_its_plugin_can_be_inspected_but_not_used(backend: str, name: str) -> None:
    if importlib.util.find_spec(f"genlm.{backend}"):
        pytest.skip(f"genlm-{backend} is installed here")
    from genlm.backend import llm

    cls = getattr(llm, name)
    with llm.load_model_by_name("mock", "mock") as lm:
        assert not isinstance(lm, cls)
        assert isinstance(lm, llm.MockAsyncLM)
    for use in (
        lambda: cls(object()),
        lambda: cls.from_name("any"),
        lambda: llm.load_model_by_name("any", backend),
    ):
        with pytest.raises(BackendUnavailableError, match=rf"pip install .*genlm-{backend}$"):
            use()


def test_prefix_cache_type_cannot_be_instantiated() -> None:
    from genlm.backend.cache import DynamicTokenTrie, TokenTrie

    assert DynamicTokenTrie is TokenTrie
    with pytest.raises(UnsupportedError, match=r"cache_kv\(prompt\)"):
        TokenTrie()


def test_an_old_version_installed_over_this_one_is_noticed(tmp_path: Path) -> None:
    """The old files over ours: a file that both have is the old one."""
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    for version in ("0.3.1", "0.4.0"):
        info = tmp_path / f"genlm_backend-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: genlm-backend\nVersion: {version}\n"
        )
    package = tmp_path / "genlm" / "backend"
    (package / "__init__.py").write_text("from .llm import AsyncLM\n")
    (package / "llm" / "__init__.py").write_text("from ..cache import OutputCache as AsyncLM\n")
    (package / "cache.py").write_text("class OutputCache: pass\n")
    assert "genlm-backend 0.3.1 and 0.4.0 are both installed in" in what_importing_says(tmp_path)
    shutil.rmtree(tmp_path / "genlm_backend-0.4.0.dist-info")
    assert "genlm-backend 0.3.1 and 0.4.0 are both installed in" in what_importing_says(tmp_path)
    shutil.rmtree(tmp_path / "genlm_backend-0.3.1.dist-info")
    assert what_importing_says(tmp_path) == ""


def what_importing_says(folder: Path) -> str:
    """The text that importing genlm.backend from a folder writes to standard error."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import genlm.backend.cache"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    return done.stderr
