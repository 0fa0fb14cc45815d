"""The options of the hf backend, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from genlm.core.checks import integer, safe_repr
from genlm.core.errors import InvalidOptionError
from genlm.core.options import refuse_unknown

#: The arguments of ``from_pretrained``.
FROM_PRETRAINED = (
    "allow_all_kernels disable_mmap adapter_kwargs attn_implementation cache_dir code_revision "
    "config device_map device_mesh distributed_config "
    "experts_implementation force_download fusion_config generation_config gguf_file "
    "ignore_mismatched_sizes kernel_config key_mapping local_files_only low_cpu_mem_usage "
    "max_memory offload_buffers offload_folder offload_state_dict proxies quantization_config "
    "revision state_dict subfolder token tokenizer torch_dtype tp_plan tp_size "
    "trust_remote_code use_cache use_kernels use_safetensors variant weights_only"
)
_BITSANDBYTES = (
    "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
    "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight "
    "llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit"
)
_VLLM = (
    "enable_lora enforce_eager gpu_memory_utilization kv_cache_memory_bytes max_lora_rank "
    "max_loras max_model_len max_num_batched_tokens max_num_seqs pipeline_parallel_size "
    "quantization swap_space tensor_parallel_size tokenizer_mode"
)
_SGLANG = (
    "attention_backend context_length max_running_requests max_total_tokens mem_fraction_static"
)

#: Names that users know from ``from_pretrained`` and from other backends, each with the option to
#: use instead.
ELSEWHERE = {
    name: way
    for names, way in (
        (FROM_PRETRAINED, "give it in hf_opts, the arguments of from_pretrained"),
        ("resume_download", "transformers resumes by itself; leave it out"),
        ("use_auth_token", "its name is token now: hf_opts={'token': ...}"),
        ("use_flash_attention_2", "give hf_opts={'attn_implementation': 'flash_attention_2'}"),
        (_BITSANDBYTES, "give it in bitsandbytes_opts"),
        ("fullgraph dynamic mode options", "give it in compile_opts"),
        ("backend", "load_model_by_name takes it; torch.compile's goes in compile_opts"),
        (
            "adapter_name adapter_path lora lora_path lora_paths peft_model_id",
            "load the adapter with lm.add_new_lora(path, name)",
        ),
        ("engine_opts", "it is an option of vllm and sgl; for hf, give hf_opts"),
        ("live_sessions", "it is an option of vllm"),
        (_VLLM, "it is an argument of vLLM: backend='vllm', in engine_opts"),
        (_SGLANG, "it is an argument of SGLang: backend='sgl', in engine_opts"),
        ("gpu_id", "it is an option of sgl; for hf, give device='cuda:1'"),
        ("lazy model_config tokenizer_config", "it is an argument of mlx-lm, for backend='mlx'"),
        ("prefill_step_size", "it is an option of mlx; for hf, give max_batch_tokens"),
        ("replicas resources address start_timeout backend_opts", "it is an option of ray"),
    )
    for name in names.split()
}


#: The hint for names in neither list: engines have hundreds of arguments.
OTHERS = (
    "an argument of from_pretrained goes in hf_opts, one of BitsAndBytesConfig in "
    "bitsandbytes_opts; one of vLLM or SGLang in engine_opts, with backend='vllm' or 'sgl'"
)


def _mapping(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if given is None else given


def _is_mapping(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, Mapping | None):
        raise InvalidOptionError(
            f"{attribute.name} must be a dict of arguments; got {safe_repr(value)}"
        )


def _without_token(given: Mapping[str, Any]) -> str:
    """For ``repr``: logs must not show the user's hub token."""
    return repr({name: "..." if name == "token" else value for name, value in given.items()})


def _positive(instance: object, attribute: Any, value: Any) -> None:
    integer(attribute.name, value, least=1)


@frozen
class HFOptions:
    """Options of the hf backend.

    Attributes:
        hf_opts: Arguments of ``from_pretrained``: ``dtype``, ``device_map`` (needs accelerate),
            ``attn_implementation``, ``gguf_file``, ``revision``, ... In addition, ``tokenizer``
            names another tokenizer, which is loaded without ``revision``, ``token`` and similar
            arguments.
        bitsandbytes_opts: Arguments of ``transformers.BitsAndBytesConfig``, for instance
            ``{"load_in_4bit": True}``. They work on the CPU too.
        compile_opts: Arguments of ``torch.compile``, for instance ``{"dynamic": True}``; ``None``
            compiles nothing. Attention and the slot pool are not compiled, because their shapes
            change with every forward. On CUDA, modes that capture CUDA graphs are rejected.
        device: The model's device, as PyTorch names it; ``None`` means CUDA if it is available,
            else the CPU. It cannot be combined with ``device_map``.
        dtype: The type of the weights: a ``torch.dtype``, its name, or ``"auto"`` for the
            checkpoint's own; ``None`` means float32 on the CPU and ``"auto"`` elsewhere.
        kv_cache_bytes: The most bytes of the KV cache. The least recently used state is evicted
            first, and 0 keeps none. ``None`` means half of the free memory on CUDA, and
            elsewhere a quarter of the available memory, at most 4 GiB.
        max_batch_tokens: The most new tokens in one forward. Longer work is done in chunks, and
            other requests are answered between them.
        static: Whether a step of one new token for each context has a constant shape, which on CUDA
            is recorded as a CUDA graph. ``None`` means on CUDA only. Models for which such a step
            is wrong are served without it.
    """

    hf_opts: Mapping[str, Any] = field(
        factory=dict, converter=_mapping, validator=_is_mapping, repr=_without_token
    )
    bitsandbytes_opts: Mapping[str, Any] | None = field(default=None, validator=_is_mapping)
    compile_opts: Mapping[str, Any] | None = field(default=None, validator=_is_mapping)
    device: str | None = None
    dtype: Any = None
    kv_cache_bytes: int | None = field(default=None)
    max_batch_tokens: int = field(default=2048, validator=_positive)
    static: bool | None = field(default=None)

    @kv_cache_bytes.validator
    def _check_bytes(self, attribute: Any, value: int | None) -> None:
        integer(attribute.name, value, least=0, optional=True)

    @static.validator
    def _check_static(self, attribute: Any, value: object) -> None:
        if not (value is None or isinstance(value, bool)):
            raise InvalidOptionError(f"static must be True, False or None; got {safe_repr(value)}")

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> HFOptions:
        """Raises: InvalidOptionError: an option is unknown or has a value that is not accepted."""
        own = [attribute.name for attribute in fields(cls)]
        refuse_unknown("hf", options, own, ELSEWHERE, OTHERS)
        return cls(**options)  # type: ignore[arg-type]  # each field checks its own value
