"""Adapters of every kind that PEFT saves, and what a backend makes of each: right or refused.

Needs PEFT and transformers. A plugin's test makes each kind for a tiny model, and holds the outcome
against the table of kinds and backends in ``docs/adapters.md``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from genlm.core.conformance.compare import Violation, check
from genlm.core.errors import InvalidAdapterError

if TYPE_CHECKING:
    import torch

    from genlm.core.lm import AsyncLM

#: The settings of every kind that says nothing else.
PLAIN: Mapping[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}

Tensors = dict[str, Any]


@frozen
class Kind:
    """A kind of adapter.

    Attributes:
        name: What the table calls it.
        settings: What its ``LoraConfig`` has beyond :data:`PLAIN`.
        dtype: The type that its tensors are saved in.
        change: What is done to its tensors in the end.
        pickled: Whether its weights are a pickle.
    """

    name: str
    settings: Mapping[str, Any] = {}
    dtype: str = "float32"
    change: Callable[[Tensors], Tensors] = dict
    pickled: bool = False


def _trained_embedding(tensors: Tensors) -> Tensors:
    return {
        name: tensor + 1 if "base_layer" in name else tensor for name, tensor in tensors.items()
    }


KINDS = (
    Kind("plain"),
    Kind("every linear layer", {"target_modules": "all-linear"}),
    Kind("q, k or v alone", {"target_modules": ["q_proj"]}),
    Kind("modules by a regular expression", {"target_modules": r".*\.(q|up)_proj"}),
    Kind("some layers only", {"layers_to_transform": [1]}),
    Kind("bfloat16 weights", dtype="bfloat16"),
    Kind("float16 weights", dtype="float16"),
    Kind("`rank_pattern`", {"rank_pattern": {"v_proj": 2}}),
    Kind("`alpha_pattern`", {"alpha_pattern": {"layers.1.self_attn.v_proj": 20}}),
    Kind("`use_rslora`", {"use_rslora": True}),
    Kind("`use_dora`", {"use_dora": True}),
    Kind("`bias` of the base model", {"bias": "all"}),
    Kind("`lora_bias`", {"lora_bias": True}),
    Kind("LoRA on the embedding", {"target_modules": ["embed_tokens", "q_proj"]}),
    Kind("LoRA on the output layer", {"target_modules": ["lm_head", "q_proj"]}),
    Kind(
        "embeddings of another base model",
        {"target_modules": ["embed_tokens", "q_proj"]},
        change=_trained_embedding,
    ),
    Kind("`modules_to_save`: the output layer", {"modules_to_save": ["lm_head"]}),
    Kind("`modules_to_save`: the embedding", {"modules_to_save": ["embed_tokens"]}),
    Kind("`modules_to_save`: a norm", {"modules_to_save": ["norm"]}),
    Kind("`trainable_token_indices`", {"trainable_token_indices": [5, 6, 7, 8]}),
    Kind(
        "`target_parameters`",
        {"target_modules": [], "target_parameters": ["mlp.down_proj.weight"]},
    ),
    Kind("`alora_invocation_tokens`", {"alora_invocation_tokens": [7, 8]}),
    Kind("`layer_replication`", {"layer_replication": [[0, 2], [1, 2]]}),
    Kind("`init_lora_weights` of PiSSA", {"init_lora_weights": "pissa"}),
    Kind("`init_lora_weights` of OLoRA", {"init_lora_weights": "olora"}),
    Kind("weights in a pickle", pickled=True),
)  # fmt: skip


def make_adapter(kind: Kind, model: str, folder: Path, seed: int = 1) -> str:
    """Save a random adapter of a kind for the model in a folder."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(**{**PLAIN, **kind.settings})
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1.5)
            elif "lora_" in name or "trainable_tokens_delta" in name:
                parameter.normal_(0, 0.3)
            elif "modules_to_save" in name or (kind.settings.get("bias") and "bias" in name):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = {name: each.to(getattr(torch, kind.dtype)) for name, each in load_file(file).items()}
    save_file(kind.change(tensors), file)
    if kind.pickled:
        torch.save(tensors, folder / "adapter_model.bin")
        file.unlink()
    return str(folder)


def reference_rows(
    model: str, adapter: str | None, contexts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The rows by transformers and PEFT alone, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, adapter)
    loaded.eval()
    with torch.no_grad():
        return [
            loaded(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].log_softmax(-1)
            for ids in contexts
        ]


@frozen(eq=False)
class Case:
    """An adapter of a kind, another adapter beside it, and the rows that they have.

    Attributes:
        kind: The kind.
        paths: Their folders: ``"this"`` and ``"other"``; the base model has none.
        rows: What each gives after each of :data:`CONTEXTS`; ``None`` where PEFT itself fails.
    """

    kind: Kind
    paths: Mapping[str | None, str | None]
    rows: Mapping[str | None, list[torch.Tensor] | None]


#: One per round, so that none is known before.
CONTEXTS = [(5, 6, 7, 8, 9, 10 + n) for n in range(7)]


def make_case(kind: Kind, model: str, folder: Path) -> Case:
    """Save an adapter of a kind and a plain one, and compute their rows."""
    paths = {
        None: None,
        "other": make_adapter(KINDS[0], model, folder / "other", seed=2),
        "this": make_adapter(kind, model, folder / "adapter"),
    }
    rows: dict[str | None, list[torch.Tensor] | None] = {}
    for name, path in paths.items():
        try:
            rows[name] = reference_rows(model, path, CONTEXTS)
        except Exception:
            if name != "this":
                raise
            rows[name] = None  # the backend should refuse it
    return Case(kind, paths, rows)


def outcome(lm: AsyncLM, case: Case, atol: float, forwards: Sequence[int] = ()) -> str:
    """What a backend makes of a kind: ``"right"``, ``"apart"`` (right, in batches of its own) or
    ``"refused"``.

    It is mixed in one batch with the base model and another adapter, before, during and after.

    Args:
        lm: A model of the backend, without adapters and without a cache of rows.
        case: The adapters and their rows.
        atol: How far a row may be from that of transformers and PEFT.
        forwards: Grows by one with each forward of the engine, where a test can count them.

    Raises:
        Violation: a row is wrong: of the adapter, or of the others because of it.
    """

    def ask(round: int, *names: str | None) -> None:
        async def gather() -> list[torch.Tensor]:
            return await asyncio.gather(
                *(lm.next_token_logprobs(CONTEXTS[round], lora_name=name) for name in names)
            )

        for name, row in zip(names, asyncio.run(gather()), strict=True):
            expected = case.rows[name]
            if expected is None:
                raise Violation(f"{case.kind.name}: accepted, though PEFT itself fails with it")
            right = expected[round][: len(row)].log_softmax(-1)  # padding is dropped
            off = float((row[: len(right)] - right).abs().max())
            shown = "the base model" if name is None else f"the {name} adapter"
            check(off < atol, f"{case.kind.name}: {shown} is {off:.3g} off in round {round}")

    lm.add_new_lora(str(case.paths["other"]), "other")
    try:
        ask(0, None, "other")
        try:
            lm.add_new_lora(str(case.paths["this"]), "this")
        except InvalidAdapterError as error:
            check("adapter" in str(error), f"{case.kind.name}: {error}")
            found = "refused"
        else:
            try:
                before = len(forwards)
                ask(1, None, "other", "this")
                found = "apart" if len(forwards) > before + 1 else "right"
                ask(2, "this")
                ask(3, None, "other")
                ask(4, "other", "this")
            finally:
                lm.remove_lora("this")
        ask(5, None, "other")
    finally:
        lm.remove_lora("other")
    ask(6, None)
    return found


# --- the table in the docs ------------------------------------------------------------------------

#: Set to 1, it makes :func:`tabled` write what was found.
WRITE = "GENLM_WRITE_ADAPTER_TABLE"


def tabled(docs: Path, kind: Kind, backend: str, found: str) -> str:
    """What the table in a file says of a kind on a backend; with :data:`WRITE` set, ``found`` is
    written there first."""
    lines = docs.read_text().splitlines()
    head = next(line for line in lines if line.startswith("| kind |"))
    column = [cell.strip() for cell in head.split("|")].index(backend)
    for at, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and cells[1] == kind.name:
            if os.environ.get(WRITE) == "1":
                cells[column] = found
                lines[at] = " | ".join(cells).strip()
                docs.write_text("\n".join(lines) + "\n")
            return cells[column]
    raise LookupError(f"{docs} has no line of {kind.name!r}")
