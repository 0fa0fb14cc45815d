"""The values that travel between callers, the core and engines. All are immutable."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, runtime_checkable

from attrs import Factory, asdict, field, frozen
from attrs.validators import instance_of

from genlm.core.context import Context, as_context
from genlm.core.context import TokenIds as TokenIds


@frozen
class Adapter:
    """A LoRA adapter, as it was bound to a name at one time.

    Binding a name again makes a new ``Adapter`` with a new ``version``. Versions start at 1, grow,
    and are never reused while the model lives, so ``version`` alone may be an engine's key for
    weights and kept state.

    Attributes:
        name: The name that the adapter was bound to.
        path: The adapter's folder, as the user gave it.
        version: The number of the binding.
    """

    name: str
    path: str
    version: int


@frozen(repr=False)
class Query:
    """One request: the log-probabilities of the token that follows ``token_ids``.

    The core has checked it: ``token_ids`` is a non-empty tuple of plain ``int`` in
    ``range(engine.vocab_size)``, no longer than ``engine.max_context``; ``adapter`` is registered
    with the engine. Equal queries have equal answers.

    Attributes:
        context: The context. A query is made from one, or from a tuple of ids.
        adapter: The LoRA adapter to apply; ``None`` is the base model.
        cold: Whether to compute the answer without reading any state that was kept from other
            queries. The engine may keep state from this one. The core sends a cold query alone; its
            row is the reference for warm rows.
    """

    context: Context = field(alias="token_ids", converter=as_context)
    adapter: Adapter | None = None
    cold: bool = False

    @property
    def token_ids(self) -> TokenIds:
        """The context as a tuple of ids, made when it is first asked for."""
        return self.context.token_ids

    @property
    def length(self) -> int:
        """The number of tokens in the context. Does not make the tuple of ids."""
        return self.context.length

    def extended(self, token_ids: TokenIds) -> Query:
        """A query for this context followed by more tokens, with the same adapter and ``cold``.

        Args:
            token_ids: The tokens, which the caller has checked.
        """
        return Query(self.context.followed_by(token_ids), self.adapter, self.cold)

    def __hash__(self) -> int:
        if self.adapter is None:
            return self.context.hash_value
        return hash((self.context.hash_value, self.adapter.version))

    def __str__(self) -> str:
        """A description for messages: the first tokens, the length and the adapter."""
        some = ", ".join(map(str, self.token_ids[:8])) + (", ..." if self.length > 8 else "")
        adapter = f" with adapter {self.adapter.name!r}" if self.adapter else ""
        return f"the context [{some}] of {self.length} tokens{adapter}"

    def __repr__(self) -> str:
        return f"Query(token_ids={self.token_ids}, adapter={self.adapter}, cold={self.cold})"


@frozen
class SamplingParams:
    """How to draw one continuation. The core has checked every field.

    The filters apply in this order, as in transformers and vLLM: temperature, ``top_k``, ``top_p``
    of the remaining mass, ``min_p``. If tokens at the edge of ``top_k`` or ``top_p`` have equal
    probabilities, the core keeps the lowest ids; an engine's own sampler may keep all of them, as
    vLLM's does.

    Attributes:
        max_tokens: The most tokens to draw; at least 1.
        stop_token_ids: Drawing one of these ends the continuation; it is not part of the result.
        temperature: Divides the log-probabilities before drawing; 0 takes the most likely token
            (lowest id on a tie).
        seed: Makes the result reproducible, whatever else is in the batch; ``None`` takes fresh
            entropy.
        top_k: Draw among the ``top_k`` most likely tokens; ``None`` is all.
        top_p: Draw among the fewest most likely tokens that together have at least this share of
            the remaining mass; ``None`` is all.
        min_p: Draw among tokens at least this fraction as likely as the most likely one; ``None``
            is all. It is never passed to an engine: if it is given, the core draws from rows.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    seed: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@frozen(eq=False)
class SampleRequest:
    """A request for one drawn continuation. No two are equal: each is a separate sample.

    Attributes:
        query: The context and the adapter.
        params: How to draw.
    """

    query: Query
    params: SamplingParams


@frozen
class ScoreRequest:
    """A request for the log-probability of each token of a continuation.

    Attributes:
        query: The context and the adapter.
        continuation: The tokens to score; at least one.
    """

    query: Query
    continuation: TokenIds


@frozen(eq=False)
class ReductionRequest:
    """A request for the result of a function of a row, computed on the row's device. No two are
    equal: each has its own arguments.

    Attributes:
        query: The context and the adapter of the row.
        then: The function (``then.function``) and the caller's arguments (``then.given``): a
            :class:`~genlm.core.together.Then`.
    """

    query: Query
    then: Any


Request = Query | SampleRequest | ScoreRequest | ReductionRequest


def query_of(request: Request) -> Query:
    """The query of a request of any kind: its context and adapter."""
    return request if isinstance(request, Query) else request.query


def why_unavailable(info: BackendInfo) -> str | None:
    """The reason why a backend cannot run here, with the remedy; ``None`` if it can.

    Args:
        info: The backend. The modules of ``info.needs`` must be installed, and the installed
            version of ``info.engine`` must satisfy ``info.versions``.
    """
    if missing := [name for name in info.needs if find_spec(name) is None]:
        remedy = info.install or f"pip install {' '.join(missing)}"
        return f"{' and '.join(missing)} not installed; {remedy}"
    if info.versions is None:
        return None
    from packaging.specifiers import SpecifierSet

    try:
        installed = version(info.engine)
    except PackageNotFoundError:  # for a module without a distribution, only loading shows it
        return None
    if SpecifierSet(info.versions).contains(installed, prereleases=True):
        return None
    wanted = f"{info.engine}{info.versions}"
    return (
        f"{info.engine} {installed} is installed, and this version of the plugin is for {wanted}; "
        f"pip install '{wanted}', or take another version of the plugin"
    )


@frozen
class BackendInfo:
    """A backend's description of itself, given without importing its engine.

    Attributes:
        summary: One line for ``genlm backends``.
        engine: The distribution that provides the engine, for instance ``"transformers"``.
        needs: Modules that must be installed, such as ``("torch", "transformers")``. They are
            looked for and not imported.
        install: How to install them, if ``pip install`` with their names is not the way.
        versions: The versions of ``engine`` that the plugin was tested with, such as
            ``">=0.30,<0.34"``, for a plugin that must reject others. It then depends on
            ``packaging``.
        unavailable: Why the backend cannot run on this machine, with the remedy; ``None`` if it
            can. By default it is made from ``needs`` and ``versions``.
        preference: If no backend is named, the available one with the highest preference is chosen.
            A backend with a negative preference is used only when it is named.
    """

    summary: str
    engine: str
    needs: Sequence[str] = ()
    install: str | None = None
    versions: str | None = None
    unavailable: str | None = field(default=Factory(why_unavailable, takes_self=True))
    preference: int = field(default=-1, validator=instance_of(int))

    @property
    def available(self) -> bool:
        """Whether the backend can run on this machine."""
        return self.unavailable is None


@frozen
class Stats:
    """Counters of a model's work since it was loaded. They never go down.

    Attributes:
        requests: Requests by any method: rows, samples and scores.
        cache_hits: Requests answered from the output cache.
        dedup_hits: Requests that shared the answer of an equal pending one.
        cancelled: Requests whose callers were cancelled, or failed by another request of the same
            call, before the engine took them; also while they were in flight, if the engine drops
            such requests.
        failed: Requests that ended in an error.
        batches: Calls of the engine's evaluation hooks that answered something.
        rows: Rows that the engine computed.
        draws: Continuations that the engine drew itself.
        scores: Continuations that the engine scored itself.
        reductions: Functions of rows that the engine applied itself, one for each caller.
        largest_batch: The most requests in one call.
        failed_calls: Calls of the engine's evaluation hooks that raised. The core asks again in
            smaller parts, so a caller may notice only that it is slower; the first one is logged as
            a warning.
        queue_seconds: Time from the release of requests to the engine thread until it took them.
            This and the following are seconds of wall time.
        engine_seconds: Time in the engine's evaluation hooks.
        alignment_seconds: Time for fitting rows to the tokenizer's vocabulary, and in
            ``genlm_process_logprobs``.
        caching_seconds: The engine thread's time for looking in the output cache again, and for
            storing new rows there.
        delivery_seconds: Time from when rows were ready until their callers' futures had them,
            summed over event loops.
    """

    requests: int = 0
    cache_hits: int = 0
    dedup_hits: int = 0
    cancelled: int = 0
    failed: int = 0
    batches: int = 0
    rows: int = 0
    draws: int = 0
    scores: int = 0
    reductions: int = 0
    largest_batch: int = 0
    failed_calls: int = 0
    queue_seconds: float = 0.0
    engine_seconds: float = 0.0
    alignment_seconds: float = 0.0
    caching_seconds: float = 0.0
    delivery_seconds: float = 0.0

    def __sub__(self, before: Stats) -> Stats:
        """The work since ``before``, an earlier value of the same model. Only ``largest_batch``
        covers the whole time, because a difference of maxima has no meaning."""
        if not isinstance(before, Stats):
            return NotImplemented
        earlier = before.as_dict()
        grown = {name: now - earlier[name] for name, now in self.as_dict().items()}
        return Stats(**{**grown, "largest_batch": self.largest_batch})

    def as_dict(self) -> dict[str, Any]:
        """The counters by name, for instance for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """A small table: a line for each counter."""
        values = self.as_dict()
        width = max(map(len, values))
        return "\n".join(
            f"{name:{width}}  {value:12.3f}"
            if isinstance(value, float)
            else f"{name:{width}}  {value:8d}"
            for name, value in values.items()
        )


class Answer(NamedTuple):
    """A continuous engine's answer to one request: its result, or why it has none.

    Attributes:
        request: The request as it was admitted: a :class:`Query`, a :class:`SampleRequest`, a
            :class:`ScoreRequest` or a :class:`ReductionRequest`.
        result: The result, or the request's own exception. For a query the row,
            ``[vocab_size]`` float32 log-probabilities. For a sample the ids drawn, without the stop
            token. For a score ``[len(continuation)]`` float32 log-probabilities. If it is ``None``
            for a sample or a score, the core computes the sample or score from rows.
    """

    request: Request
    result: Any


@runtime_checkable
class Tokenizer(Protocol):
    """The methods that an engine's ``tokenizer`` must have if it is not a Hugging Face
    tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of every token, by id; an unused id gives ``b""``."""
        ...


class Engine(Protocol):
    """The result of ``genlm_load``: a plain object with these attributes and any of the engine
    hooks.

    Attributes:
        tokenizer: A Hugging Face tokenizer, or any object with the methods of :class:`Tokenizer`.
        vocab_size: The width of the engine's rows; token ids in ``range(vocab_size)`` are valid
            input. It may exceed the tokenizer's vocabulary (padded embeddings): the core then drops
            the surplus and renormalises, unless ``genlm_step`` has left the surplus out.
        max_context: The longest context, in tokens, for which a row can be asked; ``None`` if there
            is no limit.
        device: Where rows live, as PyTorch spells it: ``"cpu"``, ``"cuda:0"``.
        model: The engine's own model object, given to users as ``lm.underlying_model``.

    An engine may have two further attributes:

    - ``eos_token_ids``: tokens that end a text besides the tokenizer's own, such as those of the
      model's ``generation_config.json`` (:func:`genlm.kit.model_files.eos_token_ids` reads them).
      By default, samples end at all of them.
    - ``lacking``: a mapping from the names of hooks that the engine lacks to the reason and the
      remedy, for messages.
    """

    # These are properties, because the core only reads them: an engine may have plain attributes,
    # of narrower types.
    @property
    def tokenizer(self) -> Any: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int | None: ...

    @property
    def device(self) -> str: ...

    @property
    def model(self) -> Any: ...
