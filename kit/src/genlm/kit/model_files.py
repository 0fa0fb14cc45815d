"""Whether a model is there, found out before an engine spends a minute on it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import ModelNotFoundError

#: A name that the Hugging Face hub could have.
HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")

#: How long to wait for the hub, seconds.
HUB_PATIENCE = 5.0


def require_model(name: str, files: Sequence[str] = ("config.json",)) -> None:
    """Refuse a model that is not there. For ``genlm_load``, before the engine is imported.

    A folder must hold one of ``files``. A name that is not a folder must be in the hub's cache or
    on the hub. In offline mode (``HF_HUB_OFFLINE=1``) only the cache is asked.

    Args:
        name: What the user gave: a folder, a file, or a hub name.
        files: Names of files of which a folder must hold one, with ``*`` for any letters.

    Raises:
        ModelNotFoundError: it names the folder and what was looked for.
    """
    if not isinstance(name, str | os.PathLike):
        raise ModelNotFoundError(f"a model must be a folder or a hub name; got {safe_repr(name)}")
    path = Path(name)
    if path.is_dir():
        if not any(next(path.glob(file), None) for file in files):
            held = sorted(entry.name for entry in path.iterdir())
            listed = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "")
            raise ModelNotFoundError(
                f"the folder {str(name)!r} holds no {' or '.join(files)}; give the folder of a "
                f"model; this one holds {listed or 'nothing'}"
            )
    elif not path.exists() and "://" not in str(name):
        _require_on_hub(str(name), files)


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
    except ImportError:  # then it is the engine that knows where models are
        return
    plain = [file for file in files if "*" not in file]
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in plain):
        return
    absent = f"there is no folder {name!r}, the hub's cache has no such model"
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{absent}, and offline mode is on (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE); give a "
            "folder, or turn it off"
        )
    try:
        HfApi().model_info(name, timeout=HUB_PATIENCE)
    except RepositoryNotFoundError as error:
        if getattr(error.response, "status_code", None) != 403:  # gated: the engine says how
            raise ModelNotFoundError(
                f"{absent}, and neither has the hub; look for a misspelt name, or log in "
                "(hf auth login) if it is private"
            ) from error
    except HfHubHTTPError:
        return  # the hub answers; let the engine try
    except Exception as error:
        raise ModelNotFoundError(
            f"{absent}, and the hub cannot be reached ({describe_error(error):.200}); give a "
            "folder, or look at the network"
        ) from error
