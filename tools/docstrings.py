"""A Griffe extension that turns roles in docstrings, like those of Sphinx, into links of the
site."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`(~?)([\w.]+)`")


class Roles(griffe.Extension):  # type: ignore[misc]
    """Turns ``:class:`~genlm.core.types.Query` `` into a link named ``Query``.

    A link to what has no place in the site stays code.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(
                lambda role: link(obj, *role.groups()), obj.docstring.value
            )


def link(obj: griffe.Object, short: str, name: str) -> str:
    try:
        path = obj.resolve(name)
    except griffe.NameResolutionError:
        path = name
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'
