"""Arguments that several subcommands take, and how they are read."""

from __future__ import annotations

import argparse
import json
from typing import Any, TypeAlias

from genlm.core.errors import InvalidOptionError

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
    """``NAME=VALUE`` with the value read as JSON, or as a string where it is not JSON."""
    name, value = named(flag, given)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a string needs no quotes
