"""The trie as people see it."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from genlm.core import InvalidInputError, InvalidOptionError
from genlm.core.tokenization import Token
from genlm.core.trie import TokenCharacterTrie

WORDS = [b"the", b"then", b"\n\t", "é".encode(), b"\xff", b'<b>"\\N</script>', b" x"]
WEIGHTS = [0.5, 0.25, 0.1, 0.05, 0.05, 0.03, 0.02]


@pytest.fixture(scope="module")
def trie():
    return TokenCharacterTrie(Token.vocabulary(WORDS))


@pytest.fixture(scope="module")
def sums(trie):
    return trie.weight_sum(WEIGHTS)


# --- Graphviz -------------------------------------------------------------------------------------


@pytest.fixture
def graphviz():
    return pytest.importorskip("graphviz", reason="the package graphviz is not installed")


def test_the_drawing_has_every_node_and_edge(graphviz, trie, sums):
    source = trie.visualize(sums).source
    assert len(re.findall(r"^\t\w+ \[label=", source, re.MULTILINE)) == len(trie)
    assert source.count(" -> ") == len(trie) - 1
    assert source.count("shape=doublecircle") == len(WORDS)
    assert f"{trie.find(b'the')}\n'the'\n0.75" in source
    assert "End-of-Token (position 1)" in source
    assert 'fillcolor="#40ff40"' in source  # a quarter less than all the mass


def test_without_weights_there_are_none_in_the_drawing(graphviz, trie):
    source = trie.visualize().source
    assert f"{trie.find(b'the')}\n'the'\"" in source
    assert source.count('fillcolor="#ffffff"') == len(trie)


def test_bytes_are_escaped(graphviz, trie):
    source = trie.visualize().source
    assert r"'\\n\\t'" in source  # Graphviz shows each pair of backslashes as one
    assert r"'\\xff'" in source
    assert "'é'" in source
    assert r"\"\\N" in source


def test_a_large_trie_is_pruned_to_its_heaviest_part(graphviz, trie, sums):
    source = trie.visualize(sums, max_nodes=5).source
    assert source.count("shape=circle") + source.count("shape=doublecircle") == 5
    assert "'the'" in source
    assert "'é'" not in source
    assert '"5 more"' in source  # at the root, of six children


def test_as_much_is_drawn_as_people_can_look_at(graphviz):
    trie = TokenCharacterTrie([n.to_bytes(2, "big") for n in range(10_000)])
    assert trie.visualize().source.count("circle") == 100
    (nodes,) = re.findall(r'"node":\[(.*?)\]', trie.visualize(format="html"))
    assert nodes.count(",") == 20_000 - 1


def test_graphviz_missing_is_said(trie, monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match=r"pip install .*\[visualize\]"):
        trie.visualize()


@pytest.mark.parametrize("format", ["graphviz", "html"])
def test_weights_by_item_are_refused(trie, format):
    if format == "graphviz":
        pytest.importorskip("graphviz", reason="the package graphviz is not installed")
    with pytest.raises(InvalidInputError, match="weights by node"):
        trie.visualize(WEIGHTS, format=format)


def test_options_are_checked(trie):
    with pytest.raises(InvalidOptionError, match="'graphviz' or 'html'"):
        trie.visualize(format="svg")
    with pytest.raises(InvalidOptionError, match="at least 1"):
        trie.visualize(format="html", max_nodes=0)
    assert trie.visualize(format="html", max_nodes=1)


def test_a_symbol_that_is_no_byte_is_written_as_it_is():
    assert '"256"' in TokenCharacterTrie([(256,)]).visualize(format="html")


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def show(tmp_path_factory):
    """Opens a page in Chromium and gives the document as it is after its scripts have run."""
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip(
            "no Chromium is installed: no program chromium, chromium-browser or google-chrome"
        )
    folder = tmp_path_factory.mktemp("browser")

    def show(page, address=""):
        file = folder / "trie.html"
        file.write_text(page, encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
        ]
        # The page's script is done when the page has loaded. A budget of virtual time, as advised
        # for others, may be over before that on a busy machine.
        command = [chromium, *flags, "--dump-dom", file.as_uri() + address]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120
        ).stdout.partition("<main>")[2]

    return show


def rows(document):
    """The prefixes on show."""
    return [html.unescape(prefix) for prefix in re.findall(r'data-prefix="([^"]*)"', document)]


def test_the_page_opens_at_the_root_with_the_heaviest_child_first(show, trie, sums):
    document = show(trie.visualize(sums, format="html"))
    assert rows(document)[:3] == ["", "t", r"\n"]
    assert len(rows(document)) == 1 + len(trie.children[trie.root])
    assert re.findall(r'class="weight">([^<]*)', document)[:3] == ["1", "0.75", "0.1"]
    assert re.findall(r"width: ([0-9.]+)%", document)[:3] == ["100", "75", "10"]


def test_a_node_is_opened(show, trie, sums):
    document = show(trie.visualize(sums, format="html"), f"#node={trie.find(b'the')}")
    assert rows(document)[:5] == ["", "t", "th", "the", "the"]
    assert "item 0" in document
    (found,) = re.findall(r'<[^>]*class="found"[^>]*>', document)
    assert rows(found) == ["the"]


def test_a_search_finds_prefixes(show, trie, sums):
    document = show(trie.visualize(sums, format="html"), "#search=the")
    results = document.partition('id="tree"')[0]
    assert rows(results) == ["the", "then"]


def test_no_word_breaks_the_page(show, trie, sums):
    document = show(trie.visualize(sums, format="html"), "#search=script>")
    assert rows(document.partition('id="tree"')[0]) == [r'<b>"\N</script>']


def test_a_pruned_page_says_what_is_missing(show, trie, sums):
    document = show(trie.visualize(sums, format="html", max_nodes=4))
    assert "5 more, not in this page" in document


def test_log_weights_can_be_drawn(show, trie):
    maxima = trie.weight_max([*np.log(WEIGHTS[:-1]), -np.inf])
    document = show(trie.visualize(maxima, format="html"))
    assert re.findall(r"width: ([0-9.]+)%", document)[0] == "100"
    assert "-inf" in document
