"""The features that an adapter may have beyond plain LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

MERGE = "merge it into the model's weights (merge_and_unload in PEFT)"
CONVERT = (
    "save it again with path_initial_model_for_weight_conversion (PEFT), which makes plain LoRA "
    "of it"
)


class Feature(Enum):
    """A feature of an adapter beyond two matrices per module and the scale ``lora_alpha / r``.

    The value of a feature describes it, and says what to do if an engine does not apply it.
    """

    RSLORA = "rank-stabilised scaling", MERGE
    RANKS = "ranks that differ by module", MERGE
    ALPHAS = "scales that differ by module", MERGE
    DORA = "DoRA", MERGE
    BIAS = "biases of the base model that were trained too", MERGE
    LORA_BIAS = "a bias in the LoRA matrices", MERGE
    EMBEDDING = "LoRA on an embedding", MERGE
    HEAD = "LoRA on the output layer", MERGE
    RETRAINED = "modules that were trained whole", MERGE
    SAVED_EMBEDDINGS = (
        "a copy of the base model's embeddings",
        "save it again with save_embedding_layers=False (PEFT), or " + MERGE,
    )
    TOKENS = "single token embeddings that were trained", MERGE
    PARAMETERS = "LoRA on parameters, such as those of experts", MERGE
    TIED = "tied weights that were trained together", MERGE
    ALORA = "activation by a token sequence (aLoRA)", "run it with PEFT itself"
    REPLICATION = "repeated layers", MERGE
    BASE = "an initialisation that changes the base model's weights", CONVERT
    OTHER = "a setting that is not known here", MERGE

    @property
    def description(self) -> str:
        return self.value[0]

    @property
    def remedy(self) -> str:
        return self.value[1]


#: Fields of a configuration that do not change what the adapter computes.
HARMLESS = frozenset({
    "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type",
    "inference_mode", "peft_version", "r", "target_modules", "exclude_modules", "lora_alpha",
    "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config",
})  # fmt: skip

#: Fields that mean a feature if they are not empty.
FEATURES: Mapping[str, Feature] = {
    "use_rslora": Feature.RSLORA,
    "rank_pattern": Feature.RANKS,
    "alpha_pattern": Feature.ALPHAS,
    "use_dora": Feature.DORA,
    "lora_bias": Feature.LORA_BIAS,
    "modules_to_save": Feature.RETRAINED,
    "trainable_token_indices": Feature.TOKENS,
    "target_parameters": Feature.PARAMETERS,
    "ensure_weight_tying": Feature.TIED,
    "alora_invocation_tokens": Feature.ALORA,
    "layer_replication": Feature.REPLICATION,
}

#: Values of ``init_lora_weights`` that leave the base model unchanged.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")

#: The features that concern tied weights. Without any of them, tying changes nothing.
TIED_TOGETHER = {Feature.EMBEDDING, Feature.HEAD, Feature.RETRAINED, Feature.TOKENS}

#: The last parts of the names of output layers.
HEADS = ("lm_head", "embed_out", "output_layer", "unembed_tokens")
