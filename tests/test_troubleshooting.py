"""The headings of the page on troubleshooting are the words of the errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from genlm.core import load_model_by_name
from genlm.core.errors import GenlmError
from genlm.kit.model_files import require_model

PAGE = Path(__file__).parents[1] / "docs/how-to/troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+?)`(?: \(`\w+`\))?$", PAGE.read_text(), re.MULTILINE)


def said(call):
    with pytest.raises(GenlmError) as raised:
        call()
    return str(raised.value)


@pytest.fixture
def messages(mock, install, tmp_path):
    install("broken", "import no_such_module")
    lm, closed = mock(max_context=4), mock()
    closed.close()
    asking = mock(
        on_batch=lambda queries: found.append(said(lambda: asking.next_token_logprobs_sync([9])))
    )
    found: list[str] = []
    asking.next_token_logprobs_sync([1])
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, said(lambda: lm.next_token_logprobs_sync([1])).encode())
        os._exit(0)
    os.close(writer)
    return [
        *found,
        os.read(reader, 10_000).decode(),
        said(lambda: load_model_by_name("any", backend="not-there")),
        said(lambda: load_model_by_name("any", backend="broken")),
        said(lambda: load_model_by_name("mock", backend="mock", colour="red")),
        said(lambda: require_model(str(tmp_path))),
        said(lambda: lm.next_token_logprobs_sync([1] * 9)),
        said(lambda: lm.next_token_logprobs_sync([10**6])),
        said(lambda: lm.next_token_logprobs_sync("text")),
        said(lambda: closed.next_token_logprobs_sync([1])),
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_every_heading_is_the_text_of_an_error(messages):
    assert len(HEADINGS) == 10
    for heading in HEADINGS:
        words = re.sub(r"'(hf|vllm)'|mock$", "...", heading)
        pattern = ".*".join(map(re.escape, words.split("...")))
        assert any(re.search(pattern, message) for message in messages), heading
