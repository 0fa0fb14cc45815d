"""The subject of a verification: a model, as an engine's options change it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import field, frozen

#: Distributions whose versions may change rows, besides the engine's.
LIBRARIES = ("genlm-kit", "torch", "transformers")

#: Patterns of files that hold weights.
WEIGHTS = ("*.safetensors", "*.bin")

#: Seconds that the process needs to import transformers, and for each gigabyte of weights: measured
#: on two cores of a busy machine.
SECONDS_TO_START, SECONDS_PER_GB = 5.0, 4.0


@frozen(kw_only=True)
class Subject:
    """A model, with the changes that the options make to it.

    Attributes:
        model: A folder or a hub name, as the user gave it.
        engine: The distribution that provides the engine, for messages and its version.
        backend: The backend's name, for the command that messages name.
        options: The options with which it is loaded.
        revision, cache_dir: The revision of a hub name, and the folder of the hub's cache.
        changes: Settings that the options change, as if they stood in ``config.json``.
        unknown: Why there is nothing to compare with: the options ask for another model than
            the folder's, such as random weights, or for other arithmetic.
        on_request: Why a load verifies the model only on request; ``None`` if it does so by
            default.
    """

    model: str
    engine: str
    backend: str
    options: Mapping[str, Any] = field(factory=dict)
    revision: str | None = None
    cache_dir: str | None = None
    changes: Mapping[str, Any] = field(factory=dict)
    unknown: str | None = None
    on_request: str | None = None

    @property
    def command(self) -> str:
        """The command that verifies the model."""
        given = " ".join(
            f"--option {name}='{json.dumps(value, default=repr)}'"
            for name, value in self.options.items()
            if value
        )
        return f"genlm verify {self.model} --backend {self.backend} {given}".rstrip()

    def folder(self) -> Path | None:
        """The folder of the model's files; ``None`` if they have not been downloaded yet."""
        if Path(self.model).is_dir():
            return Path(self.model)
        if Path(self.model).exists():
            return None  # the model is one file, such as a GGUF file
        try:
            from huggingface_hub import try_to_load_from_cache

            held = try_to_load_from_cache(
                self.model, "config.json", cache_dir=self.cache_dir, revision=self.revision
            )
        except (ImportError, ValueError):  # the name cannot be one of the hub
            return None
        return Path(held).parent if isinstance(held, str) else None

    def versions(self) -> dict[str, str]:
        """The versions of all distributions that may change its rows."""
        found = {}
        for name in (self.engine, *LIBRARIES):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = ""
        return found


def served_subject(
    model: str,
    engine: str,
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
    quantisations: Iterable[str],
    backend: str | None = None,
) -> Subject:
    """The subject of a server, whose own options are in ``engine_opts`` and have the names that
    vLLM and SGLang give them.

    Args:
        model, options, changes: See :class:`Subject`.
        engine: The distribution that provides the engine.
        quantisations: The engine's options that round the folder's weights.
        backend: The backend's name, if it is not the engine's.
    """
    given = engine_opts_of(options)
    asked = next((name for name in quantisations if given.get(name)), None)
    unknown = None if asked is None else f"{asked} rounds the folder's weights"
    if str(given.get("kv_cache_dtype", "auto")).startswith("fp8"):
        unknown = "kv_cache_dtype rounds keys and values"
    if given.get("load_format") == "dummy":
        unknown = "load_format='dummy' gives random weights"
    return Subject(
        model=model,
        engine=engine,
        backend=backend or engine,
        options=options,
        revision=given.get("revision"),
        cache_dir=given.get("download_dir"),
        changes=changes,
        unknown=unknown,
    )


def engine_opts_of(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The option of that name; empty where it is no mapping, which the load rejects."""
    given = options.get("engine_opts")
    return given if isinstance(given, Mapping) else {}


def weights_in(folder: Path) -> list[Path]:
    """The files of weights that transformers reads in a folder."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    for index in folder.glob("*.index.json"):
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError):
            continue
        return sorted({folder / name for name in named})
    return _all(folder, WEIGHTS)


def others_in(folder: Path) -> list[str]:
    """Files of weights that an engine may read, and transformers does not."""
    read = weights_in(folder)
    return [file.name for file in _all(folder, ("*.safetensors",)) if file not in read]


def size_of(folder: Path) -> int:
    """How many bytes the model's weights have."""
    return sum(file.stat().st_size for file in weights_in(folder) if file.exists())


def seconds_for(folder: Path) -> float:
    """About how long transformers takes for the rows of a few short contexts."""
    return SECONDS_TO_START + SECONDS_PER_GB * size_of(folder) / 1e9


def _all(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern))
