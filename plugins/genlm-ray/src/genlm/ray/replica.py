"""A replica: one model in an actor's process, which any number of programs may call.

It is an asyncio actor around an ordinary :class:`~genlm.core.AsyncLM`. So the core does the
validation, the batching across calls, the failure isolation and the cancellation here too, and a
row that is requested during a long sample joins the engine's next step.

A program's adapters, pinned prompts and calls on this replica are its session. The session ends
when the program leaves, or when the replica has not heard from it for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from attrs import asdict, define, field

import ray
from genlm.core import AsyncLM, EngineDeadError, EngineError
from genlm.core.checks import describe_error
from genlm.core.errors import InvalidOptionError, ModelClosedError
from genlm.core.together import Then
from genlm.ray.functions import KnownFunctions, Reduced
from genlm.ray.hangs import LOOK_SECONDS, Caller, Hangs, Running
from genlm.ray.wire import (
    HOOKS,
    Ask,
    Busy,
    Description,
    Gone,
    Sent,
    Token,
    Unanswered,
    ids_of,
    portable,
    sent,
)

Method = Callable[..., Coroutine[Any, Any, Any]]

#: The concurrency group of calls that no amount of work can delay, because they have a thread of
#: their own.
WATCH = "watch"
in_watch: Callable[[Method], Method] = ray.method(concurrency_group=WATCH)

#: The most seconds for which suspects of one program keep suspects of another waiting.
TURN_SECONDS = 10.0

#: The package in which transformers puts the code of models.
OWN_CODE = "transformers_modules"

#: Seconds between the last message of a replica and the end of its process. The message is sent in
#: this time.
FAREWELL_SECONDS = 0.5


@define(eq=False)
class ProgramSession:
    """The adapters, pinned prompts and calls of one program on this replica."""

    life: int
    patience: float  # the most seconds that a call of one of its functions may take
    heard_at: float = field(factory=time.monotonic)
    over: bool = False
    tasks: set[Any] = field(factory=set)  # the tasks that end with the session
    changing: asyncio.Lock = field(factory=asyncio.Lock)
    adapters: set[str] = field(factory=set)
    pinned: dict[Ask, None] = field(factory=dict)


def in_session(method: Method) -> Method:
    """Wrap a method so that its errors can be sent, and that it ends with its program's session."""

    @wraps(method)
    async def call(self: Replica, token: Token, *args: Any) -> Any:
        session = self.session(token)
        try:
            return await method(self, session, *args)
        except asyncio.CancelledError:
            if session.over:
                raise Gone("it had not been heard of", computing=False) from None
            raise
        except (EngineDeadError, ModelClosedError) as error:
            self.die(error)
            raise
        except Exception as error:
            raise portable(error) from None

    return call


def send_own_code() -> None:
    """Pickle classes of the model's own code (``trust_remote_code``), such as its tokenizer,
    together with their code, which the program cannot import."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == OWN_CODE:
            ray.cloudpickle.register_pickle_by_value(module)


def exit_soon() -> None:
    """End the process, once its last messages have been sent."""
    asyncio.get_running_loop().call_later(FAREWELL_SECONDS, os._exit, 1)


class InnerLM(AsyncLM):
    """A model without the installed wrappers. They wrap the program's model, and would change rows
    twice."""

    def _installed_wrappers(self) -> list[object]:
        return []

    @property
    def lacking(self) -> Mapping[str, str]:
        """For each missing hook of the engine, why it is missing."""
        return self._engine.lacking


class Replica:
    """The actor. It loads in a method and not in the constructor, so that the inner backend's error
    reaches the user unchanged."""

    lm: InnerLM  # exists once the model is loaded

    def __init__(self) -> None:
        self._loading = asyncio.Lock()
        self._serves: tuple[Any, ...] = ()  # backend, model and options
        # The options as they were sent: wrappers among them may change with use.
        self._pickled = b""
        # The width of rows as they are sent, known once the model is loaded.
        self._width: int | None = None
        self._sessions: dict[str, ProgramSession] = {}
        self._hangs = Hangs()
        self._functions = KnownFunctions(self._hangs)
        self._hung: asyncio.Future[Running] | None = None
        self._watching: asyncio.Task[None] | None = None
        # The loop on which the watch's calls run.
        self._beats: asyncio.AbstractEventLoop | None = None
        # For each trial of suspects, its program and when it began.
        self._trying: list[tuple[ProgramSession, float]] = []
        self._over: Exception | None = None  # why the replica takes no more calls
        self._ending = asyncio.Event()

    # --- programs that come and go ----------------------------------------------------------------

    async def open(
        self, token: Token, lease: float | None, patience: float, *model: Any
    ) -> Description:
        """Begin a session without adapters and pinned prompts, and load the model if necessary.

        Args:
            token: The session.
            lease: Seconds after which a silent session ends; ``None`` means no limit.
            patience: The most seconds that a call of one of the program's functions of rows may
                take.
            *model: The backend, the model's name and the options.

        Raises:
            InvalidOptionError: this replica serves another model (of a fleet of the same name).
            Exception: the backend's own error.
        """
        program, life = token
        await self._finish(program)
        if self._over is not None:
            raise self._over
        session = self._sessions[program] = ProgramSession(life, patience)
        try:
            async with self._loading:  # several programs may open sessions at once
                await self._load(*model)
        except Exception as error:
            self._sessions.pop(program, None)
            raise portable(error) from None
        session.heard_at = time.monotonic()
        if lease is not None:
            session.tasks.add(asyncio.create_task(self._expire(program, session, lease)))
        lm = self.lm
        # Rows are sent with the tokenizer's width, since ids beyond it mean nothing. Ids that the
        # model lacks are left out too; the program's core fills them with -inf again.
        self._width = min(lm.context([0]).vocab_size, len(lm.byte_vocab))
        hooks = frozenset(hook for hook in HOOKS if lm.supports(hook))
        limit, ends = lm.max_context, lm.eos_token_ids
        return Description(hooks, lm.tokenizer, self._width, limit, ends, lm.lacking)

    async def _load(self, backend: str, model: str, options: Mapping[str, Any]) -> None:
        pickled = ray.cloudpickle.dumps(options)
        if not self._serves:
            # Rows are cached once, in the program.
            ours = options if "cache_opts" in options else {"cache_size": 0, **options}
            self.lm = await asyncio.to_thread(InnerLM.from_backend, backend, model, ours)
            send_own_code()
            self._watching = asyncio.create_task(self._watch_functions())
            self._serves, self._pickled = (backend, model, options), pickled
            return
        there, served, with_these = self._serves
        same = pickled == self._pickled or options == with_these
        if not ((backend, model) == (there, served) and same):
            raise InvalidOptionError(
                f"the fleet serves {served!r} on {there!r} with {with_these}, not {model!r} on "
                f"{backend!r} with {options}; give it another name, or the same model and options"
            )

    async def _expire(self, program: str, session: ProgramSession, lease: float) -> None:
        """End a session that has been silent for too long."""
        while (left := session.heard_at + lease - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        await self._finish(program)

    async def _finish(self, program: str) -> None:
        """End a session, with all that it holds."""
        session = self._sessions.pop(program, None)
        if session is None:
            return
        session.over = True
        for task in session.tasks - {asyncio.current_task()}:
            task.cancel()
        async with session.changing:  # wait until the entry that is being added is there
            for key in session.adapters:
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self.lm.remove_lora, key)
            if session.pinned:
                await self._clear()

    async def leave(self, token: Token, end: bool) -> bool:
        """End a program's session.

        Returns:
            Whether the process ends too. It does if ``end`` is true, no other program uses it, and
            it has not rejected this program. It ends by itself, since the calling program may have
            ended by then.
        """
        refused = self._serves and token[0] not in self._sessions
        await self._finish(token[0])
        if not end or self._sessions or refused:
            return False
        self._over = self._over or Gone("the replica is being ended", computing=False)
        if self._serves:
            await asyncio.to_thread(self.lm.close)
        exit_soon()
        return True

    @in_watch
    async def beat(self, token: Token, seconds: float) -> None:
        """Return after some time, even while the engine is at work."""
        self.session(token).heard_at = time.monotonic()
        self._beats = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        self.session(token).heard_at = time.monotonic()

    def _hanging(self) -> asyncio.Future[Running]:
        """A future that resolves to the call of a function that hangs."""
        if self._hung is None:
            self._hung = asyncio.get_running_loop().create_future()
        return self._hung

    async def _watch_functions(self) -> None:
        """End the process when a function of rows hangs, because it occupies the engine's thread
        for ever."""
        while (running := self._hangs.look(time.monotonic())) is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        self._over = Gone(f"{running.name} did not return", computing=False)
        self._hanging().set_result(running)
        exit_soon()
        await asyncio.sleep(FAREWELL_SECONDS / 2)  # let the answers leave first
        if self._beats is not None:
            self._beats.call_soon_threadsafe(self._ending.set)

    @in_watch
    async def end(self) -> None:
        """Tell all programs that the fleet has been ended, and end the process."""
        self._over = Gone("the fleet has been ended", computing=False, ended=True)
        self._ending.set()
        exit_soon()
        await asyncio.sleep(FAREWELL_SECONDS)

    def die(self, error: Exception) -> None:
        """End the process after a fatal error of the engine, so that Ray frees all its
        resources."""
        if self._over is None:
            self._over = error
            exit_soon()

    def session(self, token: Token) -> ProgramSession:
        """The session of a call.

        Raises:
            Exception: why the session no longer exists.
        """
        if self._over is not None:
            raise self._over
        session = self._sessions.get(token[0])
        if session is None or session.life != token[1]:
            raise Gone("the replica does not know the program", computing=False)
        return session

    # --- requests ---------------------------------------------------------------------------------

    @in_session
    async def answer(self, session: ProgramSession, asked: Sequence[Ask], on_trial: bool) -> Sent:
        task = asyncio.current_task()
        self._learn(asked)
        session.tasks.add(task)
        try:
            with self._trial(session) if on_trial else contextlib.nullcontext():
                found = await self._found(session, asked)
        finally:
            session.tasks.discard(task)
        for each in found:
            if isinstance(each, (EngineDeadError, ModelClosedError)):
                raise each
        return sent(found)

    def _learn(self, asked: Sequence[Ask]) -> None:
        """Take the functions of a call.

        Raises:
            Lacking: one has not come.
        """
        codes: dict[str, bytes | None] = {}
        for *_, reduced in asked:
            if reduced is not None and not codes.get(reduced[0]):
                codes[reduced[0]] = reduced[1]
        for key, pickled in codes.items():
            self._functions.learn(key, pickled)

    async def _found(self, session: ProgramSession, asked: Sequence[Ask]) -> list[Any]:
        """The result of each request, or the error in its place. Once a function hangs, what is
        there."""
        callers = [Caller(session.patience) for _ in asked]
        parts = together(asked)
        tasks = [
            asyncio.ensure_future(
                self._answer([asked[at] for at in places], [callers[at] for at in places])
            )
            for places in parts
        ]
        answered = asyncio.gather(*tasks, return_exceptions=True)
        try:
            either: list[asyncio.Future[Any]] = [answered, self._hanging()]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hung = None if answered.done() else self._hanging().result()
            found: list[Any] = [None] * len(asked)
            for places, task in zip(parts, tasks, strict=True):
                own = [callers[at] for at in places]
                for at, each in zip(places, _outcomes(task, own, hung), strict=True):
                    found[at] = each
            return found
        finally:
            answered.cancel()

    async def _answer(self, asked: Sequence[Ask], callers: Sequence[Caller]) -> Sequence[Any]:
        """The results of some requests; of several if they are functions of rows, all with the same
        adapter."""
        if asked[0][-1] is not None:
            return await self._reduce(asked, callers)
        (one,) = asked
        ids, (_, lora, cold, drawn, scored, _) = ids_of(one), one
        if drawn is not None:
            params = asdict(drawn)
            stop = sorted(params.pop("stop_token_ids"))
            return [await self.lm.sample(ids, eos_token_ids=stop, lora_name=lora, **params)]
        if scored is not None:
            return [await self.lm.sequence_logprobs(ids, scored, lora_name=lora)]
        if cold:
            uncached = self.lm.next_token_logprobs_uncached
            row = await asyncio.to_thread(uncached, ids, lora_name=lora)
        else:
            row = await self.lm.next_token_logprobs(ids, lora_name=lora)
        return [row[: self._width]]

    async def _reduce(self, asked: Sequence[Ask], callers: Sequence[Caller]) -> Sequence[Any]:
        """The results of functions of rows, or the errors in their places. All of them are one call
        of the model: a task and a future for each would take most of the replica's time."""
        lora, found = asked[0][1], dict[int, Any]()
        thens: dict[int, Then[Any]] = {}
        for at, (one, caller) in enumerate(zip(asked, callers, strict=True)):
            key, _, given = one[-1]  # type: ignore[misc]
            then = self._functions.then(key, caller, given)
            if isinstance(then, Exception):
                found[at] = then
            else:
                thens[at] = then
        made = await self.lm.batch_next_token_logprobs(
            [ids_of(asked[at]) for at in thens],
            lora_name=lora,
            then=[*thens.values()],
            return_exceptions=True,
        )
        for at, each in zip(thens, made, strict=True):
            if isinstance(each, (EngineDeadError, ModelClosedError)):
                self.lm.__enter__()  # raises if it is this model that has ended
                each = EngineError(f"a function of rows raised {describe_error(each)}")
            found[at] = each
        return Reduced.each([found[at] for at in range(len(asked))])

    @contextlib.contextmanager
    def _trial(self, session: ProgramSession) -> Iterator[None]:
        """Inside the block, this program alone tries suspects; otherwise another program's suspects
        could be blamed for a death too.

        Raises:
            Busy: suspects of another program are being tried, and have not run for ``TURN_SECONDS``
                yet.
        """
        now = time.monotonic()
        if any(
            whose is not session and now < since + TURN_SECONDS for whose, since in self._trying
        ):
            raise Busy("another program tries suspects")
        self._trying.append(trial := (session, now))
        try:
            yield
        finally:
            self._trying.remove(trial)

    # --- state: called while nothing of this program is in flight ---------------------------------

    @in_session
    async def add_adapter(self, session: ProgramSession, key: str, path: str) -> None:
        async with session.changing:
            with self._trial(session):
                await asyncio.to_thread(self.lm.add_new_lora, path, key)
            session.adapters.add(key)

    @in_session
    async def remove_adapter(self, session: ProgramSession, key: str) -> None:
        """Drop an adapter, and the prompts that are pinned with it."""
        async with session.changing:
            session.adapters.discard(key)
            session.pinned = {ask: None for ask in session.pinned if ask[1] != key}
            await asyncio.to_thread(self.lm.remove_lora, key)

    @in_session
    async def pin(self, session: ProgramSession, asked: Ask) -> None:
        async with session.changing:
            with self._trial(session):
                await self._pin(asked)
            session.pinned[asked] = None

    @in_session
    async def unpin(self, session: ProgramSession, asked: Ask) -> None:
        async with session.changing:
            session.pinned.pop(asked, None)
            await self._clear()

    @in_session
    async def clear(self, session: ProgramSession) -> None:
        """Drop the whole KV cache, except for prompts that other programs have pinned."""
        async with session.changing:
            session.pinned.clear()
            await self._clear()

    async def _clear(self) -> None:
        await asyncio.to_thread(self.lm.clear_kv_cache)
        for asked in [ask for session in self._sessions.values() for ask in session.pinned]:
            with contextlib.suppress(Exception):  # its adapter may have been removed meanwhile
                await self._pin(asked)

    async def _pin(self, asked: Ask) -> None:
        await asyncio.to_thread(self.lm.cache_kv, ids_of(asked), lora_name=asked[1])


def together(asked: Sequence[Ask]) -> list[list[int]]:
    """The places of requests that are answered together: functions of rows with the same adapter.
    Each other request is alone."""
    alike: dict[Any, list[int]] = {}
    for at, one in enumerate(asked):
        alike.setdefault(at if one[-1] is None else ("adapter", one[1]), []).append(at)
    return [*alike.values()]


def _outcomes(
    task: asyncio.Task[Sequence[Any]], callers: Sequence[Caller], hung: Running | None
) -> Sequence[Any]:
    """The results of a task for its callers, or its error. ``hung`` is the call that the task may
    be waiting for."""
    if not task.done():
        assert hung is not None
        return [_left(caller, hung) for caller in callers]
    if task.cancelled():
        return [Unanswered()] * len(callers)
    error = task.exception()
    return task.result() if error is None else [error] * len(callers)


def _left(caller: Caller, hung: Running) -> Any:
    """The result for a caller that has no answer when a function hangs: an error if its row was
    given to that function."""
    if caller not in hung.callers:
        return Unanswered()
    return EngineError(
        f"{hung.name} did not return within function_timeout={caller.patience:g} seconds for "
        f"{len(hung.callers)} rows; its replica is replaced, and other requests go on. Mend the "
        "function, or raise function_timeout"
    )
