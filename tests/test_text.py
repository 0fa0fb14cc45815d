"""Text in and out, the blocking siblings, and what a model shows of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from genlm.core import (
    AsyncLM,
    EngineError,
    InvalidInputError,
    InvalidOptionError,
    ModelClosedError,
    Stats,
    UnsupportedError,
    load_model_by_name,
)
from genlm.core.mock import ByteTokenizer, MockEngine

from .conftest import PATIENCE

USER = [{"role": "user", "content": "hi"}]


def over(tokenizer, **options):
    """A model over a tokenizer."""
    return AsyncLM(lambda: MockEngine(tokenizer, **options), backend="mock")


def test_text_methods_work_after_closing(mock):
    """The tokenizer belongs to no engine."""
    lm = mock()
    lm.close()
    assert lm.encode("h\u00e9") == [104, 195, 169]
    assert lm.decode([104, 195, 169]) == "h\u00e9"
    assert lm.decode([]) == ""


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("encode", [72, 101], r"text must be a string; got \[72, 101\]"),
        ("encode", b"bytes", "text must be a string; got"),
        ("decode", "text", "token"),
        ("decode", [258], "token"),
        ("apply_chat_template", ["hi"], r"messages must be a list of dicts.* got \['hi'\]"),
        ("apply_chat_template", USER[0], "messages must be a list of dicts"),
        ("apply_chat_template", [{"rol": "user"}], "messages must be a list of dicts"),
        ("apply_chat_template", [], "messages must be a list of dicts"),
        ("apply_chat_template", None, "messages must be a list of dicts"),
        # This is how a command line represents the byte ff:
        ("encode", "ab\udcff", r"text has '\\udcff' at 2, half of a surrogate pa"),
        ("apply_chat_template", [{"role": "ab\udcff"}], r"text has '\\udcff' at 2, half of a"),
        (
            "apply_chat_template",
            [{"role": "user", "content": [{"type": "text", "text": "ab\udcff"}]}],
            r"text has '\\udcff' at 2, half of a",
        ),
    ],
)
def test_invalid_text_or_conversation_is_rejected(mock, method, given, said):
    with pytest.raises(InvalidInputError, match=said):
        getattr(mock(), method)(given)


# --- the template of a conversation ---------------------------------------------------------------


class Chat(ByteTokenizer):
    """A tokenizer whose template joins the messages, and which records the options."""

    def apply_chat_template(self, messages, **options):
        self.options = options
        return self.encode("".join(message["content"] for message in messages))


def test_chat_template_is_applied():
    tokenizer = Chat()
    with over(tokenizer) as lm:
        assert lm.apply_chat_template(USER) == [104, 105]
        assert tokenizer.options == {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": False,
        }
        assert lm.apply_chat_template({"role": "user", "content": x} for x in "hi") == [104, 105]
        with pytest.raises(
            InvalidInputError, match=r"rejects \[{'role': 'user'}\]: KeyError: 'con"
        ):
            lm.apply_chat_template([{"role": "user"}])


@pytest.mark.parametrize(
    "given", [{"add_generation_prompt": False}, {"continue_final_message": True}]
)
def test_the_answer_begins_unless_something_else_is_asked_for(given):
    tokenizer = Chat()
    with over(tokenizer) as lm:
        lm.apply_chat_template(USER, chat_template="t", **given)
    assert tokenizer.options["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("name", "value"), [("tokenize", False), ("return_tensors", "pt"), ("return_dict", True)]
)
def test_a_template_gives_token_ids(name, value):
    said = f"gives token ids; for {name}={value!r} call lm.tokenizer.apply_chat_template"
    with over(Chat()) as lm, pytest.raises(InvalidOptionError, match=said):
        lm.apply_chat_template(USER, **{name: value})


class Unset(ByteTokenizer):
    """As a tokenizer of transformers' own."""

    chat_template = None

    def apply_chat_template(self, messages, **options):
        raise ValueError("tokenizer.chat_template is not set and no template was passed")


class Built(Unset):
    """A tokenizer like those of mistral-common."""

    def apply_chat_template(self, messages, **options):
        return [1]


def test_tokenizer_decides_whether_it_needs_a_chat_template():
    with over(Built()) as lm:
        assert lm.apply_chat_template(USER, add_generation_prompt=False) == [1]
    for tokenizer in (Unset(), ByteTokenizer()):
        with (
            over(tokenizer) as lm,
            pytest.raises(UnsupportedError, match="the tokenizer has no chat template; write"),
        ):
            lm.apply_chat_template(USER)


# --- options of a tokenizer -----------------------------------------------------------------------


class Dropping(ByteTokenizer):
    """A tokenizer whose methods drop unknown options, like those of transformers."""

    chat_template = "{{ messages }}{% if enable_thinking %}..."
    # Encode takes it as an argument too, as transformers' tokenizers do with some attributes.
    fold_case = False

    def encode(self, text, add_special_tokens=False, **more):
        return self._encode_plus(text, add_special_tokens, **more)

    def _encode_plus(self, text, add_special_tokens, split_special_tokens=None, **dropped):
        return super().encode(text, add_special_tokens)

    def decode(self, token_ids, skip_special_tokens=False, **more):
        return self._decode(token_ids, skip_special_tokens, **more)

    def _decode(self, token_ids, skip_special_tokens, spaces=True, **dropped):
        return super().decode(token_ids, skip_special_tokens)

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=False, **variables):
        return [len(messages)]


class Passing:
    def encode(self, text, **options):
        return [*options.values()]

    def decode(self, token_ids): ...

    def token_bytes(self):
        return [b"a", b"b"]


@pytest.fixture
def dropping():
    with over(Dropping()) as lm:
        yield lm


@pytest.mark.parametrize(
    ("ask", "meant"),
    [
        (lambda lm: lm.encode("a", add_specal_tokens=True), "did you mean 'add_special_tokens'"),
        (lambda lm: lm.encode("a", bos=True), "encode of the tokenizer has no option 'bos'"),
        (lambda lm: lm.decode([1], skip_special_token=True), "did you mean 'skip_special_tokens'"),
        (lambda lm: lm.decode([1], add_special_tokens=True), "no option 'add_special_tokens'"),
        (
            lambda lm: lm.apply_chat_template(USER, continue_final_mesage=True),
            "did you mean 'continue_final_message'",
        ),
        (
            lambda lm: lm.apply_chat_template(USER, enable_thinkin=False),
            "did you mean 'enable_thinking'",
        ),
        (
            lambda lm: lm.encode("a", return_tensors="pt"),
            "encode gives token ids; for return_tensors='pt' call lm.tokenizer.encode",
        ),
    ],
)
def test_an_option_that_the_tokenizer_would_drop_is_rejected(dropping, ask, meant):
    with pytest.raises(InvalidOptionError, match=meant):
        ask(dropping)


def test_options_that_a_tokenizer_takes_at_any_depth(dropping):
    assert dropping.encode("a", add_special_tokens=True, split_special_tokens=True) == [256, 97]
    assert dropping.decode([256, 97], skip_special_tokens=True, spaces=False) == "a"
    assert dropping.encode("a", fold_case=True) == [97]
    for variable in ({"enable_thinking": False}, {"of_another_template": 1}, {"tools": None}):
        assert dropping.apply_chat_template(USER, **variable) == [1]
    with over(Passing()) as lm:
        assert lm.encode("a", anything=3) == [3]


# --- the end of a text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "ids", "special"),
    [
        (257, [257], [256, 257]),
        (np.int64(65), [65], [65, 256]),
        ([3, 4], [3, 4], [256]),
        (None, [], [256]),
    ],
)
def test_end_tokens_come_from_the_tokenizer(named, ids, special):
    class Named(ByteTokenizer):
        eos_token_id = named

    def likely_end(token_ids):
        row = torch.full((258,), -20.0)
        row[257] = 0.0
        return row.log_softmax(0)

    with over(Named(), row=likely_end) as lm:
        assert lm.eos_token_ids == ids
        assert lm.special_token_ids == special
        drawn = lm.sample_sync([1], 5, temperature=0)
        assert drawn == ([] if 257 in ids else [257] * 5)
        assert lm.sample_sync([1], 5, [], temperature=0) == [257] * 5  # [] means none


def test_end_tokens_also_come_from_the_engine():
    engine = MockEngine(ByteTokenizer())
    engine.eos_token_ids = [257, 7, 258, -1]  # two of these are not tokens
    with AsyncLM(lambda: engine, backend="mock") as lm:
        assert lm.eos_token_ids == [257, 7]


# --- the blocking siblings ------------------------------------------------------------------------


async def test_blocking_siblings_answer_the_same_also_inside_a_running_loop(mock):
    lm = mock()
    assert lm.sample_sync([1], 5, [], seed=3) == await lm.sample([1], 5, [], seed=3)
    drawn = await lm.batch_sample([[1], [2]], 5, [], seed=3)
    assert lm.batch_sample_sync([[1], [2]], 5, [], seed=3) == drawn
    scores = await lm.sequence_logprobs([1], [2, 3])
    assert torch.equal(lm.sequence_logprobs_sync([1], [2, 3]), scores)


@pytest.mark.filterwarnings("error")  # warnings about a coroutine that was never awaited
def test_blocking_methods_raise_the_same_errors_as_coroutines(mock):
    lm = mock(fail_on=lambda query: query.token_ids == (13,))
    with pytest.raises(EngineError, match=r"failed on the context \[13\]"):
        lm.sample_sync([13], 5, [])
    with pytest.raises(InvalidOptionError, match="temperature must be a finite number"):
        lm.sample_sync([1], 5, [], temperature=float("inf"))
    lm.close()
    with pytest.raises(ModelClosedError):
        lm.sample_sync([1], 5, [])


def test_closing_ends_a_blocking_draw(mock, gate):
    lm = mock()
    gate.shut()
    with ThreadPoolExecutor() as threads:
        threads.submit(lm.next_token_logprobs_sync, [1])
        gate.wait_entered()
        draw = threads.submit(lm.sample_sync, [1], 5, [])
        while lm.stats.requests < 2:
            pass
        closing = threads.submit(lm.close)
        with pytest.raises(ModelClosedError):
            draw.result(PATIENCE)  # while the engine is still busy
        gate.open()
        closing.result(PATIENCE)


# --- what a model shows ---------------------------------------------------------------------------


def test_top_logprobs_gives_the_most_likely_tokens(mock):
    lm = mock()
    row = lm.next_token_logprobs_sync([1])
    best, second = lm.top_logprobs(row, 2)
    assert best.token_id == best.token.token_id == int(row.argmax())
    assert best.prob == pytest.approx(float(row.max().exp()))
    assert best.logprob == float(row.max()) >= second.logprob
    assert best.text == lm.str_vocab[best.token.token_id]
    assert len(lm.top_logprobs(row, 1000)) == 258
    with pytest.raises(InvalidInputError, match=r"shape \(258,\); it has \(1, 258\)"):
        lm.top_logprobs(row[None])
    for given in (row.exp(), row * float("nan")):
        with pytest.raises(InvalidInputError, match=r"without exp\(\)"):
            lm.top_logprobs(given)
    with pytest.raises(InvalidOptionError, match="k must be an integer of at least 1; got 0"):
        lm.top_logprobs(row, 0)
    for given in (None, "abc", [row]):
        with pytest.raises(InvalidInputError, match="row must be a model's row; got"):
            lm.top_logprobs(given)
    forgotten = lm.next_token_logprobs([72])
    for ask in (lm.top_logprobs, lm.next_token_logprobs_sync, lm.context):
        with pytest.raises(InvalidInputError, match="; write `await` before what gives it"):
            ask(forgotten)
    forgotten.close()


def test_options_may_be_keywords():
    with load_model_by_name("mock", "mock", batch_size=3, delay=0) as lm:
        assert lm.next_token_logprobs_sync([1]).shape == (258,)
    with pytest.raises(InvalidOptionError, match="batch_size is given in llm_opts and as a"):
        load_model_by_name("mock", "mock", {"batch_size": 3}, batch_size=3)
    with pytest.raises(InvalidOptionError, match="llm_opts must be a dict of options; got 7"):
        load_model_by_name("mock", "mock", 7)


def test_repr_and_adapters_describe_the_model(tmp_path):
    lm = load_model_by_name("mock", "mock", max_context=64)
    assert repr(lm) == "<AsyncLM model='mock', backend='mock', device='cpu', context of 64 tokens>"
    lm.add_new_lora(tmp_path, "a")
    assert {name: adapter.path for name, adapter in lm.adapters.items()} == {"a": str(tmp_path)}
    lm.close()
    assert repr(lm).endswith("context of 64 tokens, closed>")


def test_stats_are_a_small_table(mock):
    lm = mock()
    lm.next_token_logprobs_sync([1])
    lines = str(lm.stats).splitlines()
    assert lines[0].split() == ["requests", "1"]
    assert len(lines) == len(Stats.__attrs_attrs__)
    assert len({len(line) for line in lines if "seconds" in line}) == 1
