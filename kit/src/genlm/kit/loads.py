"""Loads: which tensors of a checkpoint an engine's loader reads, and which parameters it writes."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch
from attrs import frozen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from genlm.core.errors import EngineError
from genlm.kit.checkpoints import Shapes, read_by_transformers
from genlm.kit.settings import in_transformers

#: Unread tensors of up to this many bytes are kept until the end of a load: their values are
#: looked at, and no other tensor takes their place in memory.
KEPT_BYTES = 1 << 20

#: The values of an engine's ``load_format`` for folders that transformers can read too.
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")

#: Ends of the names of parameters that checkpoints need not have: of quantised weights and caches.
OPTIONAL = ("scale", "scale_inv", "zero_point")


@frozen
class Load:
    """The outcome of loading a checkpoint.

    Attributes:
        unread: The shapes of tensors that the model has left out, by name: see
            :meth:`Reading.unread`.
        unwritten: The names of its parameters that it has not loaded: see
            :meth:`Writing.unwritten`.
    """

    unread: Shapes
    unwritten: Sequence[str]


def watch_load(
    model: Any,
    ended: Callable[[Any, Load], None],
    settings: Any = None,
    *,
    needed: Container[str] | None = None,
    partly: bool = True,
) -> Callable[[], None]:
    """Watch the first load of a model, whichever loader gives it weights. Calling the result ends
    the watch.

    Args:
        model: A module with a method ``load_weights`` that takes names and tensors.
        ended: Gets the model and its load.
        settings: See :func:`genlm.kit.settings.settings_of`.
        needed: See :class:`Writing`.
        partly: See :meth:`Writing.unwritten`.
    """
    own: Any = weakref.WeakMethod(model.load_weights)  # otherwise a model would keep itself alive

    def load_weights(weights: Any, *args: Any, **named: Any) -> Any:
        end()  # later calls may load only some of the weights
        load, reading = own(), Reading()
        model = load.__self__
        writing = Writing(model, needed)
        with reading.watched():
            result = load(reading.of(weights), *args, **named)
        ended(model, Load(reading.unread(model), writing.unwritten(settings, partly=partly)))
        return result

    def end() -> None:
        load = own()
        if load is not None and vars(load.__self__).get("load_weights") is load_weights:
            del load.__self__.load_weights

    model.load_weights = load_weights
    return end


@contextmanager
def files_of_transformers(*loaders: Any) -> Iterator[list[Path]]:
    """Inside the block, an engine's loaders read those files of a folder that transformers reads.

    Args:
        loaders: Classes with a method ``_prepare_weights``. It returns a list of files, or a folder
            and its files, perhaps followed by whether they are of safetensors, and more.

    Yields:
        A list, to which the folders are added.
    """
    folders: list[Path] = []
    with ExitStack() as ending:
        for loader in loaders:
            ending.callback(setattr, loader, "_prepare_weights", loader._prepare_weights)
            loader._prepare_weights = _as_transformers(loader._prepare_weights, folders)
        yield folders


def _as_transformers(prepare: Callable[..., Any], folders: list[Path]) -> Callable[..., Any]:
    @wraps(prepare)
    def prepare_weights(self: Any, *args: Any, **named: Any) -> Any:
        found = prepare(self, *args, **named)
        alone = isinstance(found, list)
        more: list[Any]
        folder, files, *more = (Path(found[0]).parent, found) if alone else found
        folders.append(Path(folder))
        if self.load_config.load_format in FORMATS:
            files = read_by_transformers(str(folder), files)
            more[:1] = [files[0].endswith(".safetensors")] * len(more[:1])
        return files if alone else (folder, files, *more)

    return prepare_weights


class Reading:
    """Sees which tensors of a checkpoint an engine's loader reads.

    A tensor is read by an operation that makes something else of its values: a copy, another type,
    a sum. A view of it is not. So nothing depends on how a loader renames, splits and joins what
    it reads.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._unread: dict[int, _Unread] = {}
        self._freed: list[_Unread] = []
        self._lock = Lock()  # loaders read in several threads

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a loader works in this thread, and in others to which it gives work."""
        here, submit = get_ident(), ThreadPoolExecutor.submit

        def watched_too(work: Callable[..., Any]) -> Callable[..., Any]:
            def do(*args: Any, **named: Any) -> Any:
                with _Operations(self._has_read):
                    return work(*args, **named)

            return do

        def submit_watched(
            pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **named: Any
        ) -> Any:
            if get_ident() == here:
                work = watched_too(work)
            return submit(pool, work, *args, **named)

        ThreadPoolExecutor.submit = submit_watched  # type: ignore[method-assign, assignment]
        try:
            with _Operations(self._has_read):
                yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]

    def of(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors of a checkpoint, on their way to the loader."""
        return map(self._added, weights)  # which keeps no tensor

    def unread(self, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        """The names and shapes of tensors that no operation has read, that are no weights of the
        loaded model themselves, and not all zeros."""
        for one in (*model.parameters(), *model.buffers()):
            if not (one.is_meta or is_lazy(one)):  # SGLang's of a GGUF file have no memory yet
                self._has_read(one)
        found = (*self._freed, *(self._unread[begin] for begin in self._begins))
        return {one.name: one.shape for one in found if not one.is_known_to_be_zeros}

    def _added(self, weight: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        name, tensor = weight
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if begin == end:
            return weight
        values = tensor if tensor.nbytes <= KEPT_BYTES else None
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        with self._lock:
            # A tensor that was there before has been freed, or is the same tensor under another
            # name.
            first, last = bisect_left(self._begins, begin), bisect_left(self._begins, end)
            before = [self._unread.pop(each) for each in self._begins[first:last]]
            self._freed += [one for one in before if one.storage.expired()]
            self._begins[first:last] = [begin]
            self._unread[begin] = _Unread(name, tuple(tensor.shape), end, values, storage)
        return weight

    def _has_read(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        with self._lock:
            at = bisect_right(self._begins, address) - 1
            if at >= 0 and address < self._unread[self._begins[at]].end:
                one = self._unread.pop(self._begins.pop(at))
                if one.storage.expired():  # another tensor is where it was
                    self._freed.append(one)


@frozen(eq=False)
class _Unread:
    """A tensor of a checkpoint.

    Attributes:
        name: Its name.
        shape: Its shape.
        end: The address behind it.
        values: The tensor, if it is small.
        storage: Whether its memory has been freed.
    """

    name: str
    shape: tuple[int, ...]
    end: int
    values: torch.Tensor | None
    storage: Any

    @property
    def is_known_to_be_zeros(self) -> bool:
        return self.values is not None and not bool(self.values.count_nonzero())


class _Operations(TorchDispatchMode):
    """Tells of the tensors that operations read in a thread."""

    def __init__(self, has_read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._has_read = has_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for one in tree_leaves((args, kwargs)):
                if type(one) is torch.Tensor and not one.is_meta:
                    self._has_read(one)
        return func(*args, **(kwargs or {}))


class Writing:
    """Sees which parameters of a model a load writes. For the other parameters, the engine would
    serve what happens to be in memory.

    One column of each parameter is NaN until the load writes it, so that a row that is not written
    shows.

    Args:
        model: Before the load.
        needed: The names of the parameters to watch; ``None`` for all that checkpoints must have.
    """

    def __init__(self, model: torch.nn.Module, needed: Container[str] | None = None) -> None:
        self._model = model
        self._marks = list(_marks(model, needed))

    def unwritten(self, settings: Any, *, partly: bool) -> list[str]:
        """The names of parameters that the load has not written; to be called once, after it.

        The marks of all other parameters are removed. With ``settings``, a norm that only the
        engine's model has gets its initial value back.

        Args:
            settings: See :func:`genlm.kit.settings.settings_of`.
            partly: Whether parameters that are written in part count as well.
        """
        found = []
        for name, place, before in self._marks:
            marked = place.isnan()
            if not bool(marked.any()):
                continue
            wholly = bool(marked.all())
            if (wholly or partly) and not (wholly and self._is_own(name, before, settings)):
                found.append(name)
            else:
                place.copy_(torch.where(marked, before, place))
        return found

    def _is_own(self, name: str, before: torch.Tensor, settings: Any) -> bool:
        """Whether a parameter is a norm that the engine has made, and transformers' model lacks."""
        if self._model.get_parameter(name).ndim > 1:
            return False
        if bool((before != before[0]).any()) or float(before[0]) == 0:  # memory may be zeros
            return False
        empty = in_transformers(settings)
        return empty is not None and name not in dict(empty.named_parameters())


def _marks(
    model: torch.nn.Module, needed: Container[str] | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Write NaN into one column of every parameter.

    Yields:
        The name of the parameter, the column, and its previous contents.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or (needed is not None and name not in needed):
            continue
        plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if plain and parameter.numel() > 1 and not (parameter.is_meta or name.endswith(OPTIONAL)):
            place = parameter.data if parameter.ndim < 2 else parameter.data[..., 0]
            before = place.clone()
            place.fill_(torch.nan)
            yield name, place, before


def require_all_written(unwritten: Sequence[str], model: str, kind: str, engine: str) -> None:
    """Reject a model if a load has not written all of its parameters.

    Args:
        unwritten: The names of the others, see :meth:`Writing.unwritten`.
        model: The folder or hub name that the user gave.
        kind: The model's family or class, for the message.
        engine: The engine's name, for the message.

    Raises:
        EngineError: a parameter has not been written.
    """
    if unwritten:
        raise EngineError(
            f"{engine} finds no weights of {kind} for {unwritten[0]} ({len(unwritten)} in all) in "
            f"{model!r}, perhaps because it expects other names, or they are NaN; load the model "
            "with backend='hf'"
        )
