"""The beginning of an answer, as chat templates write it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from genlm.core import AsyncLM, InvalidInputError
from genlm.core.mock import MockEngine

USER = {"role": "user", "content": "As JSON."}
#: Templates with the message headers and ends of Gemma 3. Llama 3's template trims messages too.
ENDS = "<|eot|>\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
TRIMS = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}" + ENDS
KEEPS = TRIMS.replace(" | trim", "")
OF_PARTS = TRIMS.replace("m['content'] | trim", "m['content'][0]['text'] | trim")


@pytest.fixture
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|eot|>")


@pytest.fixture
def lm(tokenizer):
    with AsyncLM(lambda: MockEngine(tokenizer), backend="mock") as lm:
        yield lm


def of_parts(text):
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize("template", [TRIMS, KEEPS, OF_PARTS])
@pytest.mark.parametrize(
    "begun", ["```json\n", "The answer is ", "a\n \n", "a", "", "\n", "\n# A", " a "]
)
def test_the_beginning_of_an_answer_keeps_the_white_space_at_its_ends(lm, template, begun):
    content = of_parts if template is OF_PARTS else str
    ids = lm.apply_chat_template(
        [
            {**USER, "content": content(USER["content"])},
            {"role": "assistant", "content": content(begun)},
        ],
        continue_final_message=True,
        chat_template=template,
    )
    assert lm.decode(ids) == "[user]\nAs JSON.<|eot|>\n[assistant]\n" + begun


def test_answer_is_a_part_if_the_template_needs_parts(lm):
    template = TRIMS.replace(
        "{{ m['content'] | trim }}",
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}"
        "{% endif %}{% endfor %}",
    )
    ids = lm.apply_chat_template(
        [USER, {"role": "assistant", "content": "a\n"}],
        continue_final_message=True,
        chat_template=template,
    )
    assert lm.decode(ids) == "[user]\nAs JSON.<|eot|>\n[assistant]\na\n"


def test_encoding_options_apply_to_the_beginning_of_an_answer(lm):
    messages = [USER, {"role": "assistant", "content": "a\n"}]
    given = {"continue_final_message": True, "chat_template": TRIMS}
    assert lm.decode(lm.apply_chat_template(messages, **given)[-2:]) == "a\n"
    short = lm.apply_chat_template(messages, truncation=True, max_length=9, **given)
    assert lm.decode(short) == "[user]\nAs"


def test_white_space_that_a_tokenizer_of_its_own_kind_loses_is_rejected(lm, tokenizer):
    """mistral-common's tokenizer is of this kind: its ids are not those of a text."""
    whole = tokenizer.apply_chat_template

    def apply(messages, tokenize=True, **options):
        found = whole(messages, tokenize=tokenize, **options)
        return [0, *found] if tokenize else found

    tokenizer.apply_chat_template = apply
    options = {"continue_final_message": True, "chat_template": TRIMS}
    with pytest.raises(
        InvalidInputError, match=r"'a\\n', has white space .* leaves out; leave it out too"
    ):
        lm.apply_chat_template([USER, {"role": "assistant", "content": "a\n"}], **options)
    ids = lm.apply_chat_template([USER, {"role": "assistant", "content": "a"}], **options)
    assert ids[0] == 0
