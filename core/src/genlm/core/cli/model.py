"""Arguments that several subcommands take, and loading the model that they describe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, TypeAlias

from genlm.core.cli.terminal import Progress
from genlm.core.errors import InvalidOptionError
from genlm.core.lm import AsyncLM, load_model_by_name

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def named(flag: str, given: str) -> tuple[str, str]:
    """The two sides of ``NAME=VALUE``.

    Raises:
        InvalidOptionError: one of them is missing.
    """
    name, separator, value = given.partition("=")
    if not (name and separator and value):
        raise InvalidOptionError(f"{flag} {given!r}: give {flag} NAME=VALUE")
    return name, value


def parsed(flag: str, given: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``. The value is read as JSON, or as a string if it is not JSON."""
    name, value = named(flag, given)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a string needs no quotes


class ModelFirst(argparse.Action):
    """Rejects ``--model``, which other programs have. Here the model is the first argument."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        parser.error(f"the model comes first, without --model: {parser.prog} MODEL ...")


def add_model(
    parser: argparse.ArgumentParser,
    backend: str = "an installed backend; default the best for this machine",
    **options: Any,
) -> None:
    """The arguments that say which model to load, and on which backend."""
    parser.add_argument("model", help="a path or hub name, as the backend takes it")
    parser.add_argument("--model", action=ModelFirst, dest="given", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=backend, **options)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further option of the backend, as JSON",
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the text that the model is to continue."""
    parser.add_argument("prompt", help="the text to continue; - reads it from the standard input")
    parser.add_argument(
        "--chat", action="store_true", help="give the prompt as a user's message, by the template"
    )


def prompt_ids(lm: AsyncLM, options: argparse.Namespace) -> list[int]:
    """The token ids of the prompt."""
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    return (
        lm.apply_chat_template([{"role": "user", "content": text}])
        if options.chat
        else lm.encode(text)
    )


def own_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the backend that ``--option`` gives."""
    return dict(parsed("--option", given) for given in options.option)


@contextlib.contextmanager
def loaded(
    options: argparse.Namespace, backend: str | None, **more: Any
) -> Iterator[tuple[AsyncLM, TextIO]]:
    """Inside the block, the model and a stream for the command's own output. Output of the engine
    goes to the standard error.

    Args:
        options: The options of the command.
        backend: The backend that loads the model.
        **more: Options of the load that the command itself gives.
    """
    own = {**own_options(options), **more}
    # Set before transformers is imported; its progress bars do not check this.
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    out = sys.stdout
    progress = Progress()
    with contextlib.redirect_stdout(sys.stderr):
        progress.show(f"loading {options.model}" + (f" on {backend} ..." if backend else " ..."))
        try:
            lm = load_model_by_name(options.model, backend, own)
        finally:
            progress.clear()
        with lm:
            yield lm, out
