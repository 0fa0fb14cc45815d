"""GGUF files: settings and tensors that transformers ignores are applied, or rejected by name.

transformers takes the settings and tensors that its tables name, and silently drops the others,
such as rotary scaling. The model would then be another one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from genlm.core.checks import safe_repr
from genlm.core.errors import EngineError
from genlm.core.logs import get_logger

logger = get_logger()

#: For each GGUF key, the attribute of a configuration that has the same meaning. Of several, the
#: first that the configuration has.
SETTINGS = {
    "attention.key_length": ("head_dim",),
    "attention.key_length_swa": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "final_logit_softcapping": ("final_logit_softcapping",),
}

#: Keys without influence on the rows of a causal model, or whose content follows from the tensors.
NEUTRAL = (
    "attention.causal", "attention.value_length", "attention.value_length_swa", "context_length",
    "expert_gating_func", "pooling_type", "rope.dimension_count_swa", "rope.scaling.finetuned",
    "tensor_data_layout", "use_parallel_residual", "vocab_size",
)  # fmt: skip

#: Tensors that hold the unscaled frequencies, or that belong to settings of the configuration.
NEUTRAL_TENSORS = ("attn_rot_embd.weight",)

#: For each attribute that switches biases on, a part of the names of these biases' tensors.
BIASES = {"attention_bias": "attn_", "mlp_bias": "ffn_"}

#: Architectures whose keys transformers reads completely; their files are not changed here.
UNCHANGED_ARCHITECTURES = ("gpt-oss", "lfm2", "qwen35", "qwen35moe", "t5", "t5encoder")

#: The architectures in which llama.cpp scales queries by the head size, except in the model with so
#: many layers, in which it scales them by the width for each head.
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}

#: The names of the tensors with the long and the short factors of Phi 3.
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FREQUENCIES = "rope_freqs.weight"

#: llama.cpp's names of GPT-2's pattern, by which transformers splits texts if it does not know a
#: name. ``default`` says that the file's author did not know the pattern.
GPT2_PATTERNS = (
    "default", "gpt-2", "granite-docling", "jais", "modern-bert", "mpt", "olmo", "phi-2",
    "trillion",
)  # fmt: skip

#: The remedy in error messages.
REMEDY = "load the model's own folder (config.json and safetensors)"


class GGUFFile:
    """A GGUF file of a causal language model.

    Args:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        from gguf import GGUFReader
        from transformers.modeling_gguf_pytorch_utils import read_field

        self._path = path
        reader = GGUFReader(path)
        (self.architecture,) = read_field(reader, "general.architecture")
        start = f"{self.architecture}."
        self._settings: dict[str, Any] = {}
        for key in reader.fields:
            if key.startswith(start):
                values = read_field(reader, key)
                self._settings[key.removeprefix(start)] = values[0] if len(values) == 1 else values
        named = [read_field(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        (self._tokenizer, self._pattern) = (next(iter(values), None) for values in named)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        # Factors for the rotary embedding of the loaded model, if no setting can express them.
        self._factors: torch.Tensor | None = None

    def warn_of_pattern(self) -> None:
        """Log the file's pattern for splitting texts, if transformers splits by another one."""
        known: Mapping[str, str] = {}
        with contextlib.suppress(ImportError):  # another version may have it elsewhere
            from transformers.integrations.gguf import gguf_tokenizer_mapping

            known = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
        if self._tokenizer == "gpt2" and self._pattern not in (None, *GPT2_PATTERNS, *known):
            logger.warning(
                "tokenizer.pattern_unknown",
                file=str(self._path),
                pattern=self._pattern,
                why="transformers splits texts by GPT-2's pattern instead; give the model's own "
                "tokenizer: hf_opts={'tokenizer': folder}",
            )

    def complete(self, config: Any) -> None:
        """Complete a configuration with the file's settings.

        Args:
            config: The configuration that transformers has made from the file, changed in place.

        Raises:
            EngineError: the file has keys or tensors that neither transformers nor this class can
                apply.
        """
        if self.architecture in UNCHANGED_ARCHITECTURES:
            return
        self._set_rope(config)
        self._set_scale(config)
        lost = [f"{key}={safe_repr(value)}" for key, value in self._lost_settings(config)]
        lost += self._lost_tensors(config)
        if lost:
            more = f" and {len(lost) - 6} more" if len(lost) > 6 else ""
            raise EngineError(
                f"transformers would ignore these entries of {self._path}: {', '.join(lost[:6])}"
                f"{more}; {REMEDY}, or give the whole configuration in "
                "hf_opts={'config': AutoConfig.from_pretrained(...)}"
            )

    def correct(self, model: Any) -> None:
        """Apply to the loaded model what its configuration cannot express.

        Raises:
            EngineError: the model has no place for it.
        """
        if self._factors is None:
            return
        found = [one for one in model.modules() if hasattr(one, "inv_freq")]
        if not found or any(one.inv_freq.shape != self._factors.shape for one in found):
            raise EngineError(
                f"{self._path} has {FREQUENCIES}, which {type(model).__name__} cannot apply; "
                f"{REMEDY}"
            )
        for rotary in found:
            for name in ("inv_freq", "original_inv_freq"):
                if (frequencies := getattr(rotary, name, None)) is not None:
                    setattr(rotary, name, frequencies / self._factors.to(frequencies.device))

    def _set_scale(self, config: Any) -> None:
        """Set the number by whose root queries are divided, which files do not contain."""
        if (layers := SCALED_BY_WIDTH.get(self.architecture)) is None:
            return
        by_width = config.num_hidden_layers == layers
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if by_width else config.head_dim
        )

    # --- rotary embeddings ------------------------------------------------------------------------

    def _set_rope(self, config: Any) -> None:
        kinds = _kinds(config)
        if not kinds:
            return
        whole = kinds.get("full_attention", kinds.get(""))
        if whole is None:
            return
        if (theta := self._settings.get("rope.freq_base")) is not None:
            whole["rope_theta"] = float(theta)
        local = kinds.get("sliding_attention")
        if local is not None and (theta := self._settings.get("rope.freq_base_swa")) is not None:
            local["rope_theta"] = float(theta)
        width = self._settings.get("rope.dimension_count")
        size = _head_size(config)
        if width and "partial_rotary_factor" in whole:
            whole["partial_rotary_factor"] = width / size
        whole.update(self._scaling(config, whole))
        config.rope_parameters = kinds.get("", kinds)

    def _scaling(self, config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that scale the rotary embedding, under transformers' names."""
        said = self._scaling_keys()
        factor, original = said.get("factor"), said.get("original_context_length")
        if LONG_FACTORS in self._tensors:
            original = original or config.original_max_position_embeddings
            config.original_max_position_embeddings = original
            found: dict[str, Any] = {
                "rope_type": "longrope",
                "long_factor": self._read(LONG_FACTORS).tolist(),
                "short_factor": self._read(SHORT_FACTORS).tolist(),
                "original_max_position_embeddings": original,
            }
            if "attn_factor" in said:
                found["attention_factor"] = said["attn_factor"]
            return found
        if FREQUENCIES in self._tensors and config.model_type != "gemma4_text":
            return self._llama3(self._read(FREQUENCIES), rope, config)
        kind = said.get("type", "linear")
        if kind == "none" or not factor or factor == 1.0:
            return {}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            attention = said.get("attn_factor", 1.0) * (1.0 + 0.1 * math.log(factor))
            found = {"rope_type": "yarn", "factor": factor, "attention_factor": attention}
            names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
            found |= {ours: said[theirs] for theirs, ours in names.items() if theirs in said}
            original = original or round(config.max_position_embeddings / factor)
            return {**found, "original_max_position_embeddings": original}
        raise EngineError(f"{self._path} has rotary scaling of type {kind!r}; {REMEDY}")

    def _scaling_keys(self) -> dict[str, Any]:
        start = "rope.scaling."
        return {
            key.removeprefix(start): value
            for key, value in self._settings.items()
            if key.startswith(start)
        }

    def _llama3(
        self, factors: torch.Tensor, rope: Mapping[str, Any], config: Any
    ) -> dict[str, Any]:
        """The settings with which Llama 3.1 and later divide frequencies by these factors. If no
        settings give these factors, the frequencies of the loaded model are divided instead."""
        if bool((factors == 1.0).all()):
            return {}
        pairs = torch.arange(len(factors), dtype=torch.float64) / len(factors)
        lengths = 2 * math.pi * rope["rope_theta"] ** pairs
        factor = float(factors.max())
        for original in (1 << power for power in range(4, 24)):
            smooth = ((original / lengths - 1.0) / 3.0).clamp(0.0, 1.0)
            scaled = 1.0 / ((1.0 - smooth) / factor + smooth)
            if torch.allclose(scaled, factors.double(), rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
        self._factors = factors
        return {}

    def _read(self, tensor: str) -> torch.Tensor:
        from gguf import dequantize

        held = self._tensors[tensor]
        return torch.from_numpy(dequantize(held.data, held.tensor_type).copy()).flatten().float()

    # --- what transformers would lose
    # --------------------------------------------------------------

    def _lost_settings(self, config: Any) -> Iterator[tuple[str, Any]]:
        """Set the attributes of the configuration that correspond to keys; yield the keys without
        an attribute."""
        for key, value in self._settings.items():
            if key in NEUTRAL or key in self._taken(config) or value in (None, False, 0, 0.0):
                continue
            known = next((name for name in SETTINGS.get(key, ()) if hasattr(config, name)), None)
            if known is not None:
                setattr(config, known, type(value)(value))
            elif key == "attention.key_length" and value == _head_size(config):
                continue
            elif key == "attention.sliding_window_pattern" and hasattr(config, "layer_types"):
                config.layer_types = _layer_types(value, config.num_hidden_layers)
            else:
                yield key, value

    def _taken(self, config: Any) -> set[str]:
        """The keys that transformers reads, and the keys of the rotary embedding, which this class
        reads."""
        from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

        known = GGUF_TO_TRANSFORMERS_MAPPING["config"]
        names = (self.architecture, config.model_type, config.model_type.removesuffix("_text"))
        taken = {key for name in names for key, ours in known.get(name, {}).items() if ours}
        if getattr(config, "rope_parameters", None):
            taken |= {"rope.freq_base", "rope.freq_base_swa"}
            scaling = ("type", "factor", "original_context_length", "attn_factor")
            taken |= {f"rope.scaling.{name}" for name in scaling}
            taken |= {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
            kinds = _kinds(config)
            partial = next(iter(kinds.values())).get("partial_rotary_factor", 1.0)
            if self._settings.get("rope.dimension_count") == round(partial * _head_size(config)):
                taken.add("rope.dimension_count")
        return taken

    def _lost_tensors(self, config: Any) -> list[str]:
        """Switch on the biases that the file has; return the tensors for which the model has no
        place."""
        lost = self._unmapped(config)
        for switch, part in BIASES.items():
            asked = any(part in name and name.endswith(".bias") for name in lost)
            if asked and getattr(config, switch, None) is False:
                setattr(config, switch, True)
                lost = self._unmapped(config)
        return lost

    def _unmapped(self, config: Any) -> list[str]:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config.to_dict())
        known = set(get_gguf_hf_weights_map(model, processor))
        known |= {
            LONG_FACTORS,
            SHORT_FACTORS,
            FREQUENCIES,
            "output.weight",
        }  # `GGUFFile` handles these itself
        return [
            name
            for name in self._tensors
            if name not in known and not name.endswith(NEUTRAL_TENSORS)
        ]


def _kinds(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary settings of each type of layer, copied; under ``""`` if all have the same."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {kind: dict(given) for kind, given in parameters.items() if isinstance(given, dict)}
    return nested or ({"": dict(parameters)} if parameters else {})


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _layer_types(pattern: int | Sequence[bool], layers: int) -> list[str]:
    """The type of each layer. The pattern is a flag for each layer, or an integer ``n``: then all
    layers but each ``n``-th have a window."""
    if isinstance(pattern, int):
        flags = [bool((layer + 1) % pattern) for layer in range(layers)]
    else:
        flags = [*map(bool, pattern)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]
