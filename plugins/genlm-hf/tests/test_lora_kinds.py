"""Every kind of adapter that PEFT saves is applied correctly or rejected, as ``docs/adapters.md``
says."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    OPTConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from genlm.core import InvalidAdapterError
from genlm.hf import AsyncTransformer
from tests.adapter_kinds import KINDS, Kind, make_adapter
from tests.adapter_outcomes import make_case, outcome, reference_rows
from tests.adapter_table import check_refused, strangers, tabled

from .shapes import QWEN3_NEXT, SHAPE


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_lora_kind_has_the_outcome_of_the_table(tiny: str, tmp_path: Path, kind: Kind) -> None:
    case = make_case(kind, tiny, tmp_path)
    forwards: list[int] = []
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        model: Any = lm.underlying_model
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        modules = [(name, type(module)) for name, module in model.named_modules()]
        trainable = [parameter.requires_grad for parameter in model.parameters()]
        found = outcome(lm, case, 1e-4, forwards)
    assert found == tabled(kind, "hf", found)
    # The user's model is identical to before, bit for bit.
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert after.keys() == before.keys()


def tensor_bytes() -> int:
    """The bytes of all tensors of this process, shared ones counted once."""
    gc.collect()
    # Only plain tensors are counted, because torch.compile keeps some that have no memory.
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [found for found in gc.get_objects() if type(found) in kinds]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


TAKES_MEMORY = (
    "plain",
    "LoRA on the output layer",
    "`modules_to_save`: the embedding",
    "`trainable_token_indices`",
)


def test_removing_an_adapter_frees_its_memory(tiny: str, tmp_path: Path) -> None:
    folders = [
        make_adapter(kind, tiny, tmp_path / str(at))
        for at, kind in enumerate(KINDS)
        if kind.name in TAKES_MEMORY
    ]
    assert len(folders) == len(TAKES_MEMORY)
    gc.freeze()  # a million objects that need not be searched for leaks
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:

        def use(folder: str) -> None:
            lm.add_new_lora(folder, "a")
            lm.batch_next_token_logprobs_sync([[1, 2, 3], [4, 5]], lora_name="a")
            lm.next_token_logprobs_sync([1, 2, 3])

        def remove() -> None:
            lm.remove_lora("a")
            lm.clear_kv_cache()

        use(folders[0])  # the first adapter also allocates memory that is kept for all adapters
        remove()
        before = tensor_bytes()
        for folder in folders:
            use(folder)
            assert tensor_bytes() > before
            remove()
            assert tensor_bytes() == before


def test_the_output_layer_in_scores_and_large_batches(tiny: str, tmp_path: Path) -> None:
    """The output layer sees the wanted rows only, which are not those of the batch."""
    (kind,) = [kind for kind in KINDS if kind.name == "LoRA on the output layer"]
    path = make_adapter(kind, tiny, tmp_path / "head")
    context, continuation = [5, 6, 7], [8, 9, 10, 11]
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        lm.add_new_lora(path, "head")
        forwards: list[int] = []
        model: Any = lm.underlying_model
        model.register_forward_pre_hook(lambda *_: forwards.append(1))

        async def ask() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            names = [None, "head"] * 8
            rows = [
                lm.next_token_logprobs([*context, at], lora_name=name)
                for at, name in enumerate(names)
            ]
            answered = await asyncio.gather(*rows)
            assert len(forwards) == 1
            scores = [
                lm.sequence_logprobs(context, continuation, lora_name=name)
                for name in ("head", None)
            ]
            return answered, await asyncio.gather(*scores)

        rows, scores = asyncio.run(ask())
    for at, row in enumerate(rows):
        (expected,) = reference_rows(tiny, path if at % 2 else None, [[*context, at]])
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
    for score, adapter in zip(scores, (path, None), strict=True):
        contexts = [[*context, *continuation[:at]] for at in range(len(continuation))]
        right = reference_rows(tiny, adapter, contexts)
        for at, (row, token) in enumerate(zip(right, continuation, strict=True)):
            assert float(score[at]) == pytest.approx(float(row[token]), abs=1e-4)


def test_names_in_an_adapter_are_never_imported_or_run(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``megatron_core`` and ``auto_mapping`` name modules; PEFT has imported them."""
    canary = tmp_path / "genlm_adapter_canary.py"
    canary.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    path = make_adapter(KINDS[0], tiny, tmp_path / "adapter")
    file = Path(path, "adapter_config.json")
    plain = json.loads(file.read_text())
    mapping = {"base_model_class": "X", "parent_library": canary.stem}
    own = {"megatron_core": canary.stem, "target_modules": "(.*)*(.*)*Z"}
    with AsyncTransformer.from_name(tiny) as lm:
        for name in ("megatron_config", "custom_modules"):
            file.write_text(json.dumps({**plain, **own, name: mapping}))
            with pytest.raises(InvalidAdapterError, match=name):
                lm.add_new_lora(path, "a")
        file.write_text(json.dumps({**plain, **own, "auto_mapping": mapping}))
        lm.add_new_lora(path, "a")
        lm.next_token_logprobs_sync([1, 2], lora_name="a")
    assert not (tmp_path / "ran").exists()


def test_adapters_of_other_models_are_rejected(tiny: str, tmp_path: Path) -> None:
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        check_refused(lm, strangers(tiny, tmp_path))


PARAMETERS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
WITH_A_PATTERN = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.down_proj"],
    "alpha_pattern": {"experts.down_proj": 20},
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (Qwen3MoeConfig, PARAMETERS),
        (Qwen3MoeConfig, WITH_A_PATTERN),
        (Qwen3NextConfig, {"target_modules": "all-linear"}),
    ],
)
def test_adapters_on_experts_give_the_rows_of_peft(
    tiny: str, tmp_path: Path, family: Any, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = family(**QWEN3_NEXT, initializer_range=0.2)
    folder = tmp_path / "model"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    case = make_case(Kind("experts", settings), str(folder), tmp_path)
    with AsyncTransformer.from_name(str(folder), cache_size=0) as lm:
        assert outcome(lm, case, 1e-4) == "right"


@pytest.mark.parametrize("end", ["removed", "closed"])
def test_adapted_parameters_keep_their_place_in_the_model(
    tiny: str, tmp_path: Path, end: str
) -> None:
    """An optimizer knows parameters by their order, and its saved state too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**QWEN3_NEXT, initializer_range=0.2))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    settings = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    adapters = {
        name: make_adapter(Kind("experts", settings), str(folder), tmp_path / name, seed)
        for seed, name in enumerate("ab", 1)
    }
    names, parameters = [*model.state_dict()], [*model.parameters()]
    with AsyncTransformer(model, tokenizer, cache_size=0) as lm:
        rows = [lm.next_token_logprobs_sync([5, 6, 7])]
        for name, path in adapters.items():
            lm.add_new_lora(path, name)
            rows.append(lm.next_token_logprobs_sync([5, 6, 7], lora_name=name))
        for row, path in zip(rows, (None, *adapters.values()), strict=True):
            (expected,) = reference_rows(str(folder), path, [[5, 6, 7]])
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
        if end == "removed":
            for name in adapters:
                lm.remove_lora(name)
            assert [*model.state_dict()] == names
            again = lm.next_token_logprobs_sync([5, 6, 7])
            torch.testing.assert_close(again, rows[0], atol=1e-4, rtol=0)
    assert [*model.state_dict()] == names
    assert [*map(id, model.parameters())] == [*map(id, parameters)]


def test_layers_that_flatten_a_padded_batch_get_adapters_per_token(
    tiny: str, tmp_path: Path
) -> None:
    """The layers of OPT, and shared experts. With kept state, each token is a row of its own."""
    torch.manual_seed(0)
    config = OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=16, init_std=0.2)
    folder = tmp_path / "model"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    case = make_case(Kind("flat", {"target_modules": "all-linear"}), str(folder), tmp_path)
    forwards: list[int] = []
    with AsyncTransformer.from_name(str(folder), cache_size=0, kv_cache_bytes=0) as lm:
        model: Any = lm.underlying_model
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        # The rows come from one forward, and not one by one.
        assert outcome(lm, case, 1e-4, forwards) == "right"
