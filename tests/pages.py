"""The blocks of Python that a page shows, and how they are run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: A hub name of a model, as a Python string.
HUB_MODEL = re.compile(r'"(?:HuggingFaceTB|mlx-community)/[\w.-]+"')


def parsed(block: str) -> ast.Module:
    """A block parsed as a module. A block with methods is parsed as the body of a class."""
    block = block + "    ...\n" if block.rstrip().endswith(":") else block
    return ast.parse("class Part:\n" + block if block.startswith("    ") else block)


def run_page(page: Path, text: str) -> dict[str, Any]:
    """Run the blocks of a page's text, one after the other, and return the names that they bind."""
    written = vars(ModuleType("__main__"))
    for block in FENCED.findall(text):
        code = compile(parsed(block), str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, written))
        else:
            exec(code, written)
    return written


def run_readme(plugin: Path, model: str, left_out: str = "") -> None:
    """Run the README of a plugin on its engine, with a local model."""
    page = plugin / "README.md"
    text = HUB_MODEL.sub(lambda _: repr(model), page.read_text("utf-8"))
    written = run_page(page, text.replace(left_out, ""))
    written["lm"].close()
