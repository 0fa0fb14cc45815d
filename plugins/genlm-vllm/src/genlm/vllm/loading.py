"""From a model's name and the user's options to an engine."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any

from genlm.core.checks import describe_error, integer
from genlm.core.errors import EngineError, GenlmError, InvalidOptionError
from genlm.core.logs import get_logger
from genlm.kit import randomness
from genlm.kit.checkpoints import require_all_read, require_places_by_name, require_weights
from genlm.kit.loads import Load, require_all_written
from genlm.kit.memory import is_out_of_memory
from genlm.kit.model_files import (
    eos_token_ids,
    local_folder,
    require_model,
    require_tokenizer,
)
from genlm.kit.settings import language_part, whole_settings_of
from genlm.kit.tokenizer_files import follow_file
from genlm.vllm.cache_size import (
    cache_on_a_cpu,
    explain_small_cache,
    warn_of_shorter_contexts,
)
from genlm.vllm.capture import RowStore, capture_into
from genlm.vllm.engine import VllmEngine
from genlm.vllm.internals import EngineCore, engine_core_here, process_groups
from genlm.vllm.lora import LoraEngine
from genlm.vllm.options import Options, check_engine_opts
from genlm.vllm.rows import LocalRows, Rows, WorkerRows
from genlm.vllm.sessions import Sessions
from genlm.vllm.settings import Configuration, corrections, on_a_cpu, refuse_other_logits
from genlm.vllm.streams import EngineStream
from genlm.vllm.weights import explain_repacked_weights, watched

log = get_logger()

WORKER = "genlm.vllm.worker"
SCHEDULER = "genlm.vllm.forks.forking_scheduler"

#: The errors that vLLM raises for a configuration that it does not know, while loading or at the
#: first row.
LOADING_ERRORS = (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError)

#: The modules of vLLM that read a model's files, build the model and have its kernels; an error
#: from any other module is about options. And the messages by which other modules report an unknown
#: model.
OF_THE_MODEL = ("model_executor", "transformers_utils", "v1/attention")
NO_SUCH_MODEL = ("Model architectures", "Pooling models", "Unknown quantization method")


@randomness.left_alone()
def load(model: str, options: Mapping[str, object]) -> VllmEngine:
    """Start vLLM on the calling thread.

    Raises:
        InvalidOptionError: an option is unknown, or does not work with full rows; or there is no
            such folder.
        BackendUnavailableError: the installed vLLM lacks what the plugin uses.
        EngineError: vLLM cannot serve the model, or would compute other rows than its configuration
            says.
    """
    chosen = Options.read(options)
    check_engine_opts(chosen.engine_opts)
    require_model(model, ("config.json", "params.json", "*.gguf"))
    configuration = Configuration.read(model, chosen.engine_opts)
    configured = configuration and configuration.settings
    if chosen.engine_opts.get("load_format") != "dummy":
        require_weights(model, configured)
    _heed_float32(chosen.engine_opts)
    import vllm

    _let_frames_be_freed()
    if on_a_cpu():
        _let_llvmlite_be_searched()

    stream = EngineStream()
    with stream.entered(), engine_core_here() as here, process_groups():
        if here:
            # vLLM runs five garbage collections while it loads, and then freezes all objects until
            # it is closed. Objects that exist already need to be searched only once.
            gc.collect()
            gc.freeze()
        local = here and _has_one_worker(chosen.engine_opts)
        store = RowStore()
        settings = (
            _defaults()
            | dict(chosen.engine_opts)
            | (cache_on_a_cpu(configured, chosen.engine_opts) if on_a_cpu() else {})
            | corrections(model, chosen.engine_opts)
            | _spare_slot(chosen.engine_opts)
            | _row_hooks(chosen.engine_opts, store if local else None)
        )
        with _explained(model):
            try:
                with watched():
                    llm = vllm.LLM(model, **settings)
            except Exception as error:
                explain_small_cache(error, settings)
                folder = chosen.engine_opts.get("tokenizer") or model
                require_tokenizer(folder, "engine_opts={'tokenizer': ...}")
                if isinstance(error, LookupError | ValueError):  # also for names of weights
                    there = _folder(model, chosen.engine_opts)
                    require_places_by_name(model, there, configured)
                raise
        core = EngineCore(llm, stream)
    rows: Rows = LocalRows(store, core.device_type) if local else WorkerRows(core)
    warn_of_shorter_contexts(core.max_model_len, configured, settings)
    engine = _engine(llm, core, rows, chosen)
    given = chosen.engine_opts
    where = given.get("revision"), given.get("download_dir")
    engine.eos_token_ids = eos_token_ids(model, *where)
    tokenizer = given.get("tokenizer") or model
    follow_file(engine.tokenizer, tokenizer, given.get("tokenizer_revision") or where[0], where[1])
    try:
        with _explained(model):
            if configuration is not None and core.runs_transformers:
                refuse_other_logits(configuration)
            _require_whole(rows.load(engine.model), model, configured, given)
            if local:
                explain_repacked_weights(engine.model)
            engine.prove()
    except BaseException:
        core.shutdown()
        rows.close()
        raise
    log.info(
        "vllm.loaded",
        model=model,
        device=engine.device,
        live=engine.live,
        context=engine.max_context,
    )
    return engine


def _let_frames_be_freed() -> None:
    """Drop the tracebacks of an error that vLLM keeps. Where torchcodec or ffmpeg is missing, they
    hold all frames of the thread that imported vLLM, with what was in them: the first model too."""
    audio = sys.modules.get("vllm.multimodal.media.audio")
    error: BaseException | None = getattr(audio, "_torchcodec_import_exc", None)
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _let_llvmlite_be_searched() -> None:
    """Give llvmlite's library an empty ``__dict__``.

    On a CPU, vLLM looks for Triton kernels in the ``__dict__`` of all values of all modules. The
    library returns a function for any name. So each load would fail once numba is imported, by the
    program or by a model's class.
    """
    try:
        from llvmlite.binding.ffi import lib

        lib._fntab.setdefault("__dict__", {})
    except (ImportError, AttributeError):
        pass  # it is not installed, or wraps its library in another way


def _require_whole(load: Load | None, model: str, settings: Any, given: Mapping[str, Any]) -> None:
    """Reject a model that has left out tensors of its checkpoint, or has parameters that are not in
    the checkpoint.

    Args:
        load: What the model has done with the checkpoint; ``None`` if it could not be watched.
        model: The folder or hub name.
        settings: What its configuration says, if transformers knows it.
        given: The user's ``engine_opts``.

    Raises:
        EngineError: a tensor is left out, or a parameter is missing.
    """
    load_format = given.get("load_format", "auto")
    if load is None:
        if load_format != "dummy":
            log.warning("weights.unwatched", model=model, load_format=load_format)
        return
    kind = getattr(settings, "model_type", "this model")
    require_all_written(load.unwritten, model, kind, "vLLM")
    require_all_read(load.unread, model, _folder(model, given), settings, "vLLM")


def _folder(model: str, given: Mapping[str, Any]) -> Path | None:
    """The folder of the model's files, if they are on this machine."""
    return local_folder(model, given.get("revision"), given.get("download_dir"))


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Inside the block, explain errors of vLLM that say nothing to a user."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, LOADING_ERRORS) and not _is_of_the_model(error):
            raise
        said = " ".join(describe_error(error).split())
        raise EngineError(
            f"vLLM cannot serve the model {model!r} here ({said:.400}); {_lacking(model)}load it "
            'with backend="hf"'
        ) from error


def _lacking(model: str) -> str:
    """The missing package that vLLM's code of a multimodal model imports, which vLLM's own error
    may not name."""
    whole = whole_settings_of(model)
    if whole is None or language_part(whole) is None or find_spec("torchvision"):
        return ""
    return (
        "models that also see need torchvision, which is missing: install the build that belongs "
        f"to torch {version('torch')}, or "
    )


def _is_of_the_model(error: Exception) -> bool:
    """Whether an error is about the model and not about the options."""
    if isinstance(error, GenlmError) or is_out_of_memory(error):
        return False
    files = [frame.filename.replace("\\", "/") for frame in extract_tb(error.__traceback__)]
    return any(f"/vllm/{part}/" in file for part in OF_THE_MODEL for file in files) or (
        isinstance(error, ValueError) and any(words in str(error) for words in NO_SUCH_MODEL)
    )


def _engine(llm: Any, core: EngineCore, rows: Rows, chosen: Options) -> VllmEngine:
    # The other half is left to running requests for as long as they need it.
    half = core.max_num_seqs // 2
    live, places = chosen.live_sessions, core.max_num_seqs - 1
    has_limit = live is not True and bool(live)
    sessions = Sessions(
        limit=min(live, places) if has_limit else half,
        places=0 if has_limit else places,
        capacity=core.kv_capacity,
        shared=core.block_size if core.shares_blocks else None,
        footprint=core.footprint,
        longest=core.max_model_len,
        reach=core.block_size if core.prefix_caching else core.max_model_len,
        forks=core.forks,
    )
    kind = LoraEngine if core.max_loras else VllmEngine
    return kind(llm, core, rows, sessions, live=bool(live))


def _defaults() -> dict[str, Any]:
    """Options that differ from vLLM's own defaults, unless the user sets them.

    They are: a fresh seed, because unseeded samples must differ from run to run, and vLLM seeds its
    sampler with 0; no asynchronous scheduling, with which a single row takes one step more; and,
    for a multimodal model, the language model alone. Only text is requested here, and vLLM would
    otherwise load the other parts and try them on images, for which it needs the processor's files.
    """
    settings: dict[str, Any] = {
        "seed": secrets.randbits(31),
        "async_scheduling": False,
        "disable_log_stats": True,
        "language_model_only": True,
        "scheduler_cls": SCHEDULER,
    }
    if on_a_cpu():
        # A partly filled block cannot be found after its request has ended, so blocks are small.
        # Compiling takes minutes and gains little.
        settings |= {"enforce_eager": True, "block_size": 32}
    return settings


def _heed_float32(engine_opts: Mapping[str, Any]) -> None:
    """On a GPU, make vLLM's kernels compute in full float32 if that type is requested.

    Raises:
        InvalidOptionError: vLLM's kernels for adapters do not support float32.
    """
    dtype = engine_opts.get("dtype")
    if on_a_cpu() or str(dtype).removeprefix("torch.") not in ("float", "float32"):
        return
    if engine_opts.get("enable_lora"):
        raise InvalidOptionError(
            f"dtype={dtype!r} and enable_lora do not work together on a GPU, where vLLM's kernels "
            "for adapters take float16 and bfloat16; give dtype='bfloat16', or load the model with "
            'backend="hf"'
        )
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # Triton's own default rounds to TF32


def _spare_slot(engine_opts: Mapping[str, Any]) -> dict[str, int]:
    """On a CPU, give every adapter a slot, and add an empty one. vLLM fills the first free slot,
    and (to 0.32) applies the last slot to rows without an adapter."""
    if not (engine_opts.get("enable_lora") and on_a_cpu()):
        return {}
    slots = _number(engine_opts, "max_loras")
    adapters = _number(engine_opts, "max_cpu_loras", slots)
    if adapters < slots:
        return {}  # but vLLM rejects that value
    return {"max_loras": adapters + 1, "max_cpu_loras": adapters + 1}


def _row_hooks(engine_opts: Mapping[str, Any], store: RowStore | None) -> dict[str, Any]:
    """The logits processors of a model. The plugin's is the first, so that the user's processors
    change samples but not rows."""
    users = list(engine_opts.get("logits_processors") or [])
    if store is not None:
        return {"logits_processors": [capture_into(store), *users]}
    if extension := engine_opts.get("worker_extension_cls"):
        raise InvalidOptionError(
            f"worker_extension_cls={extension!r} cannot be combined with workers in other "
            "processes, whose rows need "
            f"that place; inherit {WORKER}.RowAccess in a class that is passed by worker_cls"
        )
    return {
        "logits_processors": [f"{WORKER}:GenlmRowCapture", *users],
        "worker_extension_cls": f"{WORKER}.RowAccess",
    }


def _has_one_worker(engine_opts: Mapping[str, Any]) -> bool:
    """Whether the only worker is an object in the engine core's process."""
    parts = ("tensor_parallel_size", "pipeline_parallel_size")
    one = all(_number(engine_opts, name) == 1 for name in parts)
    return one and engine_opts.get("distributed_executor_backend") in (None, "uni")


def _number(engine_opts: Mapping[str, Any], name: str, usual: int = 1) -> int:
    """Raises: InvalidOptionError: the value is not an integer of at least 1."""
    return integer(f"engine_opts[{name!r}]", engine_opts.get(name) or usual, least=1)
