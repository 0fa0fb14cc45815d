"""LoRA adapter folders in PEFT's format: what they hold, read before an engine sees them.

Nothing in a folder is run and no tensor is loaded: the configuration is JSON, of which known fields
are read, and the header of a safetensors file gives the names, shapes and types of the tensors.
Regular expressions of the configuration are not run: what the file holds says which modules are
adapted.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from genlm.core.errors import InvalidAdapterError
from genlm.core.logs import get_logger

if TYPE_CHECKING:
    import torch

log = get_logger()

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: The largest configuration and safetensors header that are read, in bytes.
MOST_CONFIG, MOST_HEADER = 4 << 20, 32 << 20

#: Bytes per element of the types that an adapter may have.
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

#: A key of ``rank_pattern`` or ``alpha_pattern`` that is a name, or begins with what PEFT itself
#: writes before names.
KEY = re.compile(r"(?P<start>\^|\.\*\\\.)?(?P<name>(\w|-|\\?\.)+)")

#: What PEFT puts before the name of a module.
PREFIX = "base_model.model."

MERGE = "merge it into the model's weights (merge_and_unload in PEFT)"
CONVERT = (
    "save it again with path_initial_model_for_weight_conversion (PEFT), which makes plain LoRA "
    "of it"
)


class Feature(Enum):
    """What an adapter may have beyond two matrices per module, and the scale ``lora_alpha / r``.

    The value is a description, and what to do where an engine does not apply it.
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


#: Of a configuration: what else may stand there without changing what the adapter computes.
HARMLESS = frozenset({
    "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type",
    "inference_mode", "peft_version", "r", "target_modules", "exclude_modules", "lora_alpha",
    "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config",
})  # fmt: skip

#: Fields that mean a feature where they are not empty.
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

#: Values of ``init_lora_weights`` that leave the base model as it is.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")

#: What has tied weights: of other modules, nothing is tied.
TIED_TOGETHER = {Feature.EMBEDDING, Feature.HEAD, Feature.RETRAINED, Feature.TOKENS}

#: Names of output layers, by their last part.
HEADS = ("lm_head", "embed_out", "output_layer", "unembed_tokens")


@frozen
class Tensor:
    """A tensor of a safetensors file, by its header.

    Attributes:
        shape: Its size in each dimension.
        dtype: The format's name of its type, such as ``"BF16"``.
        start: Where its bytes begin in the file.
        stop: Where they end.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


@frozen
class LoraModule:
    """What an adapter adds to one module.

    Attributes:
        rank: Of its matrices; for parameters, of all experts together.
        inputs: What A takes; the number of tokens, for an embedding.
        outputs: What B gives.
        scale: What the product is multiplied with.
        down: The name of A in the file.
        up: The name of B.
    """

    rank: int
    inputs: int
    outputs: int
    scale: float
    down: str
    up: str


@frozen
class AdapterFolder:
    """What an adapter folder holds.

    Attributes:
        path: The folder.
        config: ``adapter_config.json``.
        tensors: Every tensor of the file, by name.
        modules: What is adapted by LoRA, by the module's name in the model.
        features: What the adapter has beyond plain LoRA, each with the value that says so.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    modules: Mapping[str, LoraModule]
    features: Mapping[Feature, str]

    def require(self, applied: Collection[Feature], engine: str) -> None:
        """Refuse an adapter that an engine would apply wrongly.

        Args:
            applied: The features that the engine applies rightly.
            engine: Its name, for the message.

        Raises:
            InvalidAdapterError: the adapter has another feature.
        """
        for feature, value in self.features.items():
            if feature not in applied:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} has {value} ({feature.description}), which "
                    f"{engine} does not apply; {feature.remedy}, or use a backend that applies it "
                    "(docs/adapters.md)"
                )

    def require_modules(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse an adapter of another model.

        Args:
            shapes: How many features each module of the model takes and gives, by its name.

        Raises:
            InvalidAdapterError: a module is not there, or has another shape.
        """
        for name, module in self.modules.items():
            name = name.replace(".base_layer", "")
            if name not in shapes:
                if self.adapts_parameters(name):
                    continue
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} is made for another model: it adapts {name} "
                    f"({module.inputs} to {module.outputs} features), and this model has no such "
                    f"module ({_alike(name, shapes)}); give an adapter made for this model"
                )
            if (module.inputs, module.outputs) != shapes[name]:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.path} is made for another model: at {name} it maps "
                    f"{module.inputs} to {module.outputs} features, the model "
                    f"{' to '.join(map(str, shapes[name]))}; give an adapter made for this model"
                )

    def saved_copies(self) -> dict[str, Tensor]:
        """The tensors that PEFT saves as they are in the base model, by the parameter's name in the
        model."""
        if Feature.SAVED_EMBEDDINGS not in self.features:
            return {}
        lora = {name for module in self.modules.values() for name in (module.down, module.up)}
        return {
            name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor
            for name, tensor in self.tensors.items()
            if name.endswith(".weight")
            and name not in lora
            and not self._is_retrained(name.removeprefix(PREFIX))
        }

    def _is_retrained(self, rest: str) -> bool:
        # PEFT takes every module whose name ends so: "norm" is also "input_layernorm".
        return any(f"{saved}." in rest for saved in self.config.get("modules_to_save") or ())

    def adapts_parameters(self, module: str) -> bool:
        """Whether ``module`` holds parameters that the adapter targets themselves."""
        module = module.replace(".base_layer", "")
        parents = {
            target.rpartition(".")[0] for target in self.config.get("target_parameters") or ()
        }
        if any(parent and _is_suffix(parent, module) for parent in parents):
            return True
        # A parameter by its own name may be any module's but those that are targets themselves.
        targets = self.config.get("target_modules")
        targets = targets if isinstance(targets, list) else []
        return "" in parents and not any(
            isinstance(target, str) and _is_suffix(target, module) for target in targets
        )


def find_adapter(path: str) -> Path:
    """The local folder of an adapter; one with a hub name is fetched, without pickles.

    Raises:
        InvalidAdapterError: there is no such folder.
    """
    folder = Path(path)
    if folder.is_dir() or not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", path):
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:
        raise InvalidAdapterError(
            f"{path} is not a folder, and fetching a LoRA adapter of that name failed "
            f"({type(error).__name__}: {error}); give the folder that PEFT saved the adapter in"
        ) from error


def read_adapter(path: str | os.PathLike[str]) -> AdapterFolder:
    """Read what an adapter folder of PEFT's holds.

    Raises:
        InvalidAdapterError: the folder is missing, is not one of PEFT's, has its weights as a
            pickle, or its files contradict one another.
    """
    folder = find_adapter(os.fspath(path))
    config = read_config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapterError(
            f"LoRA adapter {folder} has peft_type={kind!r} in {CONFIG}; it must be 'LORA'; "
            f"other kinds cannot be switched by request: {MERGE}"
        )
    tensors = read_header(_weights(folder))
    if not tensors:
        raise InvalidAdapterError(f"{folder / WEIGHTS} has no tensors; save the adapter again")
    return _Reading(folder, config, tensors).result()


def read_config(folder: Path) -> dict[str, Any]:
    """An adapter folder's ``adapter_config.json``.

    Raises:
        InvalidAdapterError: it is missing, too large, or not a JSON object.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise InvalidAdapterError(
            f"{file} does not exist; give the folder that a LoRA adapter was saved in"
        )
    size = file.stat().st_size
    if size > MOST_CONFIG:
        raise InvalidAdapterError(
            f"{file} has {size} bytes; at most {MOST_CONFIG} are read; save the adapter again"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError(
            f"{file} is not JSON ({type(error).__name__}: {error!s:.100}); save the adapter again"
        ) from None
    if not isinstance(config, dict):
        raise InvalidAdapterError(f"{file} must hold a JSON object; save the adapter again")
    return config


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name, without loading them.

    Raises:
        InvalidAdapterError: it is not such a file, or its header is larger than is read.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MOST_HEADER or 8 + length > size:
            raise InvalidAdapterError(
                f"{file} is not a sound safetensors file: its header has {length} bytes, the file "
                f"{size}, and at most {MOST_HEADER} are read; save the adapter again"
            )
        text = opened.read(length)
    try:
        header = json.loads(text.decode())
        header.pop("__metadata__", None)
        return {name: _tensor(value, 8 + length, size) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidAdapterError(
            f"{file} is not a sound safetensors file ({type(error).__name__}: {error!s:.100}); "
            "save the adapter again"
        ) from None


def _tensor(value: Any, offset: int, size: int) -> Tensor:
    shape, dtype = value["shape"], value["dtype"]
    start, stop = value["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"shape {shape} at {start}:{stop}")
    if dtype in WIDTHS and stop - start != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(f"shape {shape} of {dtype} in {stop - start} bytes")
    if start > stop or offset + stop > size:
        raise ValueError(f"tensor at {start}:{stop} of a file of {size} bytes")
    return Tensor(tuple(shape), dtype, offset + start, offset + stop)


def _weights(folder: Path) -> Path:
    file = folder / WEIGHTS
    if file.is_file():
        return file
    pickles = [
        name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()
    ]
    if pickles:
        raise InvalidAdapterError(
            f"LoRA adapter {folder} has its weights in {pickles[0]}, a pickle, which can run code "
            f"when it is read; save it as {WEIGHTS} (save_pretrained in PEFT, with "
            "safe_serialization=True)"
        )
    raise InvalidAdapterError(
        f"{file} does not exist; give the folder that a LoRA adapter was saved in"
    )


class _Reading:
    """The reading of one folder."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.features: dict[Feature, str] = {}
        self.adapter = AdapterFolder(folder, config, tensors, {}, self.features)

    def result(self) -> AdapterFolder:
        self._check_types()
        self._read_settings()
        modules = self._modules()
        if not self.features.keys() & TIED_TOGETHER:
            self.features.pop(Feature.TIED, None)
        return evolve(self.adapter, modules=modules)

    def _has(self, feature: Feature, value: str) -> None:
        self.features.setdefault(feature, value)

    def _wrong(self, name: str, expected: str) -> InvalidAdapterError:
        value = _shown(self.config.get(name))
        return InvalidAdapterError(
            f"LoRA adapter {self.folder} has {name}={value} in {CONFIG}; it must be {expected}"
        )

    def _check_types(self) -> None:
        config = self.config
        if not _is_rank(config.get("r")):
            raise self._wrong("r", "an integer of at least 1")
        if not _is_scale(config.get("lora_alpha")):
            raise self._wrong("lora_alpha", "a finite number")
        for name, right, expected in (
            ("rank_pattern", _is_rank, "module names with an integer of at least 1 each"),
            ("alpha_pattern", _is_scale, "module names with a finite number each"),
        ):
            pattern = config.get(name) or {}
            if not isinstance(pattern, dict) or not all(map(right, pattern.values())):
                raise self._wrong(name, expected)
            for key in pattern:
                if not KEY.fullmatch(key):
                    raise InvalidAdapterError(
                        f"LoRA adapter {self.folder} has the regular expression {_shown(key)} in "
                        f"{name}, and regular expressions of files are not run; write the names of "
                        "the modules there"
                    )
        for name in ("modules_to_save", "target_parameters"):
            names = config.get(name) or []
            if not isinstance(names, list) or not all(
                isinstance(each, str) and re.fullmatch(r"[\w.-]+", each) for each in names
            ):
                raise self._wrong(name, "a list of module names")

    def _read_settings(self) -> None:
        for name, value in self.config.items():
            if name in FEATURES:
                if value:
                    self._has(FEATURES[name], f"{name}={_shown(value)}")
            elif name == "bias":
                if value not in (None, "none"):
                    self._has(Feature.BIAS, f"bias={_shown(value)}")
            elif name == "init_lora_weights":
                if value not in PLAIN_STARTS:
                    self._has(Feature.BASE, f"{name}={_shown(value)}")
            elif name not in HARMLESS and value not in (None, False, "", [], {}):
                self._has(Feature.OTHER, f"{name}={_shown(value)}")

    def _modules(self) -> dict[str, LoraModule]:
        """What is adapted; other tensors become features."""
        pairs: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.dtype not in WIDTHS:
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has {name} of type {_shown(tensor.dtype)}; it "
                    f"must be one of {', '.join(WIDTHS)}; save it with such weights"
                )
            if not name.startswith(PREFIX):
                raise InvalidAdapterError(
                    f"LoRA adapter {self.folder} has a tensor {_shown(name)}; names must begin "
                    f"with {PREFIX!r}, as PEFT writes them; save it by save_pretrained"
                )
            self._place(name, name.removeprefix(PREFIX), pairs)
        if not pairs:
            raise InvalidAdapterError(
                f"{self.folder / WEIGHTS} has no LoRA matrices (the first of its tensors is "
                f"{next(iter(self.tensors))}); save the adapter again"
            )
        return {module: self._module(module, pairs[module]) for module in sorted(pairs)}

    def _place(self, name: str, rest: str, pairs: dict[str, dict[str, str]]) -> None:
        if parts := re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?", rest):
            module, embedding, side = parts.groups()
            pairs.setdefault(module, {})[side] = name
            if embedding:
                self._has(Feature.EMBEDDING, name)
            if module.rpartition(".")[2] in HEADS:
                self._has(Feature.HEAD, name)
        elif rest.endswith(".lora_B.bias"):
            self._has(Feature.LORA_BIAS, name)
        elif ".lora_magnitude_vector" in rest:
            self._has(Feature.DORA, name)
        elif rest.endswith("trainable_tokens_delta"):
            self._has(Feature.TOKENS, name)
        elif self.adapter._is_retrained(rest):
            self._has(Feature.RETRAINED, name)
        elif rest.endswith(".bias"):
            self._has(Feature.BIAS, name)
        elif rest.endswith(".weight"):
            self._has(Feature.SAVED_EMBEDDINGS, name)
        else:
            self._has(Feature.OTHER, f"a tensor {name}")

    def _module(self, name: str, pair: Mapping[str, str]) -> LoraModule:
        if len(pair) < 2:
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has only one of the two matrices of {name}; "
                "save it again"
            )
        down, up = self.tensors[pair["A"]].shape, self.tensors[pair["B"]].shape
        if len(down) < 2 or len(up) < 2 or down[0] != up[1] or not down[0]:
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has matrices of shapes {list(down)} and {list(up)} "
                f"at {name}, which have no product; save it again"
            )
        rank = self._of(name, "rank_pattern", self.config["r"])
        if not self.adapter.adapts_parameters(name) and rank != down[0]:
            raise InvalidAdapterError(
                f"LoRA adapter {self.folder} has rank {down[0]} at {name}, and {rank} by {CONFIG}; "
                "save it again"
            )
        alpha = self._of(name, "alpha_pattern", self.config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return LoraModule(down[0], down[1], up[0], scale, pair["A"], pair["B"])

    def _of(self, module: str, pattern: str, default: Any) -> Any:
        """What a pattern of names says of a module: the first key that its name ends with."""
        for key, value in (self.config.get(pattern) or {}).items():
            name, whole = key_name(key)
            if module == name or (not whole and _is_suffix(name, module)):
                return value
        return default


def key_name(key: str) -> tuple[str, bool]:
    """The name that a key of a pattern stands for, and whether it is a whole one, not the end of
    one."""
    match = KEY.fullmatch(key)
    if match is None:
        raise InvalidAdapterError(f"the regular expression {_shown(key)} is not run")
    return match["name"].replace("\\.", "."), match["start"] == "^"


def _is_suffix(part: str, name: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _alike(name: str, shapes: Collection[str]) -> str:
    """What the model has in place of a module that it lacks."""
    last = name.rpartition(".")[2]
    alike = [each for each in shapes if _is_suffix(last, each)]
    return f"the last of its {len(alike)} {last} is {alike[-1]}" if alike else f"and no {last}"


def read_tensor(file: Path, tensor: Tensor) -> torch.Tensor:
    """Load one tensor of a safetensors file."""
    import torch

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
    with file.open("rb") as opened:
        opened.seek(tensor.start)
        data = bytearray(opened.read(tensor.stop - tensor.start))
    return torch.frombuffer(data, dtype=dtypes[tensor.dtype]).view(tensor.shape)


def write_plain(
    adapter: AdapterFolder, folder: Path, zeros: Mapping[str, tuple[int, int]] | None = None
) -> int:
    """Save an adapter as plain LoRA of one rank and scale 1, for engines that know no other.

    B has the scale multiplied in, in float32. Matrices of less than the largest rank are filled up
    with zeros. What else the folder held is left out: nothing of it reaches the engine.

    Args:
        adapter: The adapter.
        folder: Where to save it.
        zeros: Further modules to adapt, by nothing, and what they take and give: for engines that
            adapt several together.

    Returns:
        The rank.
    """
    import torch
    from safetensors.torch import save_file

    zeros = zeros or {}
    file = adapter.path / WEIGHTS
    rank = max((module.rank for module in adapter.modules.values()), default=1)
    tensors = {}
    for module in adapter.modules.values():
        down = read_tensor(file, adapter.tensors[module.down])
        up = read_tensor(file, adapter.tensors[module.up])
        if module.scale != 1:
            up = up.float() * module.scale
        missing = rank - module.rank
        tensors[module.down] = torch.nn.functional.pad(down, (0, 0, 0, missing)).contiguous()
        tensors[module.up] = torch.nn.functional.pad(up, (0, missing)).contiguous()
    for name, (inputs, outputs) in zeros.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.zeros(rank, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.zeros(outputs, rank)
    names = {name.rpartition(".")[2] for name in (*adapter.modules, *zeros)}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(names),
        "bias": "none",
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    return rank


def shapes_in_transformers(config: Any) -> dict[str, tuple[int, int]] | None:
    """What :func:`module_shapes` gives for the model that transformers makes of a configuration;
    made without weights.

    ``None`` where transformers has no such model of its own.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        log.warning(
            "adapter.unchecked",
            consequence="an adapter of another model may not be noticed",
            reason=f"{type(error).__name__}: {error}",
        )
        return None
    return module_shapes(model)


def module_shapes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """How many features each linear layer and embedding of a model takes and gives, by its name."""
    names = (("in_features", "out_features"), ("num_embeddings", "embedding_dim"), ("nx", "nf"))
    return {
        name: (size[0], size[1])
        for name, module in model.named_modules()
        for size in [[getattr(module, each, None) for each in pair] for pair in names]
        if isinstance(size[0], int) and isinstance(size[1], int)
    }
