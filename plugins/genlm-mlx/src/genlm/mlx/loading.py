"""Loading: correct what mlx-lm reads wrongly, and choose the store that fits its caches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model, snapshot_download
from transformers import AutoTokenizer

import mlx.core as mx
from genlm.core.checks import describe_error
from genlm.core.errors import EngineError
from genlm.core.logs import get_logger
from genlm.kit.checkpoints import (
    read_by_transformers,
    require_all_read,
    require_places_by_name,
    require_weights,
    weight_files,
)
from genlm.kit.model_files import eos_token_ids, require_model, require_tokenizer
from genlm.kit.settings import rope_limits, rope_reach, settings_of
from genlm.kit.tokenizer_files import follow_file
from genlm.mlx import rotary, windows
from genlm.mlx.adapters import Adapters
from genlm.mlx.engine import MlxEngine
from genlm.mlx.options import Options
from genlm.mlx.probe import store_of
from genlm.mlx.repairs import repair
from genlm.mlx.runner import Runner
from genlm.mlx.settings import refuse_unread
from genlm.mlx.weights import noting

#: Rotary settings, each with its name in mlx-lm's GPT-NeoX.
GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}

#: The errors that mlx-lm raises for a configuration or weights that it does not know, while loading
#: or at the first row. SystemExit is among them because one of its models ends the process.
LOADING_ERRORS = (
    AttributeError, LookupError, NotImplementedError, OSError, SystemExit, TypeError, ValueError,
)  # fmt: skip

log = get_logger()


def load(name: str, options: Mapping[str, object]) -> MlxEngine:
    """Load a model folder or hub name.

    Raises:
        InvalidOptionError: an option is unknown or out of range, or there is no such folder.
        EngineError: mlx-lm cannot load the model, or would compute its rows wrongly.
    """
    chosen = Options.read(options)
    require_model(name)
    folder = (
        Path(name)
        if Path(name).exists()
        else Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    )
    if folder.is_file():
        raise EngineError(
            f"mlx-lm reads folders of safetensors, and {name!r} is a file; load it with "
            "backend='hf'"
        )
    config = json.loads((folder / "config.json").read_text())
    settings = settings_of(folder)
    require_weights(str(folder), settings)
    dropped: dict[str, tuple[int, ...]] = {}
    try:
        given = unsaid(config, settings)
        with links_to_weights(folder) as linked:
            model, _ = load_model(
                linked,
                model_config=given | amended({**config, **given}),
                get_model_classes=noting(dropped),
            )
        require_all_read(dropped, name, folder, settings, "mlx-lm")
        repair(model)
        longest = max_context(config)
        if settings is not None and longest is not None:
            longest = rope_reach(settings, longest, "linear", "yarn")
        if settings is not None:
            longest = honoured(model, settings, longest)
        adapters = Adapters(model)
        runner = Runner(model, adapters, chosen.prefill_step_size)
        first = runner.cold((0, 0))
        mx.eval(first)
    except LOADING_ERRORS as error:
        if isinstance(error, ValueError):  # for example, because the model has no such weights
            require_places_by_name(name, folder, settings)
        raise EngineError(
            f"mlx-lm cannot load {name!r}, of family {config.get('model_type')!r} "
            f"({' '.join(describe_error(error).split()):.200}); {_remedy(folder, config, error)}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:
        require_tokenizer(folder, "")
        raise
    follow_file(tokenizer, str(folder))
    store = store_of(runner, chosen.kv_cache_bytes)
    if store is None:
        log.warning(
            "kv.unbatchable",
            model=name,
            caches=sorted({type(layer).__name__ for layer in runner.empty_cache()}),
            consequence="every context is computed alone and from its first token",
        )
    return MlxEngine(
        model,
        tokenizer,
        runner,
        adapters,
        store,
        vocab_size=first.shape[-1],
        max_context=longest,
        eos_token_ids=eos_token_ids(str(folder)),
    )


def _remedy(folder: Path, config: Mapping[str, Any], error: BaseException) -> str:
    """The remedy for an error of mlx-lm. Another backend is no remedy if it fails as well."""
    if not weight_files(folder):
        return "the folder has no weights: copy or download the whole folder"
    if isinstance(error, ValueError) and "Expected shape" in str(error):
        return "the weights do not fit config.json: copy or download the whole folder again"
    masked = any("MaskedLM" in name for name in config.get("architectures") or ())
    if masked or config.get("is_encoder_decoder"):
        return "it is no causal language model, so no backend serves it"
    return "load it with backend='hf'"


@contextmanager
def links_to_weights(folder: Path) -> Iterator[Path]:
    """A folder in which mlx-lm, which reads every ``model*.safetensors``, finds the weights that
    transformers reads."""
    found = [str(file) for file in sorted(folder.glob("model*.safetensors"))]
    files = [Path(file) for file in read_by_transformers(str(folder), found)]
    if [*map(str, files)] == found or any(file.suffix != ".safetensors" for file in files):
        yield folder
        return
    with TemporaryDirectory(prefix="genlm-model-") as linked:
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                Path(linked, file.name).symlink_to(file.resolve())
        for at, file in enumerate(files):
            Path(linked, f"model-{at}.safetensors").symlink_to(file.resolve())
        yield Path(linked)


def honoured(model: Any, settings: Any, longest: int | None) -> int | None:
    """Let the model compute what transformers' settings say.

    Returns:
        The longest context with right rows: ``longest`` or shorter.

    Raises:
        EngineError: rows would be wrong.
    """
    refuse_unread(settings, model)
    rotary.repair(model, settings)
    ends = {"sliding_window": windows.repair(model, settings), **rope_limits(settings)}
    for name, limit in ends.items():
        if limit is not None and (longest is None or limit < longest):
            log.warning("context.limited", to=limit, why=f"mlx-lm has no {name} beyond it")
            longest = limit
    return longest


def amended(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint's configuration needs so that mlx-lm 0.32 understands what
    transformers 5 writes.

    The most important is the rotary embedding. transformers 5 writes ``rope_parameters``, but most
    of mlx-lm's models read only ``rope_theta`` and ``rope_scaling``. Without these they use a
    default, and the logits are wrong without any message.
    """
    lifted: dict[str, Any] = {}
    if "n_positions" in config:
        lifted["n_ctx"] = config["n_positions"]
    if isinstance(config.get("text_config"), dict) and (inner := amended(config["text_config"])):
        lifted["text_config"] = {**config["text_config"], **inner}
    parameters = config.get("rope_parameters") or {}
    layered = isinstance(parameters.get("full_attention"), dict)
    full = parameters["full_attention"] if layered else parameters
    for name in GPT_NEOX:
        if name in full:
            lifted[name] = full[name]
            if config.get("model_type") == "gpt_neox":
                lifted[GPT_NEOX[name]] = full[name]
    if full.get("rope_type", "default") != "default":
        lifted["rope_scaling"] = {"type": full["rope_type"], **full}
    if layered and "rope_theta" in parameters.get("sliding_attention", {}):
        lifted["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    return {
        name: value
        for name, value in lifted.items()
        if name == "text_config" or config.get(name) is None
    }


def unsaid(config: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """The settings that a configuration leaves to transformers' defaults for its family. mlx-lm's
    defaults differ, for example for ``tie_word_embeddings``."""
    if settings is None:
        return {}
    if isinstance(inner := config.get("text_config"), dict):
        return {"text_config": {**inner, **unsaid(inner, settings)}}
    left = "rope_parameters" if "rope_theta" in config else None
    return {
        name: value
        for name, value in settings.to_dict().items()
        if name not in config and name != left
    }


def max_context(config: Mapping[str, Any]) -> int | None:
    """The longest context the model was made for, if its configuration says so."""
    config = config.get("text_config") or config
    return next(
        (config[name] for name in ("max_position_embeddings", "n_positions") if config.get(name)),
        None,
    )
