"""The description of a model that verification compares with transformers' rows of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.hf.options import FROM_PRETRAINED, HFOptions
from genlm.kit.verify.subject import Subject

#: Arguments of ``from_pretrained`` that select other weights than the folder's, or other
#: arithmetic.
OTHER_MODEL = (
    "gguf_file",
    "ignore_mismatched_sizes",
    "key_mapping",
    "quantization_config",
    "state_dict",
    "subfolder",
    "variant",
)


def subject_of(model: str, options: Mapping[str, Any], parsed: HFOptions) -> Subject:
    """A model, and the changes that the options make to it."""
    given = dict(parsed.hf_opts)
    other = [name for name in OTHER_MODEL if given.get(name)]
    if parsed.bitsandbytes_opts:
        other.append("bitsandbytes_opts")
    config: Any = given.get("config")
    # from_pretrained takes settings of the configuration beside its own arguments.
    own = (*FROM_PRETRAINED.split(), "dtype")
    settings = {name: value for name, value in given.items() if name not in own}
    return Subject(
        model=model,
        engine="transformers",
        backend="hf",
        options=options,
        revision=given.get("revision"),
        cache_dir=given.get("cache_dir"),
        changes=config.to_dict() if hasattr(config, "to_dict") else settings,
        unknown=f"{other[0]} asks for another model than the folder's" if other else None,
        on_request="its rows are transformers' own",
    )
