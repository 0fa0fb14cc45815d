"""examples/server.py, used by real HTTP clients."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from genlm.core import InvalidInputError, MockAsyncLM

from ..conftest import PATIENCE

pytestmark = pytest.mark.any_version

httpx = pytest.importorskip("httpx", reason="httpx is not installed here")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed here")
pytest.importorskip("fastapi", reason="fastapi is not installed here")


class Model(MockAsyncLM):
    """Notes when a stream has ended, and computes only while it may. No stream ends by chance."""

    def __init__(self):
        super().__init__()
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.ended = threading.Event()

    def _get_logprobs(self, token_ids):
        assert self.may_compute.wait(PATIENCE)
        return super()._get_logprobs(token_ids)

    async def stream(self, *arguments, **options):
        try:
            async for token_id in super().stream(*arguments, eos_token_ids=[], **options):
                yield token_id
        finally:
            self.ended.set()


@pytest.fixture
def lm():
    with Model() as lm:
        yield lm
        lm.may_compute.set()


@contextmanager
def serving(app):
    """A client of the app, which runs on a free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=[[bound]])
        thread.start()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            with httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(PATIENCE)


@pytest.fixture
def client(example, lm):
    with serving(example("server").app_of(lm)) as client:
        yield client


def test_twelve_clients_get_the_rows_of_the_model(client, lm):
    texts = [f"text {number}" for number in range(12)]
    lm.may_compute.clear()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(client.post, "/top", json={"text": t, "top": 1}) for t in texts]
        lm.may_compute.set()
        answers = [one.result().json() for one in asked]
    for text, ((found, logprob),) in zip(texts, answers, strict=True):
        (best,) = lm.top_logprobs(lm.next_token_logprobs_sync(lm.encode(text)), 1)
        assert (found, logprob) == (best.text, pytest.approx(best.logprob))


def test_server_scores_samples_and_rejects_bad_requests(client, lm):
    score = client.post("/score", json={"text": "a", "continuation": "bc"}).json()
    expected = lm.sequence_logprobs_sync(lm.encode("a"), lm.encode("bc")).sum()
    assert score == pytest.approx(float(expected))
    drawn = client.post("/draw", json={"text": "a", "max_tokens": 5, "seed": 1}).content
    ids = lm.sample_sync(lm.encode("a"), 5, seed=1)
    assert drawn == b"".join(lm.byte_vocab[i].byte_string for i in ids)
    refused = client.post("/top", json={"text": ""})
    assert (refused.status_code, "empty" in refused.json()["error"]) == (422, True)


def test_a_continuation_does_not_begin_a_text(client, lm, monkeypatch):
    """Many tokenizers put a token before every text that they are given."""
    encode = lm.encode

    def begin(text, add_special_tokens=True):
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(lm, "encode", begin)
    score = client.post("/score", json={"text": "a", "continuation": "bc"}).json()
    expected = lm.sequence_logprobs_sync([lm.tokenizer.bos_token_id, *b"a"], list(b"bc")).sum()
    assert score == pytest.approx(float(expected))


def test_continuation_adds_no_space(client, lm, monkeypatch):
    """SentencePiece puts a space before every text."""
    encode = lm.encode
    monkeypatch.setattr(lm, "encode", lambda text, **options: encode(" " + text))
    score = client.post("/score", json={"text": "a", "continuation": " b"}).json()
    assert score == pytest.approx(float(lm.sequence_logprobs_sync([*b" a"], [*b" b"]).sum()))


def test_a_continuation_inside_a_word_is_encoded_alone_or_rejected(example, lm, monkeypatch):
    encoded = example("server").encoded
    tokens = {"He": [1], "llo": [*b"llo"], "Hello": [2]}
    monkeypatch.setattr(lm, "encode", lambda text, **options: tokens[text])
    assert encoded(lm, "He", "llo") == ([1], [*b"llo"])
    tokens["llo"] = [*b" llo"]
    with pytest.raises(InvalidInputError, match="'llo' joins the last token of the text; end"):
        encoded(lm, "He", "llo")


def test_timeout_is_an_error_and_the_next_answer_is_right(example, lm):
    with serving(example("server").app_of(lm, seconds=0.05)) as client:
        lm.may_compute.clear()
        late = client.post("/top", json={"text": "a"})
        assert (late.status_code, "within 0.05 s" in late.json()["error"]) == (504, True)
        lm.may_compute.set()
        assert client.post("/score", json={"text": "", "continuation": "a"}).status_code == 422
    with serving(example("server").app_of(lm)) as client:
        assert client.post("/top", json={"text": "a"}).status_code == 200


def test_a_stream_that_stops_ends_with_a_line_that_its_client_can_read(example, lm, capfd):
    asked = {"text": "a", "max_tokens": 10**6}
    with serving(example("server").app_of(lm, seconds=0.05)) as client:
        with client.stream("POST", "/draw", json=asked) as answer:
            pieces = answer.iter_bytes()
            text = next(pieces)
            lm.may_compute.clear()
            text += b"".join(pieces)
        lm.may_compute.set()
    assert text.endswith(b"\nerror: no token within 0.05 s\n")
    (line,) = capfd.readouterr().err.splitlines()
    assert "no token within 0.05 s" in line


def test_disconnected_client_stops_its_draw(client, lm):
    asked = {"text": "a", "max_tokens": 10**6}
    with client.stream("POST", "/draw", json=asked) as answer:
        next(answer.iter_bytes())
    assert lm.ended.wait(PATIENCE)
