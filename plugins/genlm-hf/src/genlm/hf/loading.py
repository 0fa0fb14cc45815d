"""From a name to a model and its tokenizer."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file

from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import EngineError, InvalidOptionError, ModelNotFoundError
from genlm.core.hints import nearest
from genlm.core.logs import get_logger
from genlm.core.options import unknown_argument
from genlm.hf.gguf_files import GGUFFile
from genlm.hf.options import ELSEWHERE, FROM_PRETRAINED, HFOptions
from genlm.kit.checkpoints import (
    require_places,
    unread_in,
    weight_files,
    without_adapter,
)
from genlm.kit.model_files import local_folder, require_tokenizer
from genlm.kit.settings import ROPE_NAMES, overridden, require_one_rotary
from genlm.kit.tokenizer_files import follow_file

logger = get_logger()

#: The arguments of ``from_pretrained`` that locate the files; the tokenizer needs them too.
SOURCE_ARGUMENTS = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "trust_remote_code",
    "subfolder",
    "gguf_file",
)

#: The files that weights of transformers are in.
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

#: The argument with which a folder's own code is run.
TRUST = "trust_remote_code"

#: Early names of types of rotary embeddings, with those of today.
EARLY_ROPE_TYPES = {"su": "longrope"}

#: The modes of ``torch.compile`` that capture CUDA graphs.
GRAPH_MODES = ("reduce-overhead", "max-autotune")

#: Examples of types of weights, for error messages.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def load_pretrained(name: str, options: HFOptions) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name: A folder (also one whose only weights are a GGUF file), a ``.gguf`` file, or a hub
            name.
        options: See :class:`HFOptions`.

    Raises:
        InvalidOptionError: the options contradict each other, or the folder holds several GGUF
            files.
        ModelNotFoundError: the folder has no tokenizer or no weights, or the checkpoint lacks some
            of them.
        EngineError: the model is not a causal language model, or of a family that transformers does
            not have.
        OSError: transformers' own error: there is no such model.
    """
    arguments = dict(options.hf_opts)
    tokenizer_name = arguments.pop("tokenizer", None)
    if not isinstance(tokenizer_name, str | Path | None):
        raise InvalidOptionError(
            "hf_opts['tokenizer'] must be a folder or a hub name; AsyncTransformer(model, "
            f"tokenizer) takes one that is loaded; got {safe_repr(tokenizer_name)}"
        )
    name, gguf_file = _gguf(name)
    if gguf_file is not None:
        arguments.setdefault("gguf_file", gguf_file)
    source = {key: arguments[key] for key in SOURCE_ARGUMENTS if key in arguments}
    tokenizer = _load_tokenizer(str(tokenizer_name or name), {} if tokenizer_name else source)
    device = _place(arguments, options)
    file = _gguf_file(name, source)
    if file is not None and tokenizer_name is None:
        file.warn_of_pattern()
    if file is not None and "config" not in arguments:
        arguments["config"] = AutoConfig.from_pretrained(name, **source)
        file.complete(arguments["config"])
    arguments["output_loading_info"] = True
    # Weights of another shape are then in that report too, and are rejected by their names.
    arguments.setdefault("ignore_mismatched_sizes", True)
    try:
        _complete_rotary(name, arguments, source)
        with without_adapter(name, source) as more:
            model, found = _from_pretrained(name, {**arguments, **more})
    except TypeError as error:
        _refuse_argument(error, options.hf_opts)
        raise
    except KeyError:
        _refuse_rotary_type(name, options.hf_opts, source)
        raise
    except OSError as error:
        _require_weight_files(name, source, error)
        raise
    except ValueError:
        _require_known_family(name, source)
        _refuse_rotary_type(name, options.hf_opts, source)
        raise
    if not {"config", "gguf_file", *ROPE_NAMES} & arguments.keys():
        require_one_rotary(name, _config_file(name, source), model.config)
    _require_weights(name, model, found)
    _require_places(name, model, found, source)
    if file is not None:
        file.correct(model)
    if device is not None:
        model = model.to(device)
    if options.compile_opts is not None:
        model.compile(**options.compile_opts)
    logger.info(
        "model.loaded", backend="hf", model=name, device=str(model.device), dtype=str(model.dtype)
    )
    return model.eval(), tokenizer


def _from_pretrained(name: str, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """A causal language model, and transformers' report of which weights were found. Multimodal
    models are loaded too, and used for text only.

    Raises:
        EngineError: transformers has no causal language model of the checkpoint's family.
    """
    family = ""
    for kind in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        try:
            loaded: tuple[Any, Any] = kind.from_pretrained(name, **arguments)
            return loaded
        except ValueError as error:
            unknown = re.search(r"configuration class <class '[\w.]*?(\w+)'> for this", str(error))
            if unknown is None:
                raise
            family = unknown[1]
    raise EngineError(
        f"{name!r} is not a causal language model: transformers has no causal class for {family}; "
        "give a model that continues text"
    )


def _complete_rotary(name: str, arguments: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Complete rotary settings among the arguments by the model's own, such as ``rope_theta``.
    transformers would take them in place of the model's.

    Raises:
        InvalidOptionError: they are no mapping.
    """
    given = {each: arguments[each] for each in ROPE_NAMES if each in arguments}
    if not given or "config" in arguments:
        return
    for each in ROPE_NAMES[:2]:
        if not isinstance(given.get(each), Mapping | None):
            raise InvalidOptionError(
                f"hf_opts[{each!r}] must be a mapping, such as {{'rope_type': 'linear', 'factor': "
                f"2.0}}; got {safe_repr(given[each])}"
            )
    settings = AutoConfig.from_pretrained(name, **source)
    if settings.get_text_config(decoder=True) is settings and hasattr(settings, "rope_parameters"):
        for each in given:
            del arguments[each]
        arguments["rope_parameters"] = overridden(settings, given)[1]["rope_parameters"]


def _refuse_rotary_type(name: str, given: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Explain why transformers fails on rotary settings.

    Args:
        name: The model.
        given: The user's ``hf_opts``.
        source: Where its files are.

    Raises:
        EngineError: transformers has no such type of rotary embeddings.
    """
    known = ["default", *ROPE_INIT_FUNCTIONS]
    places = {"hf_opts": given, f"config.json of {name!r}": _config_file(name, source)}
    for where, settings in places.items():
        rope: Any = next((settings[each] for each in ROPE_NAMES[:2] if settings.get(each)), {})
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in known:
            now = EARLY_ROPE_TYPES.get(kind)
            meant = f"write {now!r}, its name today" if now else f"it has {', '.join(known)}"
            raise EngineError(
                f"{where} has the rope_type {kind!r}, which transformers "
                f"{transformers.__version__} does not have; {meant}"
            )


def _refuse_argument(error: TypeError, given: Mapping[str, Any]) -> None:
    """Raises: InvalidOptionError: the model's class does not take one of ``hf_opts``."""
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unexpected is None or unexpected[1] not in given:
        return
    way = ELSEWHERE.get(unexpected[1], "")
    if way and "in hf_opts" not in way:
        raise InvalidOptionError(f"hf_opts takes no {unexpected[1]}; {way}") from error
    known = [*FROM_PRETRAINED.split(), "dtype"]
    raise unknown_argument("hf_opts", "argument", unexpected[1], known) from error


def _load_tokenizer(name: str, source: Mapping[str, Any]) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    except Exception:
        require_tokenizer(Path(name, source.get("subfolder", "")), "hf_opts={'tokenizer': ...}")
        _require_known_family(name, source)
        _refuse_rotary_type(name, {}, source)
        raise
    if not {"gguf_file", "subfolder"} & {key for key, value in source.items() if value}:
        follow_file(tokenizer, name, source.get("revision"), source.get("cache_dir"))
    return tokenizer


def _folder(name: str, source: Mapping[str, Any]) -> Path | None:
    """The folder with the model's files: the user's, or the copy in the hub's cache. ``None`` if
    the cache has no copy."""
    found = local_folder(name, source.get("revision"), source.get("cache_dir"))
    return None if found is None else found / (source.get("subfolder") or "")


def _require_weight_files(name: str, source: Mapping[str, Any], error: OSError) -> None:
    """Raises: ModelNotFoundError: the model's folder, or that in the hub's cache, lacks all of its
    weights or some of their files. For the hub's cache, transformers' ``error`` says why they were
    not downloaded: the disk may be full."""
    if (folder := _folder(name, source)) is None:
        return
    named = weight_files(folder)
    lacking = [file.name for file in named if not file.is_file()]
    if lacking or not any(next(folder.glob(file), None) for file in WEIGHTS):
        what = f"lacks {lacking[0]}" if lacking else f"holds no weights ({', '.join(WEIGHTS)})"
        why = "" if Path(name).is_dir() else f" ({describe_error(error):.300})"
        raise ModelNotFoundError(
            f"the folder {str(folder)!r} {what}; copy or download the whole model{why}"
        )


def _config_file(name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of the model's ``config.json``; empty if it has none."""
    where = {key: value for key, value in source.items() if key not in (TRUST, "gguf_file")}
    try:
        return dict(PretrainedConfig.get_config_dict(name, **where)[0])
    except OSError:  # there is no such folder, or it has no configuration
        return {}


def _require_known_family(name: str, source: Mapping[str, Any]) -> None:
    """Explain why transformers fails on a model: it does not have the family, and the code of the
    folder's own is not trusted.

    Raises:
        EngineError: that is the reason.
    """
    settings = _config_file(name, source)
    family = settings.get("model_type")
    if "auto_map" in settings and family not in CONFIG_MAPPING and not source.get(TRUST):
        raise EngineError(
            f"{name!r} is of the family {family!r}, which transformers {transformers.__version__} "
            "does not have; code of the folder's own is run with "
            "hf_opts={'trust_remote_code': True}, if you trust it"
        )


def _require_weights(name: str, model: Any, found: Mapping[str, Any]) -> None:
    """Raises: ModelNotFoundError: some weights were missing from the checkpoint, or had another
    shape there, so they are random now."""
    if mismatched := sorted(found["mismatched_keys"]):
        weight, held, needed = mismatched[0]
        more = f" ({len(mismatched)} weights in all)" if len(mismatched) > 1 else ""
        raise ModelNotFoundError(
            f"in the checkpoint {name!r}, {weight} has the shape {tuple(held)}, and "
            f"{type(model).__name__} needs {tuple(needed)} by config.json and the options{more}; "
            "give the configuration of this checkpoint"
        )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelNotFoundError(
            f"the checkpoint {name!r} lacks weights of {type(model).__name__}, which would be "
            f"random: {', '.join(missing[:3])}{more}; give the whole checkpoint of a causal "
            "language model"
        )


def _require_places(
    name: str, model: Any, found: Mapping[str, Any], source: Mapping[str, Any]
) -> None:
    """Raises: EngineError: the checkpoint has weights for parts of the model that have no place for
    them."""
    folder, unread = _folder(name, source), found["unexpected_keys"]
    # Methods of quantisation leave out names of their own.
    if folder is not None and unread and not hasattr(model, "hf_quantizer"):
        require_places(name, model, unread_in(folder, unread))


def _place(arguments: dict[str, Any], options: HFOptions) -> str | None:
    """Add type, quantisation and device to the arguments. Return the device to which the model must
    be moved after loading, if any."""
    cuda = torch.cuda.is_available()
    device = options.device
    if device is not None and "device_map" in arguments:
        raise InvalidOptionError(
            f"device={device!r} and hf_opts['device_map'] both place the model; give one of them"
        )
    if device is None:
        device = "cuda" if cuda else "cpu"
    _check_device(device)
    _check_mode(options, torch.device(device).type)
    for dtype in (options.dtype, arguments.get("dtype"), arguments.get("torch_dtype")):
        _check_dtype(dtype)
    if options.dtype is not None:
        if "dtype" in arguments or "torch_dtype" in arguments:
            raise InvalidOptionError(
                f"dtype={options.dtype!r} and hf_opts['dtype'] are the same option; give one of "
                "them"
            )
        arguments["dtype"] = options.dtype
    elif "torch_dtype" not in arguments:
        arguments.setdefault(
            "dtype", torch.float32 if torch.device(device).type == "cpu" else "auto"
        )
    if options.bitsandbytes_opts:
        _check_arguments("bitsandbytes_opts", options.bitsandbytes_opts, BitsAndBytesConfig)
        if "quantization_config" in arguments:
            raise InvalidOptionError(
                "bitsandbytes_opts and hf_opts['quantization_config'] contradict; give one of them"
            )
        for needed in ("bitsandbytes", "accelerate"):
            if importlib.util.find_spec(needed) is None:
                raise InvalidOptionError(
                    f"bitsandbytes_opts needs {needed}: pip install 'genlm-hf[bitsandbytes]'"
                )
        arguments["quantization_config"] = BitsAndBytesConfig(**options.bitsandbytes_opts)
    if "quantization_config" in arguments:
        # A quantised model is placed while it loads, and cannot be moved.
        arguments.setdefault("device_map", device)
    return None if "device_map" in arguments else device


def _check_device(device: Any) -> None:
    """Raises: InvalidOptionError: the machine does not have this device."""
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        there.append("mps")
    try:
        given = torch.device(device)
    except (RuntimeError, TypeError):
        given = None
    kinds = {name.partition(":")[0] for name in there}
    absent = (
        given is not None
        and given.type in ("cpu", "cuda", "mps")
        and (
            given.type not in kinds
            or (given.type == "cuda" and given.index is not None and str(given) not in there)
        )
    )
    if given is None or absent:
        raise InvalidOptionError(
            f"device must be one that PyTorch sees here: {', '.join(there)}; "
            f"got {safe_repr(device)}"
        )


def _check_mode(options: HFOptions, device: str) -> None:
    """Raises: InvalidOptionError: ``compile_opts`` asks for CUDA graphs, or for a mode that
    ``torch.compile`` does not have."""
    given = options.compile_opts or {}
    _check_arguments("compile_opts", given, torch.compile)
    mode = given.get("mode")
    if device == "cuda" and mode in GRAPH_MODES:
        raise InvalidOptionError(
            f"compile_opts['mode']={mode!r} captures CUDA graphs, whose rows the next forward "
            "overwrites; give 'default' or 'max-autotune-no-cudagraphs'"
        )


def _check_arguments(option: str, given: Mapping[str, Any], taker: Callable[..., Any]) -> None:
    """Raises: InvalidOptionError: ``taker`` has no such argument; transformers would ignore it."""
    known = inspect.signature(taker).parameters
    for name in given:
        if name not in known:
            raise unknown_argument(option, "argument", name, known)


def _check_dtype(dtype: Any) -> None:
    """Raises: InvalidOptionError: the value is not a type that weights can have."""
    given = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    floating = isinstance(given, torch.dtype) and given.is_floating_point
    if not (dtype in (None, "auto") or floating or isinstance(dtype, dict)):
        near = nearest(dtype, DTYPES, 0.5) if given is None else None
        meant = f"; did you mean {near!r}?" if near else ""
        raise InvalidOptionError(
            f"dtype must be one of {', '.join(DTYPES)}, or such a torch.dtype; "
            f"got {safe_repr(dtype)}{meant}"
        )


def _gguf_file(name: str, source: Mapping[str, Any]) -> GGUFFile | None:
    """The GGUF file that holds the model, on this machine; ``None`` if none does."""
    if (file := source.get("gguf_file")) is None:
        return None
    others = ("gguf_file", "trust_remote_code")
    where = {key: value for key, value in source.items() if key not in others}
    return GGUFFile(file if Path(file).is_file() else cached_file(name, file, **where))


def _gguf(name: str) -> tuple[str, str | None]:
    """Split a path into the folder to load from and the GGUF file in it, if a GGUF file holds the
    weights."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.name
    others = ("*.safetensors", "pytorch_model*", "*.index.json")
    if not path.is_dir() or any(next(path.glob(file), None) for file in others):
        return name, None
    found = sorted(file.name for file in path.glob("*.gguf"))
    if len(found) > 1:
        raise InvalidOptionError(
            f"{name} holds {len(found)} GGUF files; choose by hf_opts={{'gguf_file': {found[0]!r}}}"
        )
    return name, found[0] if found else None
