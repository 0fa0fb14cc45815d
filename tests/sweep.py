"""Small models of every causal family, with every setting changed in turn: an engine computes a
configuration as transformers does, or rejects it when it loads. Cold rows are compared, on both
sides of every threshold."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from genlm.core.errors import EngineError
from genlm.kit.scaled_copy import INNER_WIDTH, MAX_WEIGHTS, WIDTH, small_config, thresholds
from genlm.kit.verify.transformers_rows import sound_attention
from tools.families import Outcome, note, recorded
from tools.tiny import write_tokenizer

#: A function that computes the row of a context from its tokens alone.
Row = Callable[[tuple[int, ...]], torch.Tensor]

#: A function that loads a folder, and returns the longest context and a function for rows.
Open = Callable[[Path], AbstractContextManager[tuple[int | None, Row]]]

#: The value of every threshold, and the lengths that are tried.
THRESHOLD = 20
LENGTHS = (5, THRESHOLD, THRESHOLD + 1, THRESHOLD + 4, 2 * THRESHOLD + 1, 4 * THRESHOLD + 1)

#: The largest difference of rows. GELU is exact in some models and approximate in others.
MAX_NATS = 2e-2

#: The spread of biases, and of the weights of norms around their initial values.
VECTOR_CHANGE = 0.2

#: The factors by which a model is narrower than the family's default. The first that can be built
#: is used.
FACTORS = (16, 32, 8, 64, 4)

#: Settings without a default in the configuration of some families, although all of their models
#: have a value.
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "stablelm": {"num_attention_heads": 8, "num_key_value_heads": 8},
}

#: Settings of the small models of families whose sizes depend on one another, or which would have
#: too many experts.
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SHARED = {**SMALL, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {
    **SHARED, "moe_intermediate_size": 128, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **SMALL, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# With few heads, scores are often equal, and chance decides which positions are seen.
BEST = {**LATENT, "index_n_heads": 32, "index_head_dim": 64, "index_topk": THRESHOLD}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
MADE: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, "global_attn_every_n_layers": 2, "num_dense_layers": 1,
              "sliding_window": THRESHOLD},
    "apertus": SHARED,
    "axk1": LATENT,
    "deepseek_v2": {**LATENT, "max_position_embeddings": 5 * THRESHOLD, "rope_parameters": {
        **YARN, "original_max_position_embeddings": THRESHOLD,
        "mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v3": LATENT,
    "deepseek_v32": BEST,
    "dots1": EXPERTS,
    "exaone_moe": {**EXPERTS, "sliding_window": THRESHOLD},
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": BEST,
    "granitemoehybrid": {
        **SHARED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 128,
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32,
        "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": THRESHOLD,
        "position_embedding_type": "rope"},
    "jamba": {
        **SMALL, "num_experts": 1, "attn_layer_offset": 1, "attn_layer_period": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 8},
    "lfm2": {**SHARED, "layer_types": ["conv", "full_attention"] * 2,
             "block_auto_adjust_ff_dim": False},
    "longcat_flash": {
        **LATENT, "expert_ffn_hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2,
        "moe_topk": 2, "zero_expert_num": 2, "head_dim": 32},
    "mamba2": {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
        "state_size": 16, "n_groups": 1, "chunk_size": THRESHOLD},
    "minicpm3": {**LATENT, "kv_lora_rank": 48},
    "nemotron_h": {
        **EXPERTS, "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
        "chunk_size": THRESHOLD, "first_k_dense_replace": 0},
    "phimoe": {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
               "lm_head_bias": True, "sliding_window": THRESHOLD},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 128},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {
        **EXPERTS, "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "solar_open": EXPERTS,
}  # fmt: skip

#: Settings that configurations of these families have on the hub, although transformers neither
#: writes nor reads them.
ON_THE_HUB: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "deepseek_v2": {"moe_layer_freq": 1},
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "glm_moe_dsa": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"block_dim": 128, "block_ff_dim": 128, "block_multiple_of": 8},
    "mamba2": {"intermediate_size": 128},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"]},
    "qwen3_next": {"full_attention_interval": 4},
    "solar_open": {"partial_rotary_factor": 1.0},
}

#: Parts of the names of settings that change no row, or that change the sizes of weights.
LEFT_ALONE = (
    "token_id", "dropout", "initializer", "label", "architectures", "dtype", "name_or", "version",
    "cache", "output_", "return_dict", "chunk_size_feed", "problem_type", "is_encoder",
    "cross_att", "vocab", "aux_loss", "jitter", "layers", "n_layer", "model_type", "_attn_imp",
    "base_model", "pad_", "max_position", "per_layer_config", "summary", "_pdrop", "init_",
    "use_kernel", "use_mamba_kernels",
    "rescale_prenorm_residual",  # transformers rescales these weights when it has loaded them
)  # fmt: skip

SCALED = {"factor": 4.0, "original_max_position_embeddings": THRESHOLD}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", **SCALED},
    {"rope_type": "yarn", **SCALED, "attention_factor": 1.5},
    {"rope_type": "yarn", **SCALED, "mscale": 1.3, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", **SCALED, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", **SCALED, "truncate": False},
    {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_theta": 500.0},
    {"partial_rotary_factor": 0.5},
]


@frozen
class Tried:
    """The outcome for one configuration: "right", "wrong", "refused" or "not built"."""

    family: str
    changed: dict[str, Any]
    outcome: str
    why: str = ""
    shortened: bool = False  # whether contexts end before the longest length that is tried


def variants(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes of a configuration, one setting at a time."""
    for name, value in settings.items():
        if any(part in name for part in LEFT_ALONE) or name == "rope_parameters":
            continue
        for other in _others(name, value):
            yield {name: other}
    if "sliding_window" in settings:
        for kinds in (["sliding"] * 2, ["full", "sliding"], ["sliding", "full"]):
            types = [f"{kind}_attention" for kind in kinds]
            yield {"sliding_window": THRESHOLD, "use_sliding_window": True, "layer_types": types}
    parameters = settings.get("rope_parameters") or {}
    nested = {kind: given for kind, given in parameters.items() if isinstance(given, dict)}
    if "rope_theta" in parameters:
        for rope in ROPES:
            yield {
                "rope_parameters": {**parameters, **rope},
                "max_position_embeddings": 5 * THRESHOLD,
            }
    for kind, given in nested.items():
        for rope in ROPES:
            changed = {**parameters, kind: {**given, **rope}}
            yield {"rope_parameters": changed, "max_position_embeddings": 5 * THRESHOLD}


def _others(name: str, value: Any) -> list[Any]:
    """Other values of a setting."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 1.5 or (3.0 if "cap" in name else 0.3)]
    if isinstance(value, str):
        return [act for act in ("silu", "gelu", "relu") if act[:4] != value[:4]] * ("act" in name)
    if isinstance(value, int):
        if "window" in name or "chunk" in name:
            return [THRESHOLD + 3]
        if WIDTH.search(name) or INNER_WIDTH.search(name) or "heads" in name:
            return []
        return [value + 1, *[value - 1] * (value > 1)]
    if value is None:
        known = {"window": THRESHOLD, "chunk": THRESHOLD, "cap": 3.0, "clip": 0.3, "act": "relu"}
        return [other for part, other in known.items() if part in name] or [2, True]
    return []


def random_model(kind: Any, settings: Any) -> Any:
    """Raises: ValueError: the model would be too large."""
    with torch.device("meta"):
        weights = sum(one.numel() for one in kind(deepcopy(settings)).parameters())
    if weights > MAX_WEIGHTS:
        raise ValueError(f"it would have {weights:,} weights")
    torch.manual_seed(0)
    model = kind(settings).float()
    saved = model.state_dict().keys()
    buffers = [
        one for name, one in model.named_buffers() if name in saved and one.is_floating_point()
    ]
    with torch.no_grad():
        for one in (*model.parameters(), *buffers):
            if one.ndim > 1:  # makes rows far from uniform
                one.normal_(0, max(one.shape[-1], 8) ** -0.5)
            else:  # biases would be zeros and norms ones, and an engine could ignore them unnoticed
                one.add_(torch.randn_like(one) * VECTOR_CHANGE)
    return model


def save_model(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_as_on_the_hub(config: Any, folder: Path) -> None:
    """Add to a saved configuration what versions before transformers 5 write, and the hub has."""
    file = folder / "config.json"
    written = json.loads(file.read_text())
    rope = written.get("rope_parameters") or {}
    older = {other: getattr(config, name, None) for other, name in config.attribute_map.items()}
    older["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    older |= {name: rope[name] for name in ("rope_theta",) if name in rope}
    older |= ON_THE_HUB.get(config.model_type, {})
    written |= {name: value for name, value in older.items() if written.get(name) is None}
    written |= {
        name: value
        for name, value in ON_THE_HUB.get(config.model_type, {}).items()
        if isinstance(value, list)
    }
    file.write_text(json.dumps(written))


def tried(
    kind: Any,
    config: Any,
    changed: Mapping[str, Any],
    folder: Path,
    load: Open,
    save: Callable[[Any, Path], Any] = save_model,
) -> Tried:
    """The outcome for a random model.

    Args:
        kind: The class of the model.
        config: The configuration of the model.
        changed: The settings that were changed.
        folder: The folder to write it into.
        load: The function by which an engine loads it.
        save: The function that writes it.
    """
    from transformers import AutoModelForCausalLM

    family = config.model_type
    try:
        settings = type(config).from_dict({**config.to_dict(), **changed})
        save(random_model(kind, settings), folder)
        if family in MADE:  # the loaders of these families require it
            write_as_on_the_hub(settings, folder)
        reference = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=sound_attention(settings), dtype=torch.float32
        ).eval()
        whole = tuple(random.Random(1).choices(range(60), k=LENGTHS[-1]))
        with torch.no_grad():
            expected = {
                length: reference(torch.tensor([whole[:length]]), use_cache=False).logits[0, -1]
                for length in LENGTHS
            }
    except Exception as error:
        return Tried(family, dict(changed), "not built", str(error)[:200])
    off = {}
    shortened = False
    try:
        with load(folder) as (longest, row_of):
            shortened = longest is not None and longest < LENGTHS[-1]
            for length in LENGTHS:
                if longest is not None and length > longest:
                    break
                row = row_of(whole[:length])[: len(expected[length])]
                distance = row - expected[length].float().log_softmax(-1)
                off[length] = round(float(distance.abs().nan_to_num(99).max()), 4)
    except EngineError as error:
        outcome = "failed" if off else "refused"
        return Tried(family, dict(changed), outcome, str(error)[:300])
    right = all(distance < MAX_NATS for distance in off.values())
    outcome, why = ("right", "") if right else ("wrong", str(off))
    return Tried(family, dict(changed), outcome, why, shortened)


@frozen(kw_only=True)
class Sweep:
    """How an engine's models are made and loaded.

    Attributes:
        load: How it loads a folder.
        save: How to write a model.
        left_open: What the configurations of some families leave open.
        made: Families whose small models are made of these settings, and not of narrowed ones.
        sizes: For an engine that has no kernels for so small models.
    """

    load: Open
    save: Callable[[Any, Path], Any] = save_model
    left_open: Mapping[str, Mapping[str, Any]] = LEFT_OPEN
    made: Mapping[str, Mapping[str, Any]] = MADE
    sizes: Mapping[str, int] = {}

    def of(
        self,
        family: str,
        folder: Path,
        changes: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = variants,
    ) -> list[Tried]:
        """The outcomes for a family's small model, and for each change of it."""
        base = Tried(family, {}, "not built")
        for at, (kind, small) in enumerate(self._small_models(family)):
            base = tried(kind, small, {}, folder / f"small{at}", self.load, self.save)
            if base.outcome in ("right", "wrong"):
                break
        if base.outcome != "right":
            return [base]
        return [
            base,
            *(
                tried(kind, small, changed, folder / f"{at}", self.load, self.save)
                for at, changed in enumerate(changes(small.to_dict()))
            ),
        ]

    def changed(self, family: str, folder: Path, change: dict[str, Any]) -> Tried:
        """The outcome for a change of a family's small model, which is not tried without it."""
        found = Tried(family, change, "not built")
        for at, (kind, small) in enumerate(self._small_models(family)):
            found = tried(kind, small, change, folder / f"{at}", self.load, self.save)
            if found.outcome != "not built":
                break
        return found

    def _small_models(self, family: str) -> Iterator[tuple[Any, Any]]:
        """The class and the configuration of a family's small model, those to be tried first
        coming first."""
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

        config = CONFIG_MAPPING[family](**self.left_open.get(family, {}))
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if not isinstance(config, kind.config_class):
            config = config.get_text_config(decoder=True)
        if family in self.made:
            yield kind, type(config)(**self.made[family])
            return
        far = {one.path: THRESHOLD for one in thresholds(config.to_dict())}
        for factor in FACTORS:
            try:
                given = small_config(config, factor, far).to_dict()
                given |= {
                    name: size
                    for name, size in self.sizes.items()
                    if isinstance(given.get(name), int)
                }
                small = type(config).from_dict(given)
            except Exception:
                continue
            yield kind, small


class EveryFamily:
    """Tests that every causal family that transformers and an engine have is computed as its
    configuration says, or refused.

    Attributes:
        backend: The name of the engine's backend.
        versions: The version of the engine, and of transformers.
        families: Their types.
        sweep: How their models are made and loaded.
        tried: How many could be tried when this was written.
        excused: Settings of families that need not be right.
    """

    backend: str
    versions: str
    families: Sequence[str]
    sweep: Sweep
    tried: int
    excused: Sequence[tuple[str, str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            metafunc.parametrize("family", self.families)

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls, pytestconfig: pytest.Config) -> Iterator[list[Tried]]:
        """The table of outcomes, printed at the end."""
        found: list[Tried] = []
        yield found
        report(found, pytestconfig)

    def test_family_has_the_outcome_of_the_record(self, family: str, tmp_path: Path) -> None:
        (found,) = self.sweep.of(family, tmp_path, lambda _: [])
        limit = "contexts end early" if found.shortened and found.outcome == "right" else ""
        outcome = Outcome(
            self.backend, family, found.outcome, limit, " ".join(found.why.split()), self.versions
        )
        note(outcome)
        before = recorded(self.backend, family)
        assert found.outcome not in ("wrong", "failed"), found
        assert before is None or before.outcome == outcome.outcome, (before, outcome)

    def test_changed_settings_are_computed_or_rejected(
        self, family: str, table: list[Tried], tmp_path: Path
    ) -> None:
        found = self.sweep.of(family, tmp_path)
        table.extend(found)
        wrong = [
            one
            for one in found
            if one.outcome in ("wrong", "failed") and (family, *one.changed) not in self.excused
        ]
        assert not wrong, wrong

    def test_most_families_were_tried(self, table: list[Tried]) -> None:
        if len({one.family for one in table}) < len(self.families):
            pytest.skip("not every family was asked for")
        assert len({one.family for one in table if one.outcome == "right"}) >= self.tried


def report(found: Sequence[Tried], pytestconfig: pytest.Config) -> None:
    """Print the models that are not right, and those that could not be built."""
    lines = [f"{len(found)} configurations: {dict(Counter(one.outcome for one in found))}"]
    lines += [
        f"{one.family:18}{one.outcome:10}{one.changed} {' '.join(one.why.split())}"
        for one in found
        if one.outcome != "right" and (one.outcome != "not built" or not one.changed)
    ]
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")
