"""A page is read on GitHub too, where its links are files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for pattern in ("*.md", "*/README.md", "*/*/README.md", "docs/**/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
    if not any(part in (".nox", ".venv", "build") for part in page.relative_to(ROOT).parts)
]
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text("utf-8")) if ":" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
