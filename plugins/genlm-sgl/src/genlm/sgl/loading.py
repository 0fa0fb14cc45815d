"""From a model's name and the user's options to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core.errors import BackendUnavailableError
from genlm.core.options import refuse_unknown
from genlm.kit.model_files import eos_token_ids, require_model
from genlm.sgl.engine import SglEngine
from genlm.sgl.internals import Scheduler
from genlm.sgl.options import OPTIONS, gpu_index, server_options
from genlm.sgl.trust import refuse_code
from genlm.sgl.versions import why_unavailable


def load(model: str, options: Mapping[str, Any]) -> SglEngine:
    """Start SGLang on the calling thread.

    Args:
        model: A local folder or a hub name.
        options: ``engine_opts`` (SGLang's server arguments) and ``gpu_id``.

    Raises:
        BackendUnavailableError: SGLang is not installed in a supported version, or this process
            holds an SGLang model.
        InvalidOptionError: an option is not accepted, there is no such folder, or the model brings
            code that is not trusted.
    """
    if reason := why_unavailable():
        raise BackendUnavailableError(reason)
    refuse_unknown("sgl", options, OPTIONS)
    require_model(model)
    arguments = server_options(model, options.get("engine_opts") or {})
    refuse_code(arguments)
    scheduler = Scheduler(arguments, gpu_index(arguments["device"], options.get("gpu_id", 0)))
    if arguments.get("enable_lora"):
        from genlm.sgl.lora import SglLoraEngine

        engine: SglEngine = SglLoraEngine(scheduler)
    else:
        engine = SglEngine(scheduler)
    where = arguments.get("revision"), arguments.get("download_dir")
    engine.eos_token_ids = eos_token_ids(model, *where)
    return engine
