"""The contexts that are compared: a few short ones, and some beyond each threshold."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from attrs import frozen

from genlm.kit.scaled_copy import thresholds

#: The lengths of contexts that no threshold affects.
SHORT_LENGTHS = (5, 13, 24)

#: How many tokens contexts extend beyond a threshold. The first token beyond a window drops the
#: first token of the text, to which most models attend more than to any other.
TOKENS_BEYOND_THRESHOLD = (1, 2, 9)

#: Settings that name tokens, which a model may treat specially.
NAMES_A_TOKEN = re.compile(r"token_(id|ids|index|indices)$")

#: Embeddings after this fraction of them may be padding, which was never trained. It counts if the
#: folder has no ``tokenizer.json``, which says where the tokens end.
TRAINED_SHARE = 0.9


@frozen
class Group:
    """Contexts that test one thing.

    Attributes:
        about: What they test, in words for the report.
        contexts: The token ids of each; at least one context.
    """

    about: str
    contexts: tuple[tuple[int, ...], ...]


@frozen
class Chosen:
    """The contexts of a model.

    Attributes:
        groups: The contexts to compare.
        too_long: The thresholds beyond which there is no context: their names, and their values.
    """

    groups: tuple[Group, ...]
    too_long: Mapping[str, int]


def choose(config: Any, longest: int, folder: Path | None = None) -> Chosen:
    """Choose contexts for a configuration of transformers.

    Args:
        config: The configuration of the whole model.
        longest: How many tokens a context may have.
        folder: The folder with the model's tokenizer.
    """
    settings = config.to_dict()
    found: dict[int, list[str]] = {}
    for one in thresholds(settings):
        found.setdefault(one.value, []).append(".".join(one.path))
    within = min(found, default=longest)
    lengths = sorted({min(length, within, longest) for length in SHORT_LENGTHS})
    known = None if folder is None else text_tokens(folder)
    ids = _ids(config, settings, longest, known, lengths[-1] - 1)
    groups = [Group("short contexts", tuple(ids[:length] for length in lengths))]
    too_long: dict[str, int] = {}
    for value, names in sorted(found.items()):
        if value + max(TOKENS_BEYOND_THRESHOLD) > longest:
            too_long |= dict.fromkeys(names, value)
        else:
            contexts = tuple(ids[: value + more] for more in TOKENS_BEYOND_THRESHOLD)
            named = ", ".join(f"{name}={value}" for name in names)
            groups.append(Group(f"beyond {named}", contexts))
    return Chosen(tuple(groups), too_long)


def text_tokens(folder: Path) -> set[int] | None:
    """The tokens of a folder's ``tokenizer.json`` that are not special; ``None`` without a file
    that can be read."""
    from tokenizers import Tokenizer

    if not (file := folder / "tokenizer.json").is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more specific
        return None
    added = tokenizer.get_added_tokens_decoder()
    return {*tokenizer.get_vocab().values()} - {id for id in added if added[id].special}


def _ids(
    config: Any,
    settings: Mapping[str, Any],
    length: int,
    known: Collection[int] | None,
    last_at: int,
) -> tuple[int, ...]:
    """Random tokens, of which a model treats none in a way of its own. The first is that with which
    its texts begin. The last of the vocabulary, which an engine with a shorter table of embeddings
    would not find, is at the end of the longest short context: rare tokens are rounded most, and
    the largest rounding says how far rows may be apart in half precision."""
    text = config.get_text_config(decoder=True)
    own = set(_tokens(settings))
    if known is None:
        known = range(int(text.vocab_size * TRAINED_SHARE) or 1)
    ordinary = sorted(token for token in known if token not in own and token < text.vocab_size)
    ids = Random(0).choices(ordinary or [0], k=length)
    if ordinary and last_at > 0:
        ids[last_at] = ordinary[-1]
    begins = getattr(text, "bos_token_id", None)
    if isinstance(begins, int) and 0 <= begins < text.vocab_size:
        ids[0] = begins
    return tuple(ids)


def _tokens(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _tokens(value)
        elif isinstance(name, str) and NAMES_A_TOKEN.search(name):
            several = value if isinstance(value, list) else [value]
            yield from (one for one in several if isinstance(one, int))
