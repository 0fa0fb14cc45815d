"""The options of SGLang: defaults for each device, and options that only this plugin may set."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch

from genlm.core.errors import BackendUnavailableError, InvalidOptionError

#: The options of this backend.
OPTIONS = ("engine_opts", "gpu_id")

#: Types of weights, as SGLang names them.
DTYPES = ("auto", "float32", "float", "bfloat16", "float16", "half")

#: The options that are required to drive the scheduler in this process.
REQUIRED: Mapping[str, Any] = {
    "allow_auto_truncate": False,
    "disable_overlap_schedule": True,  # rows are read before the next batch is planned
    "disaggregation_mode": "null",
    "dp_size": 1,
    # Their registry belongs to the process, so a second model would find its names taken.
    "enable_metrics": False,
    "is_embedding": False,
    "lora_paths": None,  # adapters are added by add_new_lora, which gives them names for requests
    "max_queued_requests": None,
    "pp_size": 1,
    "skip_tokenizer_init": False,
    "speculative_algorithm": None,
    "tp_size": 1,
    "watchdog_timeout": None,  # construction.py creates none
}

DEFAULTS: Mapping[str, Any] = {
    # Graphs are captured for decoding, but a row is a prefill.
    "disable_cuda_graph": True,
    "grammar_backend": "none",
    "log_level": "warning",
}

#: The defaults on a CPU: rows in full precision, plain PyTorch, and a pool that leaves memory for
#: others.
CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "disable_hybrid_swa_memory": True,  # the attention of attention.py reads one pool
    "dtype": "float32",
    "max_running_requests": 256,
    "max_total_tokens": 32768,
    "sampling_backend": "pytorch",
}

LORA_DEFAULTS: Mapping[str, Any] = {
    "lora_target_modules": ["all"],
    "max_lora_rank": 64,
    "max_loras_per_batch": 8,
}
CPU_LORA_DEFAULTS: Mapping[str, Any] = {"lora_backend": "torch_native"}


def server_options(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The server arguments for a model, from the user's options.

    Raises:
        InvalidOptionError: an option contradicts what this plugin requires.
    """
    for name, value in given.items():
        if name == "model_path":
            raise InvalidOptionError(
                "engine_opts has no model_path: the model's name comes first, "
                "load_model_by_name(name, 'sgl', ...)"
            )
        if name == "dtype" and isinstance(value, str) and value not in DTYPES:
            raise InvalidOptionError(
                f"engine_opts['dtype'] must be one of {', '.join(DTYPES)}; got {value!r}"
            )
        if name in REQUIRED and value != REQUIRED[name]:
            raise InvalidOptionError(
                f"engine option {name}={value!r} is not possible in process, where it is "
                f"{REQUIRED[name]!r}; leave it out"
            )
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device == "cpu"
    # A fresh seed for unseeded samples, because SGLang would take it from the program's generator.
    fresh = {"random_seed": secrets.randbits(30)}
    defaults = {**fresh, **DEFAULTS, **(CPU_DEFAULTS if on_cpu else {})}
    if given.get("enable_lora"):
        if on_cpu:
            _require_pinned_memory()
        defaults |= {**LORA_DEFAULTS, **(CPU_LORA_DEFAULTS if on_cpu else {})}
    return {**defaults, **given, **REQUIRED, "model_path": model, "device": device}


def _require_pinned_memory() -> None:
    """Check for pinned memory before loading, because SGLang's LoRA layers need it on every device.

    Raises:
        BackendUnavailableError: this PyTorch cannot pin memory.
    """
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        raise BackendUnavailableError(
            "SGLang's LoRA (engine option enable_lora=True) needs pinned memory, which PyTorch has "
            f"only with an accelerator ({error}); load the model on a GPU, leave enable_lora out, "
            "or use another backend for adapters, such as 'hf'"
        ) from error


def gpu_index(device: str, gpu_id: int) -> int:
    """The GPU to use; 0 on the CPU, where SGLang would treat another number as a NUMA node.

    Raises:
        InvalidOptionError: there is no such GPU.
    """
    if device == "cpu":
        return 0
    if device == "cuda" and gpu_id not in range(torch.cuda.device_count()):
        raise InvalidOptionError(
            f"gpu_id={gpu_id!r} on the device 'cuda', where PyTorch sees "
            f"{torch.cuda.device_count()} GPUs; give one of "
            "those, counted from 0, or the engine option device='cpu'"
        )
    return gpu_id
