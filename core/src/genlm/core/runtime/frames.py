"""The frames that an error keeps alive."""

from __future__ import annotations

import contextlib
import inspect
import traceback

from genlm.core.errors import PluginError

#: The code flags of generators and coroutines, which may continue after an error.
MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def let_go(error: BaseException) -> None:
    """Drop the local variables of the calls that an error and its causes have ended; their lines
    stay. The engine's calls hold what it was computing, and errors live long: programs gather them,
    and the garbage collector finds circles late. Errors of plugins stay as they are, because their
    authors want to look into the calls."""
    met: dict[int, BaseException] = {}
    left: list[BaseException | None] = [] if isinstance(error, PluginError) else [error]
    while left:
        one = left.pop()
        if one is None or id(one) in met:
            continue
        met[id(one)] = one
        left += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & MAY_GO_ON:
                with contextlib.suppress(RuntimeError):  # the frame has not ended
                    frame.clear()
