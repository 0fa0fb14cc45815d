"""The process that computes rows with transformers: :mod:`genlm.kit.verify.reference` starts it.

It is a process of its own, because engines change transformers' classes: a model of a class that
vLLM has run cannot be made beside it. It reads pickled questions from its standard input, and
writes pickled answers to its standard output, until the input ends.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from genlm.core.checks import describe_error
from genlm.kit.checkpoints import without_adapter
from genlm.kit.scaled_copy import FACTORS, small_model, thresholds
from genlm.kit.settings import misread, require_one_rotary
from genlm.kit.verify import contexts, guilty
from genlm.kit.verify.contexts import Chosen, Group

#: The names of rotary settings, and of those among them that are no scaling.
ROTARY = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
BASES = ("rope_theta", "partial_rotary_factor")

#: The most bytes of weights that are held in memory. The weights of larger models are read from
#: disk layer by layer.
MAX_BYTES_IN_MEMORY = 2 << 30

#: The first version of accelerate that leaves all weights of a model on disk.
MIN_ACCELERATE_VERSION = "1.15"

#: The value of a scaled copy's thresholds, in tokens. Some engines count in blocks of this size.
COPY_THRESHOLD_TOKENS = 16

#: The smallest head size for which engines have kernels.
MIN_HEAD_SIZE = 32

#: Files that a scaled copy replaces or does not need.
OF_THE_WEIGHTS = (
    "*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.index.json", "config.json",
    "generation_config.json",
)  # fmt: skip


@frozen
class Source:
    """A model for transformers to load.

    Attributes:
        folder: The model's folder.
        changes: Settings that replace those of its ``config.json``.
        size: How many bytes its weights have.
        scratch: A folder to write into.
        adapter: The folder of a LoRA adapter, for PEFT.
        dtype: The type in which it computes.
    """

    folder: str
    changes: Mapping[str, Any]
    size: int
    scratch: str
    adapter: str | None = None
    dtype: str = "float32"


@frozen
class Choose:
    """The question for the contexts to compare, and their rows."""

    source: Source
    longest: int


@frozen
class Compute:
    """The question for the rows of contexts: an array ``[contexts, vocabulary]`` for each group."""

    source: Source
    groups: tuple[Group, ...]


@frozen
class Explain:
    """The question for the setting that explains the rows of an engine."""

    source: Source
    contexts: tuple[tuple[int, ...], ...]
    rows: np.ndarray
    allowed: float


@frozen
class Scale:
    """The question for a scaled copy of the model, to be written to a folder."""

    source: Source
    folder: str


@frozen
class Scaled:
    """A small random model of the same class, whose thresholds are a few tokens away.

    Attributes:
        source: The copy, with the changes of the options.
        thresholds: The model's own thresholds by their names.
    """

    source: Source
    thresholds: Mapping[str, int]


@frozen
class Unknown:
    """The answer if transformers cannot compute rows."""

    why: str


@frozen
class Answer:
    """The rows of groups of contexts.

    Attributes:
        chosen: The contexts.
        rows: For each group float32 log-probabilities ``[contexts, vocabulary]``.
        dtype: The type of the checkpoint's weights.
    """

    chosen: Chosen
    rows: tuple[np.ndarray, ...]
    dtype: str


class CannotCompute(Exception):
    """transformers cannot compute the model. The message says why."""


def main() -> None:
    """Answer until the input ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not get among the answers
    while True:
        try:
            question = pickle.load(questions)
        except EOFError:
            return
        try:
            answer: object = answer_to(question)
        except CannotCompute as error:
            answer = Unknown(str(error))
        except Exception as error:  # a model's code may raise any exception
            answer = Unknown(f"transformers fails on it ({describe_error(error):.300})")
        pickle.dump(answer, answers)
        answers.flush()


def answer_to(question: object) -> object:
    """Raises: CannotCompute, or whatever transformers raises."""
    if isinstance(question, Choose):
        config = configuration(question.source)
        limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = min(question.longest, limit or question.longest)
        chosen = contexts.choose(config, longest, Path(question.source.folder))
        found = rows_of(question.source, chosen.groups)
        return Answer(chosen, found, str(config.dtype or "float32").removeprefix("torch."))
    if isinstance(question, Compute):
        return rows_of(question.source, question.groups)
    if isinstance(question, Explain):
        return explanation(question)
    if isinstance(question, Scale):
        return scaled(question)
    raise TypeError(f"no such question: {question!r}")


def rows_of(source: Source, groups: Sequence[Group]) -> tuple[np.ndarray, ...]:
    """Raises: CannotCompute: a row is not finite."""
    model = load(source)
    found = []
    for group in groups:
        with torch.inference_mode():
            rows = [
                model(input_ids=torch.tensor([each]), use_cache=False).logits[0, -1].float()
                for each in group.contexts
            ]
        found.append(torch.stack(rows).log_softmax(-1).numpy())
        if np.isnan(found[-1]).any():
            raise CannotCompute(f"transformers' own rows of {group.about} are NaN")
    return tuple(found)


def explanation(question: Explain) -> str | None:
    """The setting with whose default transformers computes these rows."""
    config = configuration(question.source)
    for name, changes in guilty.defaults(config):
        source = evolve(question.source, changes={**question.source.changes, **changes})
        try:
            (rows,) = rows_of(source, [Group(name, question.contexts)])
        except Exception:  # for example, because a weight has another shape
            continue
        if guilty.apart(question.rows, rows) <= question.allowed:
            return name
    return None


def scaled(question: Scale) -> Scaled | None:
    """The scaled copy, with the tokenizer of the model; ``None`` if it has no thresholds.

    Raises:
        CannotCompute: none can be made.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    source, folder = question.source, Path(question.folder)
    found = thresholds(configuration(source).to_dict())
    if not found:
        return None
    config = configuration(evolve(source, changes={}))
    known = type(config) in AutoModelForCausalLM._model_mapping
    kind = AutoModelForCausalLM if known else AutoModelForMultimodalLM
    near = {one.path: COPY_THRESHOLD_TOKENS for one in thresholds(config.to_dict())}
    try:
        model = small_model(kind.from_config, config, torch.device("cpu"), near, _factors(config))
    except ValueError as error:
        raise CannotCompute(f"no scaled copy of it can be made ({error})") from error
    model.to(config.dtype or torch.float32).save_pretrained(folder)
    for file in Path(source.folder).iterdir():
        if file.is_file() and not any(map(file.match, OF_THE_WEIGHTS)):
            (folder / file.name).symlink_to(file.resolve())
    values = {".".join(one.path): one.value for one in found}
    copied = Source(
        str(folder), nearer(source.changes, values), 0, source.scratch, dtype=source.dtype
    )
    return Scaled(copied, values)


def nearer(options: Any, values: Mapping[str, int]) -> Any:
    """Options in which thresholds of these names and values are where the scaled copy has them;
    mappings may be written as JSON."""
    known = {(name.rpartition(".")[2], value) for name, value in values.items()}

    def changed(name: Any, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {each: changed(each, inner) for each, inner in value.items()}
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                return json.dumps(changed(name, json.loads(value)))
            except ValueError:
                return value
        return COPY_THRESHOLD_TOKENS if type(value) is int and (name, value) in known else value

    return changed(None, options)


def _factors(config: Any) -> Sequence[int]:
    """How much narrower a copy may be for which engines have kernels."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", MIN_HEAD_SIZE) // heads
    return [factor for factor in FACTORS if size // factor >= MIN_HEAD_SIZE] or [1]


def configuration(source: Source) -> Any:
    """The configuration with the changes of the options.

    Raises:
        CannotCompute: transformers does not know the family, or would run code of the model's.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    settings, _ = PretrainedConfig.get_config_dict(source.folder)
    family = settings.get("model_type")
    if family not in CONFIG_MAPPING:
        raise CannotCompute(
            f"transformers has no family {family!r}"
            + (", and code of the folder's own is not run" if "auto_map" in settings else "")
        )
    if settings.get("quantization_config") or settings.get("quantization"):
        raise CannotCompute("its weights are quantised, and engines round them in their own ways")
    if source.changes:
        merged = _merged(settings, source.changes)
        config = CONFIG_MAPPING[merged["model_type"]].from_dict(merged)
    else:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
        require_one_rotary(source.folder, settings, config)
    if (setting := misread(config)) is not None:
        raise CannotCompute(
            f"transformers {version('transformers')} computes {setting} of {family} differently "
            "from later versions"
        )
    return config


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes. The parts of a multimodal model have settings of their own."""
    merged = dict(settings)
    for name, value in changes.items():
        part = settings.get(name)
        if name.endswith("_config") and isinstance(part, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(part, value)
        else:
            merged[name] = value
    if ROTARY & changes.keys():
        merged |= _rotary(settings, changes)
    return merged


def _rotary(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under the name that transformers 5 reads. What the changes do not say, such
    as the base, stays."""
    old = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    new = changes.get("rope_parameters") or changes.get("rope_scaling")
    if any(isinstance(value, Mapping) for value in {**old, **(new or {})}.values()):
        return {}  # each type of layer has its own
    bases = {"rope_theta": settings["rope_theta"]} if "rope_theta" in settings else {}
    bases |= {name: old[name] for name in BASES if name in old}
    bases |= {name: changes[name] for name in BASES if name in changes}
    kept = dict(old) if not {"rope_parameters", "rope_scaling"} & changes.keys() else {}
    return {"rope_parameters": {**kept, **bases, **(new or {})}, "rope_scaling": None}


@lru_cache(maxsize=1)
def _loaded(key: bytes) -> Any:
    source: Source = pickle.loads(key)
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    config = configuration(source)
    options: dict[str, Any] = {
        "attn_implementation": sound_attention(config),
        "dtype": getattr(torch, source.dtype),
        "output_loading_info": True,
    }
    if source.size > MAX_BYTES_IN_MEMORY:
        if not offloads_whole_models():
            raise CannotCompute(
                f"{source.size / 1e9:.1f} GB of weights are read layer by layer with accelerate, "
                f"from {MIN_ACCELERATE_VERSION} on; "
                f"pip install 'accelerate>={MIN_ACCELERATE_VERSION}'"
            )
        options |= {"device_map": {"": "disk"}, "offload_folder": source.scratch}
    known = type(config) in AutoModelForCausalLM._model_mapping
    kind = AutoModelForCausalLM if known else AutoModelForMultimodalLM
    with without_adapter(source.folder) as more:
        model, found = kind.from_pretrained(
            source.folder, config=copy.deepcopy(config), **options, **more
        )
    missing = {*found["missing_keys"], *map(str, found["mismatched_keys"])}
    if missing:
        raise CannotCompute(
            f"transformers finds no weights for {sorted(missing)[0]} ({len(missing)} in all)"
        )
    if source.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, source.adapter)
    return model.eval()


def sound_attention(config: Any) -> str:
    """transformers' implementation of attention that computes what a configuration says: eager
    attention, since others ignore some settings. Falcon's adds the biases of ALiBi twice."""
    biased_twice = config.model_type == "falcon" and config.alibi
    return "sdpa" if biased_twice else "eager"


def offloads_whole_models() -> bool:
    """Whether an accelerate is installed that leaves all weights of a model on disk."""
    try:
        installed = version("accelerate")
    except PackageNotFoundError:
        return False
    major, minor = installed.split(".")[:2]
    return (int(major), int(minor)) >= tuple(map(int, MIN_ACCELERATE_VERSION.split(".")))


def load(source: Source) -> Any:
    """The model, or the one of the question before."""
    return _loaded(pickle.dumps(source))
