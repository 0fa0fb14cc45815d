"""From a model's name and the user's options to an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import EngineDeadError, EngineError, GenlmError, InvalidOptionError
from genlm.core.logs import get_logger
from genlm.core.options import refuse_unknown
from genlm.kit.checkpoints import require_weights
from genlm.kit.model_files import eos_token_ids, require_model, require_tokenizer
from genlm.kit.settings import language_part, overridden, own_class, whole_settings_of
from genlm.kit.tokenizer_files import follow_file
from genlm.sgl.engine import PROBE, SglEngine
from genlm.sgl.internals import Scheduler
from genlm.sgl.lora import SglLoraEngine
from genlm.sgl.options import OPTIONS, gpu_index, server_options
from genlm.sgl.trust import refuse_code

log = get_logger()


def load(model: str, options: Mapping[str, Any]) -> SglEngine:
    """Start SGLang on the calling thread.

    Args:
        model: A local folder or a hub name.
        options: ``engine_opts`` (SGLang's server arguments) and ``gpu_id``.

    Raises:
        BackendUnavailableError: this process holds an SGLang model.
        InvalidOptionError: an option is not accepted, there is no such folder, or the model brings
            code that is not trusted.
        EngineError: SGLang cannot serve the model, or would compute other rows than its
            configuration says.
    """
    elsewhere = {"hf_opts": "it is an option of hf; for sgl, give engine_opts"}
    refuse_unknown("sgl", options, OPTIONS, elsewhere, "one of SGLang's goes in engine_opts")
    require_model(model)
    arguments = server_options(model, options.get("engine_opts") or {})
    refuse_code(arguments)
    settings, option = _configured(arguments)
    arguments |= option
    if arguments.get("load_format") != "dummy":
        require_weights(model, settings)
    index = gpu_index(arguments["device"], options.get("gpu_id", 0))
    with _explained(model, settings, options):
        try:
            scheduler = Scheduler(arguments, index, settings)
        except Exception:
            folder = arguments.get("tokenizer_path") or model
            require_tokenizer(folder, "engine_opts={'tokenizer_path': ...}")
            raise
    engine = (SglLoraEngine if arguments.get("enable_lora") else SglEngine)(scheduler)
    try:
        with _explained(model, settings, options):
            if settings is not None:
                _honour(engine, settings)
            engine.evaluate_alone(PROBE)
    except BaseException:
        engine.genlm_close()
        raise
    where = arguments.get("revision"), arguments.get("download_dir")
    engine.eos_token_ids = eos_token_ids(model, *where)
    follow_file(engine.tokenizer, arguments.get("tokenizer_path") or model, *where)
    return engine


def _configured(arguments: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model's settings with the user's overrides (``None`` if transformers does not know the
    model), and the option that gives SGLang the same settings. The option contains

    - the user's overrides, in the form that an engine needs;
    - the activation of Gemma and Gemma 2 under both of its names, of which transformers 5 writes
      only one;
    - for a multimodal model, whether the embeddings of its language model are tied, which
      transformers 5 writes only for the whole model;
    - the class of the model's family, if the configuration names another family's.
    """
    overrides = _overrides(arguments)
    whole = whole_settings_of(arguments["model_path"], arguments.get("revision"))
    if whole is None:
        return None, {}
    part = language_part(whole)
    given = overrides.get(part, {}) if part else overrides
    settings, changes = overridden(whole.get_text_config(decoder=True), given)
    if part and not hasattr(getattr(whole, part), "tie_word_embeddings"):
        tied = getattr(whole, "tie_word_embeddings", False)
        changes = {"tie_word_embeddings": tied, **changes}
    if settings.model_type in ("gemma", "gemma2"):
        activation = getattr(settings, "hidden_activation", None) or "gelu_pytorch_tanh"
        names = dict.fromkeys(("hidden_act", "hidden_activation"), activation)
        changes = {**names, **changes}
    if "architectures" not in overrides:
        changes = {**own_class(arguments["model_path"], whole), **changes}
    if not changes:
        return settings, {}
    written = {**overrides, part: changes} if part else changes
    return settings, {"json_model_override_args": json.dumps(written)}


def _overrides(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The user's changes of the model's settings.

    Raises:
        InvalidOptionError: the option is not the JSON of an object.
    """
    given = arguments.get("json_model_override_args") or "{}"
    try:
        return dict(json.loads(given))
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(
            "engine_opts['json_model_override_args'] must be a JSON object, such as "
            f"'{{\"rope_theta\": 10000}}'; got {safe_repr(given)}"
        ) from error


def _honour(engine: SglEngine, settings: Any) -> None:
    """Make SGLang compute what the settings say, or limit contexts to the length up to which it
    does."""
    limits = engine.scheduler.repair(settings)
    length, why = min(limits, default=(engine.max_context, ""))
    if length < engine.max_context:
        engine.max_context = length
        log.warning("context.limited", to=length, why=f"SGLang has no {why} beyond it")


@contextmanager
def _explained(model: str, settings: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, explain the errors that SGLang raises."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GenlmError) and not isinstance(error, EngineDeadError):
            raise
        family = "" if settings is None else f" ({settings.model_type})"
        given = ", ".join(options.get("engine_opts") or ())
        change = f"change engine_opts ({given}), or " if given else ""
        raise EngineError(
            f"SGLang cannot serve the model {model!r}{family} here: {describe_error(error)}; "
            f"{change}load it with backend='hf'"
        ) from error
