"""The tokenizer that a folder's ``tokenizer.json`` defines, if transformers' class computes another
one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from genlm.core.checks import describe_error
from genlm.core.logs import get_logger

log = get_logger()

FILE = "tokenizer.json"

#: The parts of a tokenizer that decide how texts are split into tokens, and how tokens are read.
COMPONENTS = ("normalizer", "pre_tokenizer", "model", "decoder")

#: The settings of a tokenizer's model that decide how it splits.
OF_THE_MODEL = ("byte_fallback", "ignore_merges")

#: Put before each text, because options of a tokenizer may change the beginning of a text.
ANCHOR = "x"

#: Texts that different patterns and normalizers of tokenizers treat differently.
TEXTS = (
    "\n2023\n\nx 1234567 12\u00bd\n",
    "\n  def f(a_b):\r\n\treturn  a_b[0]!= 'x'...  \n\n\n",
    "\nI don't, YOU'LL, HelloWorld; it's caf\u00e9 cafe\u0301 \ufb01n \uff21\uff22",
    "\n\u4f60\u597d\uff0c\u4e16\u754c \u0645\u0631\u062d\u064b\u0627 \u0441\u043b\u043e\u0432\u043e"
    " \U0001f917 \u2014 Stra\u00dfe",
)


def follow_file(
    tokenizer: Any, model: str, revision: str | None = None, cache_dir: str | None = None
) -> None:
    """Let a tokenizer of transformers split texts as its ``tokenizer.json`` says.

    Some of transformers' classes build their tokenizer themselves, and take only the vocabulary
    from the file. If a model's ``tokenizer_config.json`` names such a class, and the file has
    another pre-tokenizer or normalizer, the model would get other tokens than it was trained on. In
    that case, the file's pre-tokenizer and normalizer replace those of the class, and the log says
    so.

    The beginning of a text is not compared, because options such as ``add_prefix_space`` change it.
    Neither are added tokens.

    Args:
        tokenizer: What transformers has loaded; changed in place. A tokenizer of another kind, or
            of the folder's own code, is left alone.
        model: The folder or hub name that it was loaded from.
        revision, cache_dir: The revision of a hub name, and the folder of the hub's cache.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    file = _file(model, revision, cache_dir)
    if file is None or not hasattr(backend, "pre_tokenizer") or _is_meant_otherwise(tokenizer):
        return
    try:
        if _is_as_defined(backend, json.loads(file.read_text(encoding="utf-8"))):
            return
        from tokenizers import Tokenizer

        defined = Tokenizer.from_file(str(file))
        differing = _differing(backend, defined)
        if differing is None:
            return
        for name in COMPONENTS:
            setattr(backend, name, getattr(defined, name))
    except Exception as error:  # the library raises nothing more specific
        log.info("tokenizer.unread", file=str(file), error=describe_error(error)[:200])
        return
    log.warning(
        "tokenizer.corrected",
        model=model,
        transformers=type(tokenizer).__name__,
        differing=differing,
        why=f"{FILE} splits texts differently, and is followed",
    )


def _file(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    if Path(model).exists():
        file = Path(model) / FILE
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, FILE, cache_dir, revision)
    except ValueError:  # the name cannot be one of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def _is_meant_otherwise(tokenizer: Any) -> bool:
    """Whether the tokenizer differs from the file on purpose, by its own code or by an option."""
    own_code = any(
        kind.__module__.startswith("transformers_modules") for kind in type(tokenizer).mro()
    )
    return own_code or bool(getattr(tokenizer, "fix_mistral_regex", False))


def _is_as_defined(backend: Any, defined: Mapping[str, Any]) -> bool:
    """Whether a tokenizer has the components of a file, word for word."""
    model = defined.get("model") or {}
    return all(
        _definition(getattr(backend, name)) == defined.get(name)
        for name in ("normalizer", "pre_tokenizer")
    ) and all(
        bool(getattr(backend.model, name, False)) == bool(model.get(name)) for name in OF_THE_MODEL
    )


def _definition(component: Any) -> Any:
    """A component as the library serialises it."""
    return None if component is None else json.loads(component.__getstate__())


def _differing(backend: Any, defined: Any) -> str | None:
    """A text that two tokenizers split otherwise."""
    ids = _splitting(backend), _splitting(defined)
    return next((text for text in TEXTS if ids[0](text) != ids[1](text)), None)


def _splitting(tokenizer: Any) -> Callable[[str], list[int]]:
    """The tokens of a text behind the anchor, without added tokens, and whole: calls of another
    thread may have set an option to cut it."""
    from tokenizers import Tokenizer

    bare = Tokenizer(tokenizer.model)
    bare.normalizer, bare.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer

    def ids(text: str) -> list[int]:
        encoded = bare.encode(ANCHOR + text)
        places = zip(encoded.ids, encoded.offsets, strict=True)
        return [token for token, (start, _) in places if start > 0]

    return ids
