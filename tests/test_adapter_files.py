"""Adapter folders are read without running or trusting what is in them."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from genlm.core import InvalidAdapterError
from genlm.kit import adapter_files as files
from genlm.kit.adapter_files import (
    AdapterFolder,
    Feature,
    module_shapes,
    names,
    presumed_shapes,
    read_adapter,
    write_plain,
)

PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"
TOKENS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def lora(module: str, rank: int = 2, inputs: int = 8, outputs: int = 8) -> dict[str, list[int]]:
    name = f"{PREFIX}{module}"
    return {f"{name}.lora_A.weight": [rank, inputs], f"{name}.lora_B.weight": [outputs, rank]}


Q_A, Q_B = lora(Q)  # the names of the two matrices


@pytest.fixture
def write(tmp_path):
    """Writes an adapter folder: settings beyond plain ones, and shapes by the tensor's name."""

    def folder(
        shapes: dict[str, list[int]] | None = None, dtype: str = "F32", **settings: Any
    ) -> Path:
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
        (tmp_path / files.CONFIG).write_text(json.dumps(config))
        header, data = {}, b""
        for name, shape in (lora(Q) if shapes is None else shapes).items():
            size = torch.Size(shape).numel()
            start = len(data)
            data += torch.arange(1.0, size + 1).numpy().tobytes()[: size * BYTES[dtype]]
            header[name] = {"shape": shape, "dtype": dtype, "data_offsets": [start, len(data)]}
        write_safetensors(tmp_path, json.dumps(header).encode(), data)
        return tmp_path

    return folder


def write_safetensors(folder: Path, header: bytes, data: bytes = b"") -> None:
    (folder / files.WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_plain_adapter_has_no_features(write):
    adapter = read_adapter(write(megatron_core="os.system", auto_mapping={"parent_library": "os"}))
    assert not adapter.features
    module = adapter.modules[Q]
    assert (module.rank, module.inputs, module.outputs, module.scale) == (2, 8, 8, 2.0)
    adapter.require((), "an engine that knows plain LoRA only")


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"use_rslora": True}, Feature.RSLORA),
        ({"alpha_pattern": {"q_proj": 9}}, Feature.ALPHAS),
        ({"use_dora": True}, Feature.DORA),
        ({"bias": "lora_only"}, Feature.BIAS),
        ({"lora_bias": True}, Feature.LORA_BIAS),
        ({"modules_to_save": ["norm"]}, Feature.RETRAINED),
        ({"target_parameters": ["experts.down_proj"]}, Feature.PARAMETERS),
        ({"alora_invocation_tokens": [1]}, Feature.ALORA),
        ({"layer_replication": [[0, 1]]}, Feature.REPLICATION),
        ({"init_lora_weights": "pissa_niter_4"}, Feature.BASE),
        ({"a_setting_of_the_future": {"x": 1}}, Feature.OTHER),
        # A tensor counts even if the configuration does not mention it.
        (f"{V}.lora_B.bias", Feature.LORA_BIAS),
        (f"{V}.lora_magnitude_vector", Feature.DORA),
        (f"{V}.bias", Feature.BIAS),
        ("model.embed_tokens.weight", Feature.SAVED_EMBEDDINGS),
        ("lm_head.base_layer.weight", Feature.SAVED_EMBEDDINGS),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", Feature.TOKENS),
        (f"{V}.something", Feature.OTHER),
    ],
)
def test_unsupported_feature_is_rejected_by_its_setting_or_tensor(write, settings, feature):
    if isinstance(settings, str):
        adapter = read_adapter(write({**lora(Q), f"{PREFIX}{settings}": [8]}))
        named = settings
    else:
        adapter = read_adapter(write(**settings))
        ((name, value),) = settings.items()
        named = f"{name}={json.dumps(value)}"
    assert list(adapter.features) == [feature]
    with pytest.raises(InvalidAdapterError) as refused:
        adapter.require(set(Feature) - {feature}, "the engine")
    for part in (named, "the engine does not apply", feature.remedy):
        assert part in str(refused.value)
    adapter.require({feature}, "the engine")


def test_trained_token_embeddings_become_a_feature(write):
    for indices in ([3, 5], {"embed_tokens": [3, 5]}):
        adapter = read_adapter(write({**lora(Q), TOKENS: [2, 8]}, trainable_token_indices=indices))
        assert list(adapter.features) == [Feature.TOKENS]


def test_only_modules_with_tensors_count_as_trained_whole(write):
    shapes = {**lora(Q), f"{PREFIX}model.norm.weight": [8]}
    adapter = read_adapter(write(shapes, modules_to_save=["norm", "lm_head", "m" * 512]))
    assert set(adapter.retrained) == {"norm"}
    assert not adapter.saved_copies


def test_many_names_are_looked_up_not_tried_one_by_one(write):
    modules = [f"model.layers.{i}.q_proj" for i in range(2000)]
    shapes = {name: shape for module in modules for name, shape in lora(module).items()}
    others = {f"m{i}": 1 for i in range(100_000)}
    started = time.process_time()
    adapter = read_adapter(write(shapes, alpha_pattern={**others, "layers.7.q_proj": 9}))
    assert time.process_time() - started < 10  # 400 million comparisons take minutes
    assert {module.scale for module in adapter.modules.values()} == {2.0, 4.5}


def test_the_output_layer_embeddings_and_their_tying_are_features(write):
    name = f"{PREFIX}model.embed_tokens"
    embedding = {f"{name}.lora_embedding_A": [2, 9], f"{name}.lora_embedding_B": [8, 2]}
    adapter = read_adapter(write({**lora("lm_head"), **embedding}, ensure_weight_tying=True))
    assert set(adapter.features) == {Feature.HEAD, Feature.EMBEDDING, Feature.TIED}
    module = adapter.modules["model.embed_tokens"]
    assert (module.inputs, module.outputs) == (9, 8)
    assert not read_adapter(write(ensure_weight_tying=True)).features  # nothing is tied here


def test_scales_and_ranks_follow_patterns_of_modules(write):
    adapter = read_adapter(
        write(
            {**lora(Q), **lora(V, rank=3)},
            rank_pattern={r".*\.self_attn\.v_proj": 3},
            alpha_pattern={f"^{Q}": 10, "proj": 7},
            use_rslora=True,
        )
    )
    assert adapter.modules[Q].scale == pytest.approx(10 / 2**0.5)
    # "proj" is only a part of a name, so it does not match.
    assert adapter.modules[V].scale == pytest.approx(4 / 3**0.5)


def test_features_are_converted_to_plain_lora(write, tmp_path):
    adapter = read_adapter(
        write(
            {**lora(Q, rank=1), **lora(V, rank=3)},
            r=1,
            rank_pattern={"v_proj": 3},
            use_rslora=True,
            target_modules="(.*)*Z",
        )
    )
    (tmp_path / "plain").mkdir()
    assert write_plain(adapter, tmp_path / "plain", {"model.k_proj": (8, 6)}) == 3
    plain = read_adapter(tmp_path / "plain")
    assert not plain.features
    assert plain.config["target_modules"] == ["k_proj", "q_proj", "v_proj"]
    assert plain.modules.keys() == {*adapter.modules, "model.k_proj"}
    for name, module in plain.modules.items():
        assert (module.rank, module.scale) == (3, 1)
        if name in adapter.modules:
            torch.testing.assert_close(product(plain, name), product(adapter, name))
        else:
            assert product(plain, name).shape == (6, 8)
            assert not product(plain, name).any()


def test_a_scale_beyond_the_range_of_numbers_is_not_written(write, tmp_path):
    folder = write(lora_alpha=2**30)
    tensors = {name: torch.full(shape, 1e30) for name, shape in lora(Q).items()}
    save_file(tensors, folder / files.WEIGHTS)
    with pytest.raises(
        InvalidAdapterError, match=r"its scale of 5.36871e\+08 takes beyond float32"
    ):
        write_plain(read_adapter(folder), tmp_path)


def product(adapter: AdapterFolder, name: str) -> torch.Tensor:
    file, module = adapter.path / files.WEIGHTS, adapter.modules[name]
    up = files.read_tensor(file, adapter.tensors[module.up])
    return module.scale * up @ files.read_tensor(file, adapter.tensors[module.down])


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Q, 16, r"q_proj it maps 16 to 8 features.*model 8 to 8"),
        (
            "model.layers.7.self_attn.q_proj",
            8,
            r"layers\.7.*\(8 to 8 features\).*1 q_proj is model.layers.0",
        ),
        (f"{PREFIX}{Q}", 8, "no such module"),
    ],
)
def test_an_adapter_of_another_model_names_both_shapes(write, module, inputs, message):
    adapter = read_adapter(write(lora(module, inputs=inputs)))
    with pytest.raises(InvalidAdapterError, match=message):
        adapter.require_modules({Q: (8, 8)})


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("experts.down_proj", "model.layers.0.experts"),
        ("experts.down_proj", "model.layers.0.experts.base_layer"),
        ("down_proj", "model.layers.0.experts"),
    ],
)
def test_rank_of_adapted_parameters_counts_all_experts(write, target, module):
    folder = write(lora(module, rank=16), target_parameters=[target], target_modules=["q_proj"])
    assert read_adapter(folder).modules[module].rank == 16


def test_module_shapes_lists_linear_layers_and_embeddings():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(3, 4), "b": torch.nn.Embedding(5, 6), "c": torch.nn.ReLU()}
    )
    assert module_shapes(model) == {"a": (3, 4), "b": (5, 6)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"r": "8"}, 'r="8" in adapter_config.json; it must be an integer'),
        ({"r": True}, "r=true"),
        ({"lora_alpha": float("nan")}, "lora_alpha=NaN"),
        ({"r": 7}, "rank 2 at .*q_proj, and 7 by"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern="),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern="),
        ({"alpha_pattern": {"(.*)*(.*)*Z": 2}}, "regular expression .* are not run"),
        ({"modules_to_save": "(.*)*Z"}, "a list of at most 256 module names"),
        ({"target_parameters": ["(a*)*b"]}, "a list of at most 256 module names"),
        ({"modules_to_save": [f"m{i}" for i in range(257)]}, "at most 256 module names"),
        ({"target_parameters": ["m" * 513]}, "at most 512 characters"),
        ({"alpha_pattern": {"m" * 513: 1}}, "at most 512 characters"),
        ({"r": 2_000_000}, "r=2000000 .*from 1 to 8192"),
        ({"lora_alpha": 10**400}, r"lora_alpha=10+\.\.\. in .*a finite number"),
        ({"lora_alpha": -1e300}, "a finite number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "a finite number"),
        ({"trainable_token_indices": list(range(1000))}, "1000 indices .* no rows"),
        ({"trainable_token_indices": {"embed_tokens": ["0"]}}, "token ids, or lists of them"),
        ({"trainable_token_indices": [1, -5]}, "token ids, or lists of them"),
        ({"trainable_token_indices": {f"m{i}": [1] for i in range(257)}}, "at most 256 modules"),
        # Tensors that do not fit together:
        ({"shapes": {}}, "has no tensors"),
        ({"shapes": {Q_A: [2, 8]}}, "only one of the two matrices"),
        ({"shapes": {name[17:]: [2, 2] for name in lora(Q)}}, "must begin with 'base_model"),
        ({"shapes": {f"{PREFIX}lm_head.weight": [8, 8]}}, "has no LoRA matrices"),
        ({"shapes": lora(Q, rank=0)}, r"shapes \[0, 8\] and \[8, 0\]"),
        ({"shapes": lora(Q) | {Q_B: [8, 3]}}, r"shapes \[2, 8\] and \[8, 3\]"),
        ({"shapes": lora(Q) | {Q_A: [2]}}, r"shapes \[2\] and \[8, 2\]"),
        ({"shapes": lora(Q) | {Q_B: [2]}}, r"shapes \[2, 8\] and \[2\]"),
        (
            {"shapes": {**lora(Q), TOKENS: [2, 8]}, "trainable_token_indices": [3]},
            "1 indices .* other rows",
        ),
        (
            {"shapes": lora(Q, rank=16), "target_parameters": ["experts.down_proj"]},
            "rank 16 at .*q_proj, and 2 by",
        ),
        (
            {"shapes": lora(Q, rank=16), "target_parameters": ["down_proj"]}
            | {"target_modules": ["q_proj"]},  # the module is a target itself
            "rank 16 at .*q_proj, and 2 by",
        ),
    ],
)
def test_invalid_configuration_or_tensors_are_rejected(write, settings, message):
    with pytest.raises(InvalidAdapterError, match=message):
        read_adapter(write(**settings))


def test_expressions_of_the_configuration_end(write, monkeypatch):
    """The file has the matrices of every layer, so the modules that the expressions name do not
    matter."""
    monkeypatch.setattr(names, "EXPRESSION_SECONDS", 0.1)
    started = time.process_time()
    endless = "(.|.)*(.|.)*(.|.)*(.|.)*[YZ]"
    adapter = read_adapter(write(target_modules=endless, exclude_modules=endless))
    adapter.require_modules({Q: (8, 8), **{f"model.layers.{at}.mlp": (8, 8) for at in range(99)}})
    assert time.process_time() - started < 5


def header(**changes: Any) -> bytes:
    tensor = {"shape": [2, 2], "dtype": "F32", "data_offsets": [0, 16], **changes}
    return json.dumps({f"{PREFIX}q.lora_A.weight": tensor}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "sound safetensors"),
        (b"\x80\x04pickle", "sound safetensors"),
        (b"[" * 100_000, "sound safetensors"),
        (header(shape=[2, 3]), "sound safetensors"),
        (header(data_offsets=[0, 1 << 60]), "sound safetensors"),
        # Computing their product would take 5 s and more.
        (header(shape=[10**4000] * 249), "sound safetensors"),
        (header(shape=[1 << 62] * 50_000), "sound safetensors"),
        (header(shape=[16], dtype="I8"), 'of type "I8"'),
        (header(shape=[1] * 9 + [4]), "has 10 dimensions"),
        (header().replace(b"q.lora", b"q" * 600 + b".lora"), "characters"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_invalid_file_is_rejected(write, content, message):
    folder = write()
    write_safetensors(folder, content, bytes(16))
    started = time.process_time()
    with pytest.raises(InvalidAdapterError, match=message):
        read_adapter(folder)
    assert time.process_time() - started < 2


def test_files_beyond_their_size_limits_are_not_read(write):
    folder = write()
    for length in (1 << 62, files.MAX_HEADER_BYTES + 1):
        with (folder / files.WEIGHTS).open("r+b") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(2 * files.MAX_HEADER_BYTES)  # makes a hole, which takes no room on disk
        with pytest.raises(InvalidAdapterError, match=f"its header has {length} bytes"):
            read_adapter(folder)
    with (folder / files.CONFIG).open("r+b") as file:
        file.truncate(files.MAX_CONFIG_BYTES + 1)
    with pytest.raises(InvalidAdapterError, match=f"at most {files.MAX_CONFIG_BYTES} are read"):
        read_adapter(folder)
    (folder / files.CONFIG).write_text("[" * 100_000)
    with pytest.raises(InvalidAdapterError, match="is not JSON"):
        read_adapter(folder)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_is_never_opened(write, name):
    folder = write()
    (folder / files.WEIGHTS).unlink()
    os.mkfifo(folder / name)  # opening it would wait for ever
    with pytest.raises(InvalidAdapterError, match=f"{name}, a pickle, which can run code"):
        read_adapter(folder)


def test_path_that_is_no_folder_is_rejected(write):
    with pytest.raises(InvalidAdapterError, match=r"nowhere/adapter_config\.json does not exist"):
        read_adapter("/nowhere")
    with pytest.raises(InvalidAdapterError, match="is one file of a LoRA adapter; give its folder"):
        read_adapter(write() / files.WEIGHTS)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300])
def test_infinite_and_nan_weights_are_rejected(write, number):
    """Some rows would be NaN; others are finite, because attention hides NaN, and mean nothing.
    Nothing computes in float64."""
    folder = write()
    tensors = {name: torch.ones(shape, dtype=torch.float64) for name, shape in lora(Q).items()}
    name = next(iter(tensors))
    tensors[name][-1, -1] = number
    save_file(tensors, folder / files.WEIGHTS)
    with pytest.raises(InvalidAdapterError, match=f"NaN or infinite numbers in {name}"):
        read_adapter(folder)


OTHER = "model.layers.1.self_attn.q_proj"


def refused_if(lacks: bool, message: str) -> AbstractContextManager[object]:
    return pytest.raises(InvalidAdapterError, match=message) if lacks else nullcontext()


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["self_attn.q_proj"], "layers_pattern": "layers"}, True),
        ({"target_modules": [Q]}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}, True),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": ".*1.*"}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": ".*2.*"}, True),
        ({"target_modules": r".*\.q_proj"}, True),
        ({"target_modules": r"model\.layers\.\d\.self_attn\.(q|v)_proj"}, True),
        ({"target_modules": r"^(?!.*\.1\.).*\.q_proj"}, False),
        ({"target_modules": "q_proj"}, False),  # only whole names match
        ({"target_modules": ".*[01].*", "exclude_modules": ["q_proj", "my_q_proj"]}, False),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"}, False),
        ({"target_modules": "(.|.)*(.|.)*(.|.)*(.|.)*[YZ]"}, True),  # matching this takes for ever
        ({"target_modules": "(" * 9000}, True),
        ({"target_modules": ["q_proj"], "exclude_modules": "(.|.)*(.|.)*(.|.)*[YZ]"}, True),
    ],
)
def test_file_without_a_targeted_layer_is_rejected(write, settings, lacks, monkeypatch):
    monkeypatch.setattr(names, "EXPRESSION_SECONDS", 0.1)
    adapter = read_adapter(write(**settings))
    model = {Q: (8, 8), OTHER: (8, 8), "model.layers.0.self_attn.my_q_proj": (8, 8)}
    with refused_if(lacks, f"lacks the matrices of {OTHER}.*layers_to_transform"):
        adapter.require_modules(model)


@pytest.mark.parametrize(
    ("adapted", "lacks"),
    [
        ([Q, V], True),
        ([Q, OTHER], True),
        ([f"model.layers.{at}.self_attn.q_proj" for at in range(4)], False),
        ([OTHER], False),  # the other names may be of another kind
        ([Q, "model.vision.layers.0.q_proj"], False),  # a vision model may have another depth
        (["model.lm_head"], False),
    ],
)
def test_adapter_is_checked_against_the_depth_alone(write, adapted, lacks):
    shapes = {at: size for name in adapted for at, size in lora(name).items()}
    adapter = read_adapter(write(shapes, target_modules=r".*_proj"))
    missing = "model.layers.2" if OTHER in adapted else "model.layers.1"
    config = SimpleNamespace(num_hidden_layers=4)
    for each in (config, SimpleNamespace(text_config=config)):
        with refused_if(lacks, f"lacks the matrices of {missing}"):
            adapter.require_modules(presumed_shapes(adapter, each))
