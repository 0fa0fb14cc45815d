"""The table of all options of all backends, made from the code: names and defaults from the class
or function that takes them, meanings from its docstring."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
from attrs import frozen

from tools.sources import found

#: The object that takes the options of each backend. ``every`` stands for the core's options, which
#: all backends have.
TAKEN_BY = {
    "every": "genlm.core.options.CoreOptions",
    "hf": "genlm.hf.options.HFOptions",
    "vllm": "genlm.vllm.lm.AsyncVirtualLM.from_name",
    "mlx": "genlm.mlx.lm.AsyncMlxLM.from_name",
    "sgl": "genlm.sgl.lm.AsyncSGLTransformer.from_name",
    "ray": "genlm.ray.options.RayOptions",
}

#: Parameters that are not options: the model itself, and names that collect the options of every
#: backend.
NO_OPTIONS = ("cls", "self", "model_name", "model_id", "options")

#: The initial value of an attribute with a factory.
FACTORIES = {"dict": "{}", "list": "[]"}


@frozen
class Option:
    """An option of a backend, with its default as the source writes it, and its meaning."""

    name: str
    default: str
    meaning: str


def options_of(backend: str) -> Iterator[Option]:
    """The options of a backend in the order of the source.

    Raises:
        ValueError: an option has no line in the docstring.
    """
    taker = found(TAKEN_BY[backend])
    meanings = {item.name: item.description for item in _described(taker)}
    for name, default in _defaults(taker):
        if name not in meanings:
            raise ValueError(f"{taker.path} does not say what {name} means")
        yield Option(name, default, meanings[name])


def _described(taker: Any) -> Iterator[Any]:
    """The lines of a docstring's arguments or attributes."""
    for section in taker.docstring.parsed:
        if section.kind.value in ("parameters", "attributes"):
            yield from section.value


def _defaults(taker: Any) -> Iterator[tuple[str, str]]:
    """The names of options with their defaults."""
    if isinstance(taker, griffe.Function):
        for parameter in taker.parameters:
            if parameter.name.lstrip("*") not in NO_OPTIONS:
                yield parameter.name, str(parameter.default)
        return
    for member in taker.members.values():
        is_field = isinstance(member, griffe.Attribute) and "property" not in member.labels
        if is_field and member.annotation is not None:
            yield member.name, _default(str(member.value))


def _default(written: str) -> str:
    """The default of an attribute: ``field(default=None, ...)`` has ``None``."""
    if not written.startswith("field("):
        return written
    if factory := re.search(r"factory=(\w+)", written):
        return FACTORIES[factory[1]]
    default = re.search(r"default=([\w.']+)", written)
    assert default, written
    return default[1]
