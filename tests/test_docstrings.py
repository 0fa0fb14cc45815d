"""The examples in docstrings are run, and every thing that users begin with has one."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog

import genlm.core
from genlm.core import AsyncLM, decode_vocab, hookspecs, load_model_by_name
from genlm.core.next_bytes import next_bytes_logprob
from genlm.core.trie import TokenCharacterTrie

TOP = Path(genlm.core.__file__).parent


def modules_with_examples() -> list[str]:
    files = [path for path in TOP.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    names = (".".join(path.relative_to(TOP).with_suffix("").parts) for path in files)
    return sorted(f"genlm.core.{name}".removesuffix(".__init__") for name in names)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_run(name: str) -> None:
    structlog.reset_defaults()  # a test that captures logs leaves them printed
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert not failed


@pytest.mark.parametrize(
    "documented",
    [
        load_model_by_name,
        AsyncLM,
        AsyncLM.sample,
        AsyncLM.add_new_lora,
        TokenCharacterTrie,
        next_bytes_logprob,
        decode_vocab,
        hookspecs.genlm_process_logprobs,
        hookspecs.genlm_call_ended,
    ],
    ids=lambda thing: thing.__name__,
)
def test_public_name_has_an_example(documented: Any) -> None:
    assert "Examples:\n" in documented.__doc__
    name = documented.__name__
    module = documented if isinstance(documented, ModuleType) else None
    (found,) = doctest.DocTestFinder(recurse=False).find(documented, name, module)
    assert found.examples
