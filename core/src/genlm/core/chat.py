"""Conversations as a tokenizer's chat template writes them: what it would leave out in silence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from genlm.core.errors import InvalidInputError

Message = Mapping[str, Any]

#: What stands behind the text that is to be continued, in a rendering of its own: no template trims
#: it, and no text has it.
MARK = "<<genlm: the answer goes on here>>"

#: The options of a template's method that its encoding takes.
ENCODING = ("padding", "truncation", "max_length")


def in_parts(messages: list[Message], written: Callable[[Any], str]) -> list[Message]:
    """Messages as a template takes them: with each text as a list of parts, if it leaves out what
    strings say without a word, as those of multimodal models may do."""
    said = [each.get("content") for each in messages if each["role"] != "assistant"]
    asked = [content.strip() for content in said if isinstance(content, str)]
    text = written(messages)
    if all(each in text for each in asked):
        return messages
    parts = [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each.get("content"), str)
        else each
        for each in messages
    ]
    with contextlib.suppress(Exception):  # whatever a template makes of a list
        text = written(parts)
        written_out = any(str(each["content"]) in text for each in parts if each.get("content"))
        if all(each in text for each in asked) and not written_out:
            return parts
    return messages


def continued(
    tokenizer: Any, messages: Sequence[Message], ids: list[int], options: Mapping[str, Any]
) -> list[int]:
    """The token ids of a conversation whose last message is to be continued, with the white space
    at its end.

    Templates that trim their messages lose it (a blank before a word, a line's end before code),
    and transformers then cuts all that is white off the text.

    Args:
        tokenizer: The tokenizer.
        messages: The conversation.
        ids: What its template makes of it.
        options: Those of its ``apply_chat_template``.

    Raises:
        InvalidInputError: the white space is lost, and the ids are not those of a text.
    """
    chosen = options["continue_final_message"]
    field = chosen if isinstance(chosen, str) else "content"
    marked, end = _marked(messages[-1].get(field))
    if end is None or (end.strip() and end == end.rstrip()):
        return ids
    white = end[len(end.rstrip()) :]
    as_text = {**options, "tokenize": False}
    text = tokenizer.apply_chat_template(messages, **as_text)
    as_text["continue_final_message"] = False
    whole = [*messages[:-1], {**messages[-1], field: marked}]
    rendered = tokenizer.apply_chat_template(whole, **as_text)
    if not (isinstance(text, str) and isinstance(rendered, str)):
        return ids  # not one of transformers' tokenizers: its method knows no texts
    kept, mark, _ = rendered.rpartition(MARK)
    if not mark or kept + white == text:
        return ids
    encoding = {name: options[name] for name in ENCODING if name in options}
    encoding.update(options.get("tokenizer_kwargs") or {}, add_special_tokens=False)
    if [*tokenizer.encode(text, **encoding)] != ids:
        raise InvalidInputError(
            f"the last message ends in {white!r}, which the tokenizer's chat "
            "template leaves out; end it before that, or write the prompt without the template"
        )
    return [*tokenizer.encode(kept + white, **encoding)]


def _marked(content: Any) -> tuple[Any, str | None]:
    """The content of a message with a mark in place of the white space at its end, and its last
    text."""
    if isinstance(content, str):
        return content.rstrip() + MARK, content
    if isinstance(content, list | tuple):
        for place in reversed(range(len(content))):
            part = content[place]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                longer = {**part, "text": part["text"].rstrip() + MARK}
                return [*content[:place], longer, *content[place + 1 :]], part["text"]
    return content, None
