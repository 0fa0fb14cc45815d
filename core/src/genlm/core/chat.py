"""Conversations as a tokenizer's chat template writes them, and what it would leave out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidInputError

Message = Mapping[str, Any]

#: Marks before and after the text that is to be continued, in a rendering made to find it. No
#: template trims them, and no text contains them.
BEGIN, END = "<<genlm: the answer begins here>>", "<<genlm: the answer goes on here>>"

#: The options of a template's method that encoding uses.
ENCODING = ("padding", "truncation", "max_length")


def in_parts(messages: list[Message], written: Callable[[Any], str]) -> list[Message]:
    """Messages as a template takes them. If the template leaves out texts that are strings, as
    those of multimodal models may do, each text becomes a list of parts."""
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
    with contextlib.suppress(Exception):  # a template may raise any exception for a list
        text = written(parts)
        written_out = any(str(each["content"]) in text for each in parts if each.get("content"))
        if all(each in text for each in asked) and not written_out:
            return parts
    return messages


def continued(
    tokenizer: Any, messages: Sequence[Message], ids: list[int], options: Mapping[str, Any]
) -> list[int]:
    """The token ids of a conversation whose last message is to be continued, with the white space
    at its ends.

    Templates that trim their messages lose this white space (a blank before a word, a line's end
    before code), and transformers then removes all white space from the ends of the text.

    Args:
        tokenizer: The tokenizer.
        messages: The conversation.
        ids: The template's ids for the conversation.
        options: The options of the tokenizer's ``apply_chat_template``.

    Raises:
        InvalidInputError: the white space is lost, and the ids are not those of a text.
    """
    chosen = options["continue_final_message"]
    field = chosen if isinstance(chosen, str) else "content"
    marked, said = _marked(messages[-1].get(field))
    if said is None or (said and said == said.strip()):
        return ids
    as_text = {**options, "tokenize": False}
    text = tokenizer.apply_chat_template(messages, **as_text)
    as_text["continue_final_message"] = False
    whole = [*messages[:-1], {**messages[-1], field: marked}]
    rendered = tokenizer.apply_chat_template(whole, **as_text)
    if not (isinstance(text, str) and isinstance(rendered, str)):
        return ids  # the method of a tokenizer that is not transformers' cannot render texts
    kept, mark, _ = rendered.rpartition(END)
    before, began, body = kept.rpartition(BEGIN)
    if not mark:
        return ids
    if began and body == said.strip():
        wanted = before + said
    else:  # the template changes the message, up to its end
        wanted = before + body + said[len(said.rstrip()) :]
    if wanted == text:
        return ids
    encoding = {name: options[name] for name in ENCODING if name in options}
    encoding.update(options.get("tokenizer_kwargs") or {}, add_special_tokens=False)
    if [*tokenizer.encode(text, **encoding)] != ids:
        raise InvalidInputError(
            f"the last message, {safe_repr(said)}, has white space at an end that the "
            "tokenizer's chat template leaves out; leave it out too, or write the prompt "
            "without the template"
        )
    return [*tokenizer.encode(wanted, **encoding)]


def _marked(content: Any) -> tuple[Any, str | None]:
    """The content of a message with marks in place of the white space at the ends of its last text,
    and that text."""
    if isinstance(content, str):
        body = content.strip()
        # If no white space is lost, the message keeps its beginning, which a template may examine.
        return (BEGIN if content[: len(body)] != body else "") + body + END, content
    if isinstance(content, list | tuple):
        for place in reversed(range(len(content))):
            part = content[place]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked, said = _marked(part["text"])
                return [*content[:place], {**part, "text": marked}, *content[place + 1 :]], said
    return content, None
