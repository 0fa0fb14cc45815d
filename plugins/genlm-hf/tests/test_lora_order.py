"""The base model stays itself, whatever adapters are added, asked and removed, in whatever
order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from genlm.core.errors import InvalidAdapterError
from genlm.hf import AsyncTransformer
from tests.adapter_kinds import KINDS, make_adapter
from tests.adapter_outcomes import reference_rows

CONTEXT = [2, 8, 14, 36]


# PEFT says so of every module where the active one is removed.
@pytest.mark.filterwarnings("error:Adapter .* was active")
@pytest.mark.parametrize("order", list(itertools.permutations("ab")))
@pytest.mark.parametrize("asked_between", [None, "a", "b"])
def test_the_base_model_stays_itself(
    tiny: str, lora_folders: dict[str, str], order: tuple[str, ...], asked_between: str | None
) -> None:
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        base = lm.next_token_logprobs_uncached(CONTEXT)

        def check() -> None:
            torch.testing.assert_close(
                lm.next_token_logprobs_uncached(CONTEXT), base, atol=1e-4, rtol=0
            )

        for name in order:  # they adapt different modules: PEFT wraps some of them only now
            lm.add_new_lora(lora_folders[name], name)
            check()
        if asked_between is not None:
            row = lm.next_token_logprobs_uncached(CONTEXT, lora_name=asked_between)
            assert not torch.allclose(row, base, atol=1e-2)
            check()
        for name in order:
            lm.remove_lora(name)
            check()


#: Kinds that change one layer in different ways.
PAIRS = [
    ("LoRA on the embedding", "`trainable_token_indices`"),
    ("LoRA on the embedding", "`modules_to_save`: the embedding"),
    ("`modules_to_save`: the embedding", "`trainable_token_indices`"),
    ("LoRA on the output layer", "`modules_to_save`: the output layer"),
    ("every linear layer", "`target_parameters`"),
]


@pytest.mark.parametrize("kinds", [order for pair in PAIRS for order in (pair, pair[::-1])])
def test_a_layer_is_changed_in_one_way_at_a_time(
    tiny: str, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    by_name = {kind.name: kind for kind in KINDS}
    folders: dict[str | None, str | None] = {None: None}
    for name, kind in zip(("first", "plain", "second"), (kinds[0], "plain", kinds[1]), strict=True):
        folders[name] = make_adapter(by_name[kind], tiny, tmp_path / name)
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:

        def check(*names: str | None) -> None:
            for name in names:
                (expected,) = reference_rows(tiny, folders[name], [CONTEXT])
                row = lm.next_token_logprobs_sync(CONTEXT, lora_name=name)
                torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)

        for name in ("first", "plain"):
            lm.add_new_lora(str(folders[name]), name)
        names = [name for name, _ in lm.underlying_model.named_parameters()]
        with pytest.raises(
            InvalidAdapterError, match=r"the adapter 'first' does so by .*, and PEFT"
        ):
            lm.add_new_lora(str(folders["second"]), "second")
        assert [name for name, _ in lm.underlying_model.named_parameters()] == names
        check(None, "first", "plain")
        lm.remove_lora("first")
        lm.add_new_lora(str(folders["second"]), "second")
        check(None, "plain", "second")


def test_two_adapters_change_the_same_parameters(tiny: str, tmp_path: Path) -> None:
    (kind,) = (each for each in KINDS if each.name == "`target_parameters`")
    folders = [make_adapter(kind, tiny, tmp_path / str(seed), seed) for seed in (1, 2)]
    with AsyncTransformer.from_name(tiny, cache_size=0) as lm:
        for folder in folders:
            lm.add_new_lora(folder, folder)
        for folder in folders:
            (expected,) = reference_rows(tiny, folder, [CONTEXT])
            row = lm.next_token_logprobs_sync(CONTEXT, lora_name=folder)
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
