"""The methods of a model for text: its tokenizer, its vocabulary, and the text of tokens."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

from genlm.core.chat import continued, in_parts
from genlm.core.checks import describe_error, integer, safe_repr, unawaited
from genlm.core.context import token_ids_of
from genlm.core.errors import InvalidInputError, InvalidOptionError, UnsupportedError
from genlm.core.hints import nearest
from genlm.core.options import unknown_argument
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.tokenization import Token
from genlm.core.vectors import as_tensor

#: The arguments with which a tokenizer's ``apply_chat_template`` returns a list of ids.
IDS_ONLY = {"tokenize": True, "return_dict": False}

#: transformers' message about a tokenizer that needs a template and has none. Some tokenizers need
#: none.
NO_TEMPLATE = "chat_template is not set"


class TopToken(NamedTuple):
    """One of the most likely tokens of a row.

    Attributes:
        token: The token: its bytes and its id.
        text: The token as a string, for display.
        logprob: The token's log-probability, in nats.
    """

    token: Token
    text: str
    logprob: float

    @property
    def token_id(self) -> int:
        """The token's id."""
        return self.token.token_id

    @property
    def prob(self) -> float:
        """Its probability."""
        return math.exp(self.logprob)


class TextMixin:
    """The methods of :class:`~genlm.core.lm.AsyncLM` for text. They need no engine, so they work
    after the model has been closed, too."""

    _engine: LoadedEngine

    @property
    def byte_vocab(self) -> list[Token]:
        """All tokens, by id: ``byte_vocab[i].token_id == i``. This is the model's own list: copy it
        before you sort or change it."""
        return self._engine.byte_vocab

    @property
    def str_vocab(self) -> list[str]:
        """All tokens as strings, by id, for display."""
        return self._engine.str_vocab

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self._engine.tokenizer

    @property
    def special_token_ids(self) -> list[int]:
        """The ids of the special tokens, such as the end of the sequence: those with
        ``byte_vocab[i].is_special``. Their bytes are names, not text that the model has written."""
        return list(self._engine.special_token_ids)

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a text: the tokenizer's end-of-sequence token, and the tokens that
        the model's ``generation_config.json`` lists. May be empty."""
        named = getattr(self._engine.tokenizer, "eos_token_id", None)
        own = [] if named is None else [named] if isinstance(named, Integral) else named
        return list(dict.fromkeys(int(each) for each in (*own, *self._engine.eos_token_ids)))

    def encode(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text. The options are those of the tokenizer's ``encode``.

        This and the other methods for text also work after :meth:`close`: they need no engine.

        Raises:
            InvalidInputError: ``text`` is not a string, or UTF-8 cannot encode it.
            InvalidOptionError: the tokenizer has no such option, or the option makes its result
                something other than a list of ids.
        """
        if not isinstance(text, str):
            raise InvalidInputError(
                f"text must be a string; got {safe_repr(text)}; token ids need no encoding"
            )
        _require_unicode(text)
        self._check_options("encode", options)
        return [int(token_id) for token_id in self._engine.tokenizer.encode(text, **options)]

    def decode(self, token_ids: Iterable[int], **options: Any) -> str:
        """The text of token ids, which may be none. The options are those of the tokenizer's
        ``decode``.

        Raises:
            InvalidQueryError: ``token_ids`` has an element that is not a token id.
            InvalidOptionError: the tokenizer has no such option.
        """
        self._check_options("decode", options)
        known = max(self._engine.vocab_size, self._engine.width)
        ids = token_ids_of("list to decode", token_ids, known, least=0)
        text: str = self._engine.tokenizer.decode(list(ids), **options)
        return text

    def apply_chat_template(
        self, messages: Iterable[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """The token ids of a conversation, up to where the model's answer begins.

        Args:
            messages: ``{"role": "user", "content": "..."}``, in order. With
                ``continue_final_message=True`` the last message is the beginning of the answer,
                white space at its ends included. Templates of multimodal models may leave out a
                text that is given as a string; such a template gets each text as a list of one
                part.
            **options: Options of the tokenizer's ``apply_chat_template``.

        Raises:
            InvalidInputError: ``messages`` is not a list of dicts, each with a role, or the
                template rejects them.
            InvalidOptionError: an option is misspelt, or asks for something other than token ids.
            UnsupportedError: the tokenizer has no chat template.
        """
        given = list(messages) if isinstance(messages, Iterable) else []
        if not given or not all(
            isinstance(message, Mapping) and "role" in message for message in given
        ):
            raise InvalidInputError(
                "messages must be a list of dicts, each with a role and its content; got "
                f"{safe_repr(messages)}"
            )
        tokenizer = self._engine.tokenizer
        template = options.get("chat_template") or getattr(tokenizer, "chat_template", "")
        words = f"add_generation_prompt continue_final_message {template}"
        self._check_options("apply_chat_template", options, re.findall(r"\w+", words))
        for text in _strings(given):
            _require_unicode(text)
        begins = not options.get("continue_final_message")
        chosen = {"add_generation_prompt": begins, **options, **IDS_ONLY}
        apply = getattr(tokenizer, "apply_chat_template", None)
        try:
            if apply is None:
                raise ValueError(NO_TEMPLATE)
            if isinstance(template, str) and "type" in template:
                whole = {**chosen, "tokenize": False, "continue_final_message": False}
                given = in_parts(given, partial(apply, **whole))
            ids = [int(token_id) for token_id in apply(given, **chosen)]
            return continued(tokenizer, given, ids, chosen) if not begins else ids
        except InvalidInputError:
            raise
        except Exception as error:
            if NO_TEMPLATE in str(error):
                raise UnsupportedError(
                    "the tokenizer has no chat template; write the prompt as the model's page "
                    "shows it, or take an instruction-tuned model"
                ) from error
            raise InvalidInputError(
                f"the tokenizer's chat template rejects {safe_repr(messages)}: "
                f"{describe_error(error)}; each message has a role and its content"
            ) from error

    def _check_options(
        self, method: str, options: Mapping[str, Any], variables: Iterable[str] = ()
    ) -> None:
        """Reject options of a tokenizer's method that ask for another kind of result, or that the
        method would silently drop, as transformers does. A variable of another model's chat
        template changes nothing, so it is accepted, unless its name is nearly that of an option."""
        for name, ours in {**IDS_ONLY, "return_tensors": None}.items():
            if options.get(name, ours) != ours:
                raise InvalidOptionError(
                    f"{method} gives token ids; for {name}={safe_repr(options[name])} call "
                    f"lm.tokenizer.{method}"
                )
        named = _arguments(type(self._engine.tokenizer), method)
        if len(named) <= 2:  # then it passes its arguments on
            return
        known = named.union(variables)
        for name in options.keys() - known:
            # Some tokenizers have the attribute, with a default.
            attribute = hasattr(self._engine.tokenizer, name)
            if not attribute and (not variables or nearest(name, known, 0.8)):
                raise unknown_argument(f"{method} of the tokenizer", "option", name, known)

    def top_logprobs(self, row: Any, k: int = 10) -> list[TopToken]:
        """The ``k`` most likely tokens of a row, the most likely first.

        Args:
            row: ``[len(lm.byte_vocab)]`` log-probabilities, as the methods for rows give them.
            k: How many.

        Raises:
            InvalidInputError: ``row`` has another shape, or values above 0.
            InvalidOptionError: ``k`` is not an integer of at least 1.
        """
        k = integer("k", k, least=1)
        if (values := as_tensor(row)) is None:
            raise InvalidInputError(
                f"row must be a model's row; got {safe_repr(row)}{unawaited(row)}"
            )
        if tuple(values.shape) != (self._engine.width,):
            raise InvalidInputError(
                f"row must have the shape ({self._engine.width},); it has {tuple(values.shape)}"
            )
        best = values.topk(min(k, self._engine.width))
        if not (most := float(best.values[0])) <= 1e-3:  # NaN, or more than rounding can make of 0
            raise InvalidInputError(
                f"row must be log-probabilities, but its greatest value is {most:.6g}; give the "
                "model's row itself, without exp()"
            )
        return [
            TopToken(self.byte_vocab[i], self.str_vocab[i], logprob)
            for i, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _strings(value: Any) -> Iterator[str]:
    """The strings in a message, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _arguments(kind: type, method: str) -> set[str]:
    """The names of the arguments of a method, of the method that it overrides, and of related
    methods. transformers' ``encode``, for instance, passes other arguments on to
    ``_encode_plus``."""
    found: set[str] = set()
    for name, function in [each for part in kind.__mro__ for each in vars(part).items()]:
        if method in name and (code := getattr(inspect.unwrap(function), "__code__", None)):
            found.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return found


def _require_unicode(text: str) -> None:
    """Raises: InvalidInputError: the text has half of a surrogate pair, for instance because bytes
    of another encoding were decoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"text has {text[error.start]!r} at {error.start}, half of a surrogate pair, which is "
            "no character; decode its bytes with their own encoding, or with errors='replace'"
        ) from None
