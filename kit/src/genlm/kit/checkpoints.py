"""Checkpoints: which files and tensors of a folder transformers reads.

An engine that reads others serves another model than the folder's, and raises nothing: loaders pass
over names that their classes do not have.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from genlm.core.checks import describe_error
from genlm.core.errors import EngineError, ModelNotFoundError
from genlm.core.logs import get_logger
from genlm.kit.model_files import ADAPTER, holds_weights, require_object
from genlm.kit.replacing import replaced
from genlm.kit.settings import in_transformers

log = get_logger()

#: The files of weights that transformers looks for, the first that is there; and the index that
#: says of each in which files the weights are instead.
WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)

#: The arguments of ``from_pretrained`` that locate files.
OF_FILES = ("revision", "token", "cache_dir", "local_files_only", "subfolder")

#: A folder within a model's in which transformers looks for the model's adapter, and finds none.
NO_SUBFOLDER = "no-adapter-here"

#: The names of the language model within multimodal models.
LANGUAGE_PARTS = {"language_model", "text_model"}

#: The shapes of tensors of a checkpoint by name.
Shapes = Mapping[str, Sequence[int]]


def weight_files(folder: Path) -> list[Path]:
    """The files of weights that transformers reads in a folder; none if it would find none.

    Raises:
        ModelNotFoundError: an index is not a JSON object.
    """
    for whole, index in WEIGHT_FILES:
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            named = set(require_object(folder / index).get("weight_map", {}).values())
            return [folder / name for name in sorted(named)]
    return []


def read_by_transformers(folder: str, found: Sequence[str]) -> list[str]:
    """The files of weights that transformers reads in a folder, in place of those that an engine
    has found there. The log names those that are passed over."""
    files = [str(file) for file in weight_files(Path(folder)) if file.is_file()]
    if not files or {*files} == {*found}:
        return list(found)
    others = sorted({Path(file).name for file in found} - {Path(file).name for file in files})
    log.warning(
        "weights.passed_over", folder=folder, files=others, why="transformers does not read them"
    )
    return files


@contextmanager
def without_adapter(name: str, source: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Arguments of ``from_pretrained`` with which transformers, inside the block, loads a model
    without the LoRA adapter that lies beside its weights, in its folder or on the hub. The log
    names the model.

    With PEFT installed, transformers would apply the adapter, and say nothing of weights that the
    model lacks; for a name of the hub it would load the adapter's base in place of the model. The
    adapter may be merged into the weights already, and other engines pass over it. An adapter
    without such weights is left to transformers.

    Args:
        name: A folder or hub name.
        source: Arguments of ``from_pretrained`` that locate the files.

    Yields:
        The argument ``adapter_kwargs``; nothing if there is no such adapter.
    """
    from transformers.utils import find_adapter_config_file, is_peft_available

    given = {name: value for name, value in (source or {}).items() if name in OF_FILES}
    if not is_peft_available() or _file_of(name, ADAPTER, given) is None:
        yield {}
        return
    folder, files = Path(name, given.get("subfolder") or ""), sum(WEIGHT_FILES, ())
    if not (
        holds_weights(folder)
        if Path(name).is_dir()
        else any(_file_of(name, file, given) for file in files)
    ):
        yield {}
        return
    log.warning("adapter.passed_over", folder=name, apply="lm.add_new_lora(folder, name)")
    with ExitStack() as hidden:
        # In a folder, early versions look for the adapter in no subfolder. PEFT is hidden from the
        # loads of other threads too then.
        if Path(name).is_dir() and find_adapter_config_file(name, subfolder=NO_SUBFOLDER):
            without = replaced(
                "transformers.", "is_peft_available", is_peft_available, lambda: False
            )
            hidden.enter_context(without)
        yield {"adapter_kwargs": {"subfolder": NO_SUBFOLDER}}


def _file_of(name: str, file: str, given: Mapping[str, Any]) -> str | None:
    """Where a file of a model is, downloaded if need be; ``None`` if the model lacks it."""
    from transformers.utils import cached_file

    absent = ("gated_repo", "missing_entries", "connection_errors")
    found: str | None = cached_file(
        name, file, **given, **{f"_raise_exceptions_for_{each}": False for each in absent}
    )
    return found


def require_all_read(
    unread: Shapes, model: str, folder: Path | None, settings: Any, engine: str
) -> None:
    """Reject a model of which an engine has left out weights that transformers reads.

    Args:
        unread: What it has left out, see :meth:`genlm.kit.loads.Reading.unread`.
        model: What the user gave.
        folder: Where its files are, if that is known.
        settings: See :func:`genlm.kit.settings.settings_of`.
        engine: The engine's name, for people.

    Raises:
        EngineError: it has left out some.
    """
    left_out = {_of_language(name): name for name in unread}
    empty = in_transformers(settings) if left_out else None
    if empty is None:
        return
    for names in tied(empty):
        left_out_here = {name: left_out.pop(name) for name in names if name in left_out}
        if left_out_here.keys() == names:
            left_out |= left_out_here
        elif left_out_here:
            require_same(folder, settings, names, engine)
    if missed := _wanted(empty, {name: unread[held] for name, held in left_out.items()}):
        raise EngineError(
            f"the checkpoint {model!r} has {left_out[missed[0]]} ({len(missed)} weights in all), "
            f"which transformers reads, and {engine} leaves them out of {settings.model_type}; "
            "load it with backend='hf'"
        )
    require_places(model, empty, {held: unread[held] for held in left_out.values()})


def require_places(model: str, loaded: torch.nn.Module, unread: Shapes) -> None:
    """Reject a checkpoint with weights for parts of a model that have no place for them, such as a
    bias, a norm of queries or a LoRA matrix in a layer without one. The configuration then is of
    another model than the weights.

    Further layers, heads and towers are no such parts: a configuration may leave them out.

    Args:
        model: What the user gave.
        loaded: The model that transformers makes of the configuration.
        unread: The shapes of tensors that it does not take, by name, without those of zeros.

    Raises:
        EngineError: there are such weights.
    """
    strange = [name for name, shape in unread.items() if _has_no_place(loaded, name, shape)]
    if strange:
        raise EngineError(
            f"the checkpoint {model!r} has {strange[0]} ({len(strange)} such weights in all), for "
            f"which {type(loaded).__name__} has no place with the settings of its config.json; "
            "correct config.json, or remove these weights from the checkpoint"
        )


def require_places_by_name(model: str, folder: Path | None, settings: Any) -> None:
    """Reject a checkpoint with weights for parts of a model that have no place for them, see
    :func:`require_places`, by the names in its files alone. This is for engines whose loaders raise
    errors of their own for such names, after the error.

    Args:
        model: What the user gave.
        folder: Where its files are, if that is known.
        settings: See :func:`genlm.kit.settings.settings_of`.

    Raises:
        EngineError: there are such weights.
    """
    files = [] if folder is None else weight_files(folder)
    if not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        return
    empty = in_transformers(settings) if files else None
    if empty is None or folder is None:
        return
    known = empty.state_dict().keys()
    unread = unread_in(folder, {name for file in files for name in _names(file)} - known)
    if not _wanted(empty, unread):
        require_places(model, empty, unread)


def _has_no_place(loaded: torch.nn.Module, name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor has the name of a weight in a layer, or in another part that a configuration
    cannot leave out, although the model has no weight of this name."""
    # Old checkpoints also hold masks, of four dimensions, and scales of quantised caches.
    if not (name.endswith((".weight", ".bias")) and len(shape) in (1, 2)):
        return False
    prefix, alone = f"{getattr(loaded, 'base_model_prefix', '')}.", _of_language(name)
    names = {name, alone, prefix + name, prefix + alone}
    ignored = getattr(loaded, "_keys_to_ignore_on_load_unexpected", None) or ()
    if any(re.search(pattern, one) for pattern in ignored for one in names):
        return False
    parts, known = dict(loaded.named_modules()), loaded.state_dict().keys()
    return not names & known and any(_is_part(parts, one.rpartition(".")[0]) for one in names)


def _is_part(parts: Mapping[str, torch.nn.Module], owner: str) -> bool:
    """Whether the nearest module with the beginning of a name is a layer, inside of one, or has no
    modules of its own."""
    while owner and owner not in parts:
        owner = owner.rpartition(".")[0]
    in_a_layer = any(part.isdecimal() for part in owner.split("."))
    return in_a_layer or bool(owner and not any(parts[owner].children()))


def unread_in(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of those tensors of a checkpoint, by name, that are not all zeros."""
    found = _tensors(weight_files(folder), {*names})
    return {name: tuple(each.shape) for name, each in found if bool(each.count_nonzero())}


def require_same(folder: Path | None, settings: Any, names: Iterable[str], engine: str) -> None:
    """Reject a checkpoint with an output layer that differs from the embeddings to which the
    configuration ties it. transformers uses both; this is for engines that use one for the other.

    Args:
        folder: The folder of the checkpoint; with ``None`` nothing is compared.
        settings: See :func:`genlm.kit.settings.settings_of`.
        names: The names of weights that are tied in transformers.
        engine: The engine's name, for messages.

    Raises:
        EngineError: the checkpoint has two of these weights, and they differ.
    """
    wanted = {*names}
    found = {} if folder is None else dict(_tensors(weight_files(folder), wanted))
    for first, other in pairwise(found):
        if not torch.equal(found[first], found[other]):
            raise EngineError(
                f"the weights {other} and {first} of the checkpoint {str(folder)!r} differ, "
                f"but with tie_word_embeddings={settings.tie_word_embeddings} {engine} takes one "
                "for both; load it with backend='hf', or write tie_word_embeddings=false into "
                "its config.json"
            )


def tied(empty: torch.nn.Module) -> list[set[str]]:
    """The names of weights that are one and the same in a model: those of its embeddings and its
    output layer."""
    shared: dict[int, set[str]] = {}
    for name, weight in empty.named_parameters(remove_duplicate=False):
        shared.setdefault(id(weight), set()).add(name)
    return [names for names in shared.values() if len(names) > 1]


def require_weights(model: str, settings: Any) -> None:
    """Reject a checkpoint that lacks weights. This is for engines that would compute with whatever
    was in memory in their place. A checkpoint whose names transformers converts is not compared.

    Raises:
        ModelNotFoundError: weights are missing.
    """
    files = [file for file in weight_files(Path(model)) if file.suffix == ".safetensors"]
    held = {name for file in files for name in _names(file)}
    empty = in_transformers(settings) if held else None
    if empty is None:
        return
    known = held <= set(empty.state_dict())
    # A checkpoint has tied weights once, under any of their names.
    held = held.union(*(names for names in tied(empty) if names & held))
    absent = sorted({name for name, _ in empty.named_parameters()} - held)
    if absent and known:
        raise ModelNotFoundError(
            f"the checkpoint {model!r} lacks weights of {type(empty).__name__}: "
            f"{', '.join(absent[:4])} ({len(absent)} in all); copy or download the whole folder"
        )


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _tensors(files: Iterable[Path], wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of these names, which may lack their beginning; their names in the files."""
    from safetensors import safe_open

    def is_wanted(name: str) -> bool:
        short = _of_language(name)
        return short in wanted or any(one.endswith(f".{short}") for one in wanted)

    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                for name in filter(is_wanted, opened.keys()):
                    yield name, opened.get_tensor(name)
        else:
            mapped = is_zipfile(file)  # files of early versions of PyTorch are not
            for name, tensor in torch.load(file, weights_only=True, mmap=mapped).items():
                if is_wanted(name):
                    yield name, tensor


def _of_language(name: str) -> str:
    """A name as the language model alone would have it."""
    return ".".join(part for part in name.split(".") if part not in LANGUAGE_PARTS)


def _wanted(empty: torch.nn.Module, shapes: Shapes) -> list[str]:
    """The names of a checkpoint that transformers' model takes; it renames many at a load."""
    known = empty.state_dict().keys()
    direct = [name for name in shapes if name in known]
    if direct or not shapes:
        return direct
    config = copy.deepcopy(empty.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    weights = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    try:
        with _silenced():
            _, found = type(empty).from_pretrained(  # type: ignore[attr-defined]
                None, config=config, state_dict=weights, device_map="meta", output_loading_info=True
            )
    except Exception as error:  # a class may raise anything
        if "conversion of the weights" in str(
            error
        ):  # transformers knows the names, but misses their values
            return list(shapes)
        log.info("weights.unknown", names=[*shapes][:4], error=describe_error(error)[:200])
        return []
    shared = {name for names in tied(empty) for name in names}
    return list(shapes) if known - set(found["missing_keys"]) - shared else []


@contextmanager
def _silenced() -> Iterator[None]:
    """Without transformers' report of a load."""
    from transformers.utils import logging

    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
