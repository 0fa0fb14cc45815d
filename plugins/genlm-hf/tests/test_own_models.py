"""Models of a user's own class, which are less than transformers' are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertLMHeadModel, MambaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from genlm.core import EngineError, InvalidOptionError
from genlm.core.mock import ByteTokenizer
from genlm.hf import AsyncTransformer
from genlm.hf.reuse import ReuseMode

from .families import small_family
from .models import build, check_random_program, llama_config, unproven

CONTEXTS = [[72, 105], [72, 105, 33], [40] * 20]


class OwnConfig(PretrainedConfig):
    """It counts layers by another name."""

    model_type = "own_recurrent"

    def __init__(self, vocab_size: int = 258, width: int = 24, depth: int = 2, **others: Any):
        super().__init__(**others)
        self.vocab_size, self.width, self.depth = vocab_size, width, depth


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.body = nn.GRU(config.width, config.width, config.depth, batch_first=True)
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return CausalLMOutput(logits=self.head(self.body(self.embedding(input_ids))[0]))


class Tuples(OwnModel):
    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return (super().forward(input_ids).logits, "state")


class OtherName(OwnModel):
    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens).logits


class ByPosition(OwnModel):
    def forward(self, input_ids: torch.Tensor, /) -> Any:
        return {"loss": None, "logits": super().forward(input_ids).logits}


class LossFirst(OwnModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return None, super().forward(input_ids).logits


class Excluding(OwnModel):
    """It excludes tokens."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        outputs = super().forward(input_ids)
        outputs.logits[..., 7:9] = -float("inf")
        return outputs


KINDS = [OwnModel, Tuples, OtherName, ByPosition, LossFirst, Excluding]


@pytest.mark.parametrize("kind", KINDS)
def test_own_model_is_served_without_state(kind: type[OwnModel]) -> None:
    torch.manual_seed(0)
    model = kind(OwnConfig()).eval()
    plain = Excluding.forward if kind is Excluding else OwnModel.forward
    with AsyncTransformer(model, ByteTokenizer()) as lm:
        found = lm.batch_next_token_logprobs_sync(CONTEXTS)
    for row, context in zip(found, CONTEXTS, strict=True):
        with torch.no_grad():
            right = plain(model, torch.tensor([context])).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(row, right, atol=1e-4, rtol=0)


def test_model_configured_to_return_tuples_gives_right_rows() -> None:
    config = MambaConfig(vocab_size=258, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = build(config)
    with torch.no_grad():
        right = (
            model(torch.tensor(CONTEXTS[1:2], device=model.device)).logits[0, -1].log_softmax(-1)
        )
    model.config.return_dict = False
    with AsyncTransformer(model, ByteTokenizer()) as lm:
        lm.next_token_logprobs_sync(CONTEXTS[0])
        found = lm.next_token_logprobs_sync(CONTEXTS[1])
    torch.testing.assert_close(found, right, atol=1e-4, rtol=0)


def test_scores_of_a_padded_model_take_one_forward() -> None:
    model = build(llama_config(vocab_size=264))
    with torch.no_grad():
        model.get_output_embeddings().weight[258:] *= 30  # padding has most of the mass
    text = [7 * n % 258 for n in range(60)]
    with AsyncTransformer(model, ByteTokenizer()) as lm:
        rows = [lm.next_token_logprobs_uncached(text[:at]) for at in range(9, 60)]
        right = torch.stack(rows)[range(51), text[9:]]
        lm.sequence_logprobs_sync(text[1:10], text[9:])  # scores of this length are then proven
        forwards: list[int] = []
        model.register_forward_hook(lambda _, __, given: forwards.append(given.logits.shape[-1]))
        scores = lm.sequence_logprobs_sync(text[:9], text[9:])
        assert forwards == [264]
    torch.testing.assert_close(scores, right, atol=1e-4, rtol=0)


def reads_version(module: nn.Module, args: Any, given: torch.Tensor) -> None:
    """Raises: RuntimeError: a tensor of inference mode has no version."""
    assert given._version >= 0


@pytest.mark.parametrize("family", ["llama", "mamba", "lfm2"])
def test_model_that_fails_in_inference_mode_is_served(family: str) -> None:
    """As with quanto's weights of four bits, and with the same error."""
    model = small_family(family, 20)
    model.get_input_embeddings().register_forward_hook(reads_version)
    pair = unproven(model)
    assert pair.engine.reuse is not ReuseMode.NONE
    check_random_program(pair, 1, atol=1e-3)


class WithMask(OwnModel):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return super().forward(input_ids)


class LastRow(OwnModel):
    def forward(self, input_ids: torch.Tensor) -> Any:
        return super().forward(input_ids).logits[:, -1]


class NoHead(OwnModel):
    def get_output_embeddings(self) -> None:
        return None


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = OwnModel(OwnConfig())
        self.config = self.model.config


def quantised() -> LastRow:
    model = LastRow(OwnConfig())
    model.hf_quantizer = object()
    return model


def damaged() -> OwnModel:
    model = OwnModel(OwnConfig())
    nn.init.constant_(model.head.weight[3], float("nan"))
    return model


def test_error_of_an_unsuitable_model_says_what_is_needed() -> None:
    for model, needed in (
        (Wrapped(), "Wrapped has no device, which every model has; give a Pre"),
        (WithMask(OwnConfig()), "WithMask cannot be served .*'attention_mask'.* token ids"),
        (LastRow(OwnConfig()), r"LastRow cannot be served .*logits of shape \[1, 258\]"),
        (NoHead(OwnConfig()), r"return the layer from get_output_embeddings\(\)"),
        (quantised(), "LastRow cannot be served .*; it is quantised: load it without that, or its"),
        (damaged(), "rows of this model are NaN in torch.float32; look for NaN among its weights"),
        (nn.DataParallel(OwnModel(OwnConfig())), r"DataParallel has no .*; give model\.module"),
        (nn.Linear(2, 2), "Linear has no configuration, which every model has; give a"),
        (OwnModel(OwnConfig()).to("meta"), "device_map that keeps the embeddings in memory"),
    ):
        with pytest.raises(EngineError, match=needed):
            AsyncTransformer(model, ByteTokenizer())


def test_name_in_place_of_a_model_names_the_loading_function() -> None:
    for given in (["org/model"], ["org/model", ByteTokenizer()]):
        with pytest.raises(InvalidOptionError, match=r"from_name\('org/model'\)"):
            AsyncTransformer(*given)
    with pytest.raises(InvalidOptionError, match="needs a tokenizer"):
        AsyncTransformer(OwnModel(OwnConfig()))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_masked_language_model_is_rejected_however_small_it_is(layers: int) -> None:
    """In one layer, the last row of a context is that of a causal model."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertLMHeadModel(BertConfig(vocab_size=258, num_hidden_layers=layers, **shape)).eval()
    with pytest.raises(EngineError, match="BertLMHeadModel depend on later tokens or padding"):
        AsyncTransformer(model, ByteTokenizer())
