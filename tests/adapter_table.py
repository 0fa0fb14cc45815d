"""Shared by the plugins' tests of adapters: the table of kinds in ``docs/adapters.md``, which lists
the outcomes, and adapters of other models."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from genlm.core import AsyncLM, InvalidAdapterError
from genlm.kit.adapter_files import CONFIG
from tests.adapter_kinds import KINDS, Kind, make_adapter

DOCS = Path(__file__).parents[1] / "docs" / "adapters.md"

#: Set to 1, this variable makes :func:`tabled` write its results.
WRITE = "GENLM_WRITE_ADAPTER_TABLE"


def tabled(kind: Kind, backend: str, found: str) -> str:
    """The table's entry for a kind on a backend. If :data:`WRITE` is set, ``found`` is written
    there first."""
    lines = DOCS.read_text().splitlines()
    head = next(line for line in lines if line.startswith("| kind |"))
    column = [cell.strip() for cell in head.split("|")].index(backend)
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and cells[1] == kind.name:
            if os.environ.get(WRITE) == "1":
                cells[column] = found
                lines[at] = " | ".join(cells).strip()
                DOCS.write_text("\n".join(lines) + "\n")
            return cells[column]
    raise LookupError(f"{DOCS} has no line of {kind.name!r}")


def strangers(model: str, folder: Path) -> dict[str, str]:
    """The folders of adapters for models that differ from this one in one size, each with the words
    of its error. An adapter for fewer layers looks as if its file lacked the last ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = AutoConfig.from_pretrained(model)
    width, heads = ours.hidden_size, ours.num_attention_heads
    fewer = heads // 2 if ours.num_key_value_heads == heads else heads
    sizes = f"{width} to {width // heads * fewer} features, the model {width} to "
    changes = {
        f"it maps {2 * width} to {2 * width} features, the model {width} to {width}": {
            "hidden_size": 2 * width
        },
        f"v_proj it maps {sizes}{width // heads * ours.num_key_value_heads}": {
            "num_key_value_heads": fewer
        },
        rf" model\.layers\.{ours.num_hidden_layers}\..*(no such module|has nothing)": {
            "num_hidden_layers": ours.num_hidden_layers + 1
        },
    }
    paths = {}
    for number, (message, change) in enumerate(changes.items()):
        config = AutoConfig.from_pretrained(model, **change)
        config.head_dim = config.hidden_size // heads
        other = folder / f"stranger-{number}"
        AutoModelForCausalLM.from_config(config).save_pretrained(other / "model")
        paths[message] = make_adapter(KINDS[0], str(other / "model"), other / "adapter")
    last = ours.num_hidden_layers - 1
    config = AutoConfig.from_pretrained(model, num_hidden_layers=last)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "shorter")
    for number, targets in enumerate((["q_proj", "v_proj"], r".*\.[qv]_proj", "all-linear")):
        path = make_adapter(KINDS[0], str(folder / "shorter"), folder / f"shorter-{number}")
        settings = json.loads(Path(path, CONFIG).read_text()) | {"target_modules": targets}
        Path(path, CONFIG).write_text(json.dumps(settings))
        named = re.escape(json.dumps(targets))
        paths[rf"lacks the matrices of model\.layers\.{last}\..*target_modules={named}"] = path
    return paths


def check_refused(lm: AsyncLM, strangers: Mapping[str, str]) -> None:
    """Check that these adapters are rejected with the right words, and change nothing."""
    before = lm.next_token_logprobs_uncached([1, 2, 3])
    for message, path in strangers.items():
        with pytest.raises(InvalidAdapterError, match=message):
            lm.add_new_lora(path, "stranger")
    assert torch.equal(lm.next_token_logprobs_uncached([1, 2, 3]), before)
