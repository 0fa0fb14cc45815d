"""AsyncLM, the class that users call: loading, adapters, caches and closing."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from attrs import evolve

from genlm.core.adapters import UNSET, AdapterRegistry, LoraName
from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidInputError, InvalidOptionError, UnsupportedError
from genlm.core.generation import GenerationMixin
from genlm.core.hints import LM, blocks, known_keywords, missing_attribute
from genlm.core.known_contexts import KnownContexts
from genlm.core.options import CORE, CoreOptions, refuse_unknown
from genlm.core.plugins import choose_backend, find_backend, installed_wrappers
from genlm.core.population import Population
from genlm.core.runtime.askers import running_loop
from genlm.core.runtime.batcher import Batcher
from genlm.core.runtime.executor import EngineExecutor
from genlm.core.runtime.lanes import Counters
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.runtime.timeline import Timeline, Trace
from genlm.core.types import Adapter, Engine, Stats

T = TypeVar("T")


def load_model_by_name(
    name: str,
    backend: str | None = None,
    llm_opts: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncLM:
    """Load a language model.

    Args:
        name: A local path or a hub name, as the backend takes it.
        backend: An installed backend (``genlm backends`` lists them); ``None`` chooses the best for
            this machine: vLLM with CUDA, MLX on Apple silicon, else hf. The choice is logged;
            ``structlog.configure()`` makes it visible (:mod:`genlm.core.logs`).
        llm_opts: Options of the backend, and of the core
            (:class:`~genlm.core.options.CoreOptions`).
        **options: The same, as keywords: ``load_model_by_name(name, "hf", batch_size=3)``.

    Examples:
        >>> with load_model_by_name("mock", backend="mock", batch_size=8) as lm:
        ...     lm.next_token_logprobs_sync(lm.encode("Hello")).shape
        torch.Size([258])

    Raises:
        BackendNotFoundError, BackendImportError, BackendUnavailableError: there is no such backend,
            it is broken, or it cannot run here.
        InvalidOptionError: an option is not accepted, or given twice.
        ModelNotFoundError: there is no such model (an ``InvalidOptionError``).
    """
    given = {} if llm_opts is None else llm_opts
    if not isinstance(given, Mapping):
        raise InvalidOptionError(f"llm_opts must be a dict of options; got {safe_repr(given)}")
    if twice := sorted(given.keys() & options.keys()):
        raise InvalidOptionError(
            f"{', '.join(twice)} is given in llm_opts and as a keyword; give it once"
        )
    chosen = backend if backend is not None else choose_backend()
    return AsyncLM.from_backend(chosen, name, {**given, **options})


class AsyncLM(GenerationMixin):
    """A language model that any number of coroutines and threads may ask for next-token
    log-probabilities.

    Concurrent requests are batched, and repeated requests are answered from a cache. All methods
    may be called from any thread and from any event loop; the blocking ones also inside a running
    loop.

    A context is a non-empty sequence of token ids in ``range(vocab_size)``: ints, or a NumPy array
    or tensor of integers. A row is a float32 tensor ``[len(lm.byte_vocab)]`` of log-probabilities
    on the engine's device, which belongs to the caller. If a method takes ``lora_name``, a name
    selects that adapter, ``None`` selects the base model, and without this argument the default of
    :meth:`set_lora` applies. A coroutine reads its arguments and the default adapter when it first
    runs, not when it is created. If a list or the default may change in between, pass a copy of the
    list and name the adapter.

    Every request may raise:
        - InvalidQueryError: the context is empty or too long, or has invalid token ids (a
          ``ValueError``).
        - UnknownAdapterError: no adapter of that name is registered (a ``ValueError``).
        - EngineError: the engine failed on this request; the model still works.
        - EngineDeadError: the engine cannot continue; load the model again.
        - ModelClosedError: the model has been closed.

    Args:
        load: A function that returns the engine. It is called once, on the model's engine thread.
        backend: The backend's name, for messages.
        **options: Options of the core (:class:`~genlm.core.options.CoreOptions`).

    Examples:
        Requests made together go to the engine together:

        >>> async def next_tokens(lm, contexts):
        ...     return await asyncio.gather(*map(lm.next_token_logprobs, contexts))
        >>> with load_model_by_name("mock", backend="mock") as lm:
        ...     rows = asyncio.run(next_tokens(lm, [[72], [72, 101], [72]]))
        >>> [row.shape for row in rows]
        [torch.Size([258]), torch.Size([258]), torch.Size([258])]
        >>> lm.stats.batches, lm.stats.rows, lm.stats.dedup_hits
        (1, 2, 1)
    """

    def __init__(
        self,
        load: Callable[[], Engine] | None = None,
        *,
        backend: str = "",
        **options: Any,
    ) -> None:
        if load is None or not callable(load) or isinstance(load, AsyncLM) or not backend:
            raise InvalidOptionError(
                "load_model_by_name(name) loads a model; AsyncLM(load, backend='name') takes a "
                "function that loads an engine; a model of your own is a plugin (`genlm new-plugin "
                "NAME`), or a MockAsyncLM with a method "
                f"_get_logprobs; got {safe_repr(load)} and backend={safe_repr(backend)}"
            )
        refuse_unknown(backend, [name for name in options if name not in CORE])
        core = CoreOptions(**options)
        if core.verify:
            raise InvalidOptionError(
                "verify compares a model with the folder that it is loaded from; load it by name: "
                "load_model_by_name(folder, backend, verify=True)"
            )
        wrappers = [*self._installed_wrappers(), *core.wrappers]
        self._cache = cache = core.output_cache()
        self._adapters = adapters = AdapterRegistry()
        self._known_contexts = KnownContexts()
        self._timeline = timeline = Timeline()
        counters = Counters()

        def start() -> EngineExecutor:
            engine = LoadedEngine(load(), backend, wrappers, core)
            return EngineExecutor(engine, cache, adapters, counters, timeline, core.keeps_frames)

        self._name: str | None = None  # the name of the model, if it was loaded by name
        self._batcher = Batcher(
            start,
            name=f"genlm-{backend}",
            batch_size=core.batch_size,
            timeout=float(core.timeout),
            timeline=timeline,
            counters=counters,
            lock=cache.lock,
            keeps_frames=core.keeps_frames,
        )
        # The finalizer exists before the thread starts, so that an interrupt leaves no thread
        # behind. At exit, the batcher ends itself, and waits.
        weakref.finalize(self, self._batcher.stop).atexit = False
        self._executor: EngineExecutor = self._batcher.start()
        self._engine = self._executor.engine

    @classmethod
    def from_backend(cls, backend: str, model: str, options: Mapping[str, Any]) -> Self:
        """Load a model with an installed backend. A backend's own class calls this in its
        ``from_name``; the constructor of the class is not called.

        Args:
            backend: The backend's name.
            model: A local path or a hub name.
            options: Those of the backend, and of the core.

        Raises:
            BackendUnavailableError: the backend cannot run here; the message says why.
            InvalidOptionError: an option is not accepted.
        """
        core, own = CoreOptions.split(options)
        chosen = find_backend(backend)
        verify = CoreOptions(**core).verification
        if core.pop("verify", None) and not chosen.verifies:
            raise InvalidOptionError(
                f"backend {chosen.name!r} verifies no models; leave out verify, and compare its "
                f"rows by `genlm verify {model} --backend {chosen.name}`"
            )
        lm = cls.__new__(cls)
        AsyncLM.__init__(lm, lambda: chosen.load(model, own, verify), backend=chosen.name, **core)
        lm._name = model
        return lm

    def _installed_wrappers(self) -> list[object]:
        """The installed wrappers. A subclass whose models are parts of another model overrides
        this, since that model is wrapped already."""
        return installed_wrappers()

    def __repr__(self) -> str:
        engine = self._engine
        limit = "no limit" if engine.max_context is None else f"{engine.max_context} tokens"
        named = "" if self._name is None else f"model={self._name!r}, "
        closed = ", closed" if engine.closed else ""
        return (
            f"<{type(self).__name__} {named}backend={engine.backend!r}, device={engine.device!r}, "
            f"context of {limit}{closed}>"
        )

    # --- populations ------------------------------------------------------------------------------

    @known_keywords
    def population(
        self, prompt_token_ids: Iterable[int], n: int, lora_name: LoraName = UNSET
    ) -> Population:
        """``n`` particles that begin with a prompt and grow together, in tensors: see
        :class:`~genlm.core.population.Population`.

        Args:
            prompt_token_ids: The prompt.
            n: The number of particles, at least 1.
            lora_name: The adapter of all particles.

        Raises:
            InvalidOptionError: ``n`` is not an integer of at least 1.
        """
        query = self._query(prompt_token_ids, lora_name)
        name = None if query.adapter is None else query.adapter.name
        return Population(self, query.context, n, name)

    # --- adapters ---------------------------------------------------------------------------------

    @blocks
    def add_new_lora(self, lora_path: str | os.PathLike[str], lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter and bind it to a name. Blocks until it is loaded.

        If the name is already bound, the new adapter replaces the old one, and cached rows and
        state of the old one are dropped. After an error the old adapter stays bound.

        Args:
            lora_path: The adapter's folder.
            lora_name: The name.

        Examples:
            >>> with load_model_by_name("mock", backend="mock") as lm:
            ...     lm.add_new_lora("folder/of/poems", "poems")
            ...     adapted = lm.next_token_logprobs_sync([72], lora_name="poems")
            ...     base = lm.next_token_logprobs_sync([72])
            ...     list(lm.adapters), bool((adapted == base).all())
            (['poems'], False)

        Raises:
            InvalidOptionError: the name is not a non-empty string, or the path is not a string or a
                path.
            InvalidAdapterError: the adapter is not sound, or is made for another model.
            UnsupportedError: the backend has no LoRA.
        """
        self._engine.require("genlm_add_lora", "LoRA")
        adapter = self._adapters.new(lora_name, lora_path)
        self._batcher.require_open()
        contents = self._engine.calls.call("genlm_read_lora", adapter=adapter)
        self._batcher.run(lambda: self._executor.bind(adapter, contents))

    @blocks
    def remove_lora(self, lora_name: str) -> None:
        """Unload an adapter.

        Raises:
            UnknownAdapterError: no adapter of that name is registered.
        """
        self._adapters.named(lora_name)
        self._batcher.run(lambda: self._executor.unbind(lora_name))

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that are registered now, by name. Read only."""
        return self._adapters.bound()

    def set_lora(self, lora_name: str) -> None:
        """Make an adapter the default for all calls without ``lora_name``.

        Raises:
            UnknownAdapterError: no adapter of that name is registered.
        """
        self._adapters.default = self._adapters.named(lora_name).name

    def clear_lora(self) -> None:
        """Make the base model the default again."""
        self._adapters.default = None

    # --- caches -----------------------------------------------------------------------------------

    @blocks
    @known_keywords
    def cache_kv(self, prompt_tokens: Iterable[int], lora_name: LoraName = UNSET) -> None:
        """Compute and pin the KV cache of a prompt (for recurrent models, its state), so that
        contexts which begin with it start from there. Blocks. Does nothing if the engine keeps no
        state.

        Args:
            prompt_tokens: The prompt.
            lora_name: The adapter.

        Raises:
            EngineError: there is no room for the prompt.
        """
        query = self._query(prompt_tokens, lora_name)
        self._batcher.run(lambda: self._executor.pin(query))

    def clear_cache(self) -> None:
        """Drop all cached rows."""
        self._cache.clear()

    @blocks
    def clear_kv_cache(self) -> None:
        """Empty the KV cache, pinned prompts included. Waits for earlier requests."""
        self._batcher.run(self._executor.clear)

    def reset_async_queries(self) -> None:
        """Drop the requests that the engine has not taken yet; their callers get
        :class:`QueriesResetError`."""
        self._batcher.reset()

    # --- the model --------------------------------------------------------------------------------

    @property
    def max_context(self) -> int | None:
        """The longest context for which a row can be asked, in tokens; ``None`` if there is no
        limit."""
        return self._engine.max_context

    def supports(self, hook: str, argument: str | None = None) -> bool:
        """Whether the engine implements a hook of :mod:`genlm.core.hookspecs`, for instance
        ``"genlm_add_lora"`` for LoRA; with ``argument``, whether its implementation takes that
        argument.

        Raises:
            InvalidInputError: there is no such hook.
        """
        return self._engine.supports(hook, argument)

    @property
    def underlying_model(self) -> Any:
        """The engine's own model object. It belongs to the engine thread while requests are
        pending.

        Raises:
            ModelClosedError: the model has been closed.
        """
        return self._engine.model

    @property
    def stats(self) -> Stats:
        """Counters of the work since the model was loaded."""
        hits = self._cache.hits  # hits that the batcher has not seen
        seconds: dict[str, Any] = {f"{s}_seconds": t for s, t in self._timeline.spent().items()}
        stats = Stats(**self._batcher.counters, **seconds)
        return evolve(stats, requests=stats.requests + hits, cache_hits=stats.cache_hits + hits)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Record what happens inside a ``with`` block, in any thread: requests, batches, the
        engine's time, cache hits. The file is written at the end of the block. Open it in
        https://ui.perfetto.dev, or without a network in ``chrome://tracing`` of Chrome or Chromium.

        Args:
            path: The file to write.

        Raises:
            InvalidInputError: a trace is being recorded already, or ``path`` is not a path.
            OSError: the file cannot be written.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            raise InvalidInputError(f"a trace needs the path of its file; got {safe_repr(path)}")
        return Trace(self._timeline, os.fspath(path))

    def close(self) -> None:
        """Fail pending requests, wait for the current batch, and release the engine. Idempotent."""
        self._batcher.close()
        self._cache.clear()

    cleanup = close

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The model itself: objects that hold a model may be copied, but an engine exists only
        once."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises: UnsupportedError: always."""
        raise UnsupportedError(
            f"{type(self).__name__} cannot be pickled: an engine lives in one process; load the "
            "model in each process that needs it (examples/islands.py), or serve it from one"
        )

    def __enter__(self) -> Self:
        """Raises: ModelClosedError: the model has been closed."""
        self._batcher.require_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        running_loop()  # the end of the block needs a loop, and fails here before anything is lost
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)

    if not TYPE_CHECKING:  # a type checker must report every missing attribute

        def __getattr__(self, name):
            if "_engine" not in vars(self):
                raise AttributeError(
                    f"no {name}: {type(self).__name__} must call super().__init__()"
                )
            raise missing_attribute(self, name, LM, CORE)

        def __call__(self, *inputs, **options):
            raise UnsupportedError(
                f"{type(self).__name__} is not callable; use `await lm.next_token_logprobs(ids)`"
            )

        @classmethod
        def from_pretrained(cls, *inputs, **options):
            raise UnsupportedError(
                f"{cls.__name__} has no from_pretrained; use load_model_by_name(name, backend)"
            )

        def __setattr__(self, name, value):
            # A subclass may have a method of its own.
            if name in CORE and not hasattr(type(self), name):
                raise missing_attribute(self, name, LM, CORE)
            super().__setattr__(name, value)


class NamedLM(AsyncLM):
    """The base of a backend's class that loads models by name alone."""

    def __init__(self, *loaded: object, **options: object) -> None:
        """Raises: UnsupportedError: always. A model that is already loaded cannot be wrapped."""
        name = type(self).__name__
        raise UnsupportedError(
            f"{name} cannot wrap a model that is loaded already; use {name}.from_name(name)"
        )
