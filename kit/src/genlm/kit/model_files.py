"""Checks that a model exists and is complete, before an engine spends a minute on it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import ModelNotFoundError

#: A name that the Hugging Face hub could have.
HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")

#: The address of a model's page, which contains its name.
HUB_PAGE = re.compile(rf"https?://(?:www\.)?huggingface\.co/({HUB_NAME.pattern})")

#: Patterns of files, one of which a folder must have, for most tokenizers.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")

#: Patterns of files that hold weights, or name such files.
WEIGHTS = ("*.safetensors", "pytorch_model*", "*.gguf", "*.index.json")

#: The configuration of a LoRA adapter.
ADAPTER = "adapter_config.json"

#: The beginning of a pointer file, which Git has in place of a large file.
LFS_POINTER = b"version https://git-lfs"

#: Patterns of files that are large, or that belong to a tokenizer.
LARGE_FILES = ("*.safetensors", "*.bin", "*.gguf", "tokenizer*", "*.model")

#: Seconds to wait for the hub.
HUB_SECONDS = 5.0


def require_model(name: str, files: Sequence[str] = ("config.json",)) -> None:
    """Raise an error if a model does not exist or is incomplete. Call it in ``genlm_load``, before
    the engine is imported.

    A folder must hold one of ``files``, and its large files must be complete. A name that is not a
    folder must be in the hub's cache or on the hub. In offline mode (``HF_HUB_OFFLINE=1``) only the
    cache is asked.

    Args:
        name: What the user gave: a folder, a file, or a hub name.
        files: Names of files of which a folder must hold one, with ``*`` for any letters.

    Raises:
        ModelNotFoundError: it names the folder and what was looked for, or the file that is
            incomplete.
    """
    if not (isinstance(name, str | os.PathLike) and os.fspath(name)):
        raise ModelNotFoundError(f"a model must be a folder or a hub name; got {safe_repr(name)}")
    path = Path(name)
    if path.is_dir():
        if not any(next(path.glob(file), None) for file in files):
            _refuse_adapter(path)
            held = sorted(entry.name for entry in path.iterdir())
            listed = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "")
            raise ModelNotFoundError(
                f"the folder {str(name)!r} holds no {' or '.join(files)}; give the folder of a "
                f"model; this one holds {listed or 'nothing'}"
            )
        if not holds_weights(path):
            _refuse_adapter(path)
        _require_whole(path)
    elif path.suffix in (".json", ".safetensors", ".bin") and path.is_file():
        raise ModelNotFoundError(f"{str(name)!r} is one file of a model; give its folder")
    elif match := HUB_PAGE.match(str(name)):
        raise ModelNotFoundError(f"{name} is a page of the hub; give its name, {match[1]!r}")
    elif not path.exists() and ("://" not in str(name) or str(name).startswith("http")):
        _require_on_hub(str(name), files)


def holds_weights(folder: Path) -> bool:
    """Whether a folder has files of weights of a model, and not of an adapter alone."""
    found = (file for pattern in WEIGHTS for file in folder.glob(pattern))
    return any(not file.name.startswith("adapter") for file in found)


def _refuse_adapter(folder: Path) -> None:
    """Raises: ModelNotFoundError: the folder, which holds no model, holds a LoRA adapter."""
    if not (file := folder / ADAPTER).is_file():
        return
    base = require_object(file).get("base_model_name_or_path")
    raise ModelNotFoundError(
        f"the folder {str(folder)!r} holds a LoRA adapter and no model; load the model that it was "
        f"trained on{f' ({safe_repr(base)})' if base else ''}, then call "
        f"add_new_lora({str(folder)!r}, name)"
    )


def require_tokenizer(folder: str | Path, another: str) -> None:
    """Raise an error if a folder has no tokenizer, or a damaged one. Call it if no tokenizer could
    be loaded.

    Args:
        folder: The folder, or a hub name.
        another: The option that names another folder; empty if there is none.

    Raises:
        ModelNotFoundError: it names the files that were looked for, or the file that is not JSON.
    """
    path = Path(folder)
    for file in path.glob("tokenizer*.json"):
        require_object(file)
    held = (*TOKENIZER_FILES, "*.gguf")  # a GGUF file contains a tokenizer
    if path.is_dir() and not any(next(path.glob(file), None) for file in held):
        raise ModelNotFoundError(
            f"the folder {str(folder)!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); copy "
            f"its files there{another and f', or name another folder in {another}'}"
        )


def eos_token_ids(
    model: str, revision: str | None = None, cache_dir: str | None = None
) -> list[int]:
    """The tokens that end a text, by a model's ``generation_config.json``, or by its
    ``config.json`` if it has none. An engine calls it once the model is loaded, for its attribute
    of that name.

    Args:
        model: A folder, or a hub name in the cache.
        revision, cache_dir: The revision of a hub name, and the folder of the hub's cache.
    """
    for name in ("generation_config.json", "config.json"):
        if (config := _read(model, name, revision, cache_dir)) is not None:
            # Multimodal models have a text configuration.
            parts = [config, config.get("text_config") or {}]
            return next((ids for part in parts if (ids := ids_of(part.get("eos_token_id")))), [])
    return []


def ids_of(named: Any) -> list[int]:
    """The token ids in an entry of a configuration, which names one, several or none."""
    named = named.tolist() if hasattr(named, "tolist") else named
    several = named if isinstance(named, list | tuple) else [named]
    return [each for each in several if type(each) is int]


def _read(
    model: str, name: str, revision: str | None, cache_dir: str | None
) -> dict[str, Any] | None:
    """The JSON object in a file of a model; ``None`` if the file does not exist."""
    folder = local_folder(model, revision, cache_dir)
    try:
        if folder is None or not (folder / name).is_file():
            return None
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError:  # the file is not JSON
        return None
    return config if isinstance(config, dict) else None


def local_folder(
    model: str, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """The folder with the files of a model: the model's own folder, or the one in the hub's cache;
    ``None`` if there is none."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "config.json", cache_dir, revision)
    except ValueError:  # the name is the path of a file, and cannot be one of the hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def require_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model.

    Raises:
        ModelNotFoundError: the file holds no JSON object.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFoundError(
            f"{file} is not JSON ({describe_error(error):.100}); copy or download it again"
        ) from None
    if not isinstance(held, dict):
        raise ModelNotFoundError(f"{file} holds no JSON object; copy or download it again")
    return held


def _require_whole(folder: Path) -> None:
    for config in folder.glob("config.json"):
        require_object(config)
    for index in folder.glob("*.safetensors.index.json"):
        named = set(require_object(index).get("weight_map", {}).values())
        if absent := sorted(file for file in named if not (folder / file).exists()):
            raise ModelNotFoundError(
                f"{index} names {absent[0]} ({len(absent)} of {len(named)} such files are not "
                "there); copy or download the whole folder"
            )
    for file in (each for pattern in LARGE_FILES for each in folder.glob(pattern)):
        with file.open("rb") as opened:
            beginning = opened.read(len(LFS_POINTER))
            if beginning == LFS_POINTER:
                raise ModelNotFoundError(
                    f"{file} is a pointer of Git LFS and not the file itself; run `git lfs pull` "
                    "in that folder"
                )
            if file.suffix == ".safetensors":
                length = int.from_bytes(beginning[:8], "little")
                opened.seek(8)
                _require_all_tensors(file, length, opened.read(min(length, file.stat().st_size)))


def _require_all_tensors(file: Path, length: int, header: bytes) -> None:
    try:
        tensors = json.loads(header)
        ends = [each["data_offsets"][1] for name, each in tensors.items() if name[:2] != "__"]
        wanted = 8 + length + max(ends, default=0)
    except ValueError:
        wanted = 8 + length
    size = file.stat().st_size
    if size < wanted:
        raise ModelNotFoundError(
            f"{file} has been cut: it has {size} of {wanted} bytes; copy or download it again"
        )


def _require_on_hub(name: str, files: Sequence[str]) -> None:
    first, *rest = Path(name).parts
    if not HUB_NAME.fullmatch(name) or (rest and Path(first).is_dir()):
        home = "; write the whole path instead of '~'" if name.startswith("~") else ""
        raise ModelNotFoundError(
            f"there is no folder {name!r}, and a hub name looks like 'organisation/model'{home}"
        )
    try:
        from huggingface_hub import HfApi, constants, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    except ImportError:  # without huggingface_hub, the engine must find the model
        return
    plain = [file for file in files if "*" not in file]
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in plain):
        return
    absent = f"there is no folder {name!r}, the hub's cache has no such model"
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{absent}, and offline mode is on (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE); give a "
            "folder, or turn offline mode off"
        )
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        # 403 means gated, which the engine itself explains.
        if getattr(error.response, "status_code", None) != 403:
            raise ModelNotFoundError(
                f"{absent}, and the hub has none either; check the spelling of the name, or log in "
                "(hf auth login) if the model is private"
            ) from None
    except HfHubHTTPError:
        return  # the hub answers, so the engine may try
    # Only the message is used, because the traceback has a hundred lines of network libraries.
    except Exception as error:
        reason = _unreachable(error, Path(constants.HF_HUB_CACHE))
        raise ModelNotFoundError(f"{absent}, and {reason}") from None


def _unreachable(error: Exception, cache: Path) -> str:
    """Why the hub could not be asked, with the remedy."""
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    unwritable = not (nearest.is_dir() and os.access(nearest, os.W_OK))
    file = getattr(error, "filename", None) or (nearest if unwritable else None)
    if file is not None:
        why = getattr(error, "strerror", None) or f"the cache is to be {cache}"
        return f"{file} cannot be written ({why}); set HF_HOME to a folder that can"
    return (
        f"the hub cannot be reached ({describe_error(error):.200}); give a folder, or look at the "
        "network"
    )
