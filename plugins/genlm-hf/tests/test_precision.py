"""Half precision, quantised weights and compiled models: rows are float32, and state is reused all
the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaForCausalLM,
    MambaConfig,
    RwkvConfig,
)

from genlm.core import EngineError, Query
from genlm.hf.engine import HFEngine
from genlm.hf.loading import load_pretrained
from genlm.hf.options import HFOptions
from genlm.hf.reuse import ReuseMode
from genlm.hf.runner import Runner
from tests.engines import rows_of

from .models import beside, build, check_random_program, draw, llama_config, proven, unproven
from .shapes import SHAPE


def load(folder: str, **options: Any) -> Any:
    return load_pretrained(folder, HFOptions.parse(options))[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_model_gives_normalised_float32_rows(dtype: str) -> None:
    model = proven(llama_config(dtype=dtype), max_batch_tokens=48)
    assert model.engine.model.dtype == getattr(torch, dtype)
    assert model.engine.reuse is ReuseMode.SHARED
    rows = model.ask((1, 2, 3), (1, 2, 3, 4))
    assert rows.dtype == torch.float32
    assert rows.logsumexp(-1).abs().max() < 1e-4
    check_random_program(model, seed=dtype, atol=0.1)


@pytest.mark.any_version
def test_half_precision_of_a_real_model_reuses_state(real_model: str) -> None:
    """Its logits are so large that a step of bfloat16 is an eighth of a nat."""
    engine = HFEngine(load(real_model, dtype="bfloat16"), None)
    assert engine.reuse is ReuseMode.SHARED


@pytest.mark.parametrize(("noise", "served"), [(1e-3, True), (0.2, False)])
def test_only_moderately_noisy_forwards_are_accepted(noise: float, served: bool) -> None:
    """Kernels that are chosen by the size of a batch round differently, on a GPU most of all."""

    class Noisy(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits *= 1 + noise * (len(kwargs["input_ids"]) > 1)
            return output

    model = Noisy(llama_config()).eval()
    if served:
        assert HFEngine(model, None).reuse is ReuseMode.SHARED
    else:
        with pytest.raises(EngineError, match="depend on later tokens or padding"):
            HFEngine(model, None)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_wrong_reuse_mode_is_rejected_even_if_rows_are_nearly_uniform(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of wrong contexts are nearer to the right ones there than rounding may be elsewhere."""
    config = llama_config(dtype="bfloat16")
    if family == "bert":
        shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
        config = BertConfig(vocab_size=257, num_hidden_layers=2, is_decoder=True, **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
    right = HFEngine(model, None)
    rows = rows_of(right, [Query((1, 2, 3)), Query((4, 5, 6))])
    assert rows.std(-1).max() < 0.15
    assert (rows - rows.roll(1, -1)).abs().max() < 1.0
    assert right.reuse is ReuseMode.SHARED
    right.genlm_close()

    def wrong(self: Runner, *args: Any, run: Any = Runner.packed) -> torch.Tensor:
        return run(self, *args).roll(1, -1)

    monkeypatch.setattr(Runner, "packed", wrong)
    assert HFEngine(model, None).reuse not in (ReuseMode.SHARED, ReuseMode.PACKED)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def another_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another default type for new tensors, as a user's program may set it."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("another_default")
@pytest.mark.parametrize("config", [Gemma2Config, GptOssConfig, MambaConfig, RwkvConfig])
def test_dtype_of_the_model_is_kept_under_another_default_dtype(config: Any) -> None:
    shape = {**SHAPE, "head_dim": 8, "num_local_experts": 4, "attention_hidden_size": 32}
    model = unproven(config(**shape, dtype=torch.float32), max_batch_tokens=48)
    assert model.engine.model.dtype == torch.float32
    check_random_program(model, seed=config.__name__, atol=5e-4)
    (scores,) = model.scores([((1, 2, 3), (5, 6))])
    assert scores.dtype == torch.float32
    expected = model.expected((1, 2, 3))[0, 5]
    torch.testing.assert_close(scores[0], expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize(("bits", "stored"), [(8, torch.int8), (4, torch.uint8)])
def test_quantised_model_reuses_state_with_right_rows(
    bits: int, stored: torch.dtype, tiny: str
) -> None:
    pytest.importorskip(
        "bitsandbytes", reason="bitsandbytes is not installed: pip install 'genlm-hf[bitsandbytes]'"
    )
    options = {f"load_in_{bits}bit": True}
    model = beside(load(tiny, bitsandbytes_opts=options), load(tiny, bitsandbytes_opts=options))
    assert stored in {weight.dtype for weight in model.engine.model.parameters()}
    assert model.engine.reuse is ReuseMode.SHARED
    rows = model.ask((1, 2, 3))
    assert rows.dtype == torch.float32
    plain = beside(load(tiny), None).ask((1, 2, 3))
    assert (rows - plain).abs().max() > 0.01, "the options are lost"
    check_random_program(model, seed=0, atol=0.1)


def rounding(config: Any) -> Any:
    """A model whose linear layers round their inputs, each token by a scale of its own, as int8
    layers with dynamic activations do. Forwards of different size differ as little as kernels do,
    but rounding enlarges the difference."""
    model = build(config)

    def kernel(module: Any, given: Any, embedded: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(embedded.numel())
        return embedded * (1 + 1e-5 * torch.randn(embedded.shape, generator=generator))

    model.get_input_embeddings().register_forward_hook(kernel)

    def rounded(module: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = given[0].abs().amax(-1, keepdim=True) / 7
        return ((given[0] / scale).round() * scale,)

    for part in model.modules():
        if isinstance(part, torch.nn.Linear) and part is not model.get_output_embeddings():
            part.register_forward_pre_hook(rounded)
    model.hf_quantizer = object()  # transformers' own quantised models have one
    return model


def test_layers_that_round_their_input_do_not_stop_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config(num_hidden_layers=4, hidden_size=128, intermediate_size=128)
    engine = HFEngine(rounding(config), None)
    assert engine.reuse is ReuseMode.SHARED
    apart = []
    with capture_logs() as events:
        for context in draw(5, 70):
            rows_of(engine, [Query(context[:60])])
            kept, cold = (rows_of(engine, [Query(context, cold=cold)]) for cold in (False, True))
            apart.append(float((kept - cold).abs().max()))
    assert max(apart) > 0.5, "nothing was rounded to another number"
    assert "kv.reuse_wrong" not in {event["event"] for event in events}

    def wrong(self: Runner, *args: Any, run: Any = Runner.packed) -> torch.Tensor:
        return run(self, *args) * 1.02

    # The model's own rows do not show the error, but those of the scaled copy do.
    monkeypatch.setattr(Runner, "packed", wrong)
    assert HFEngine(rounding(config), None).reuse not in (ReuseMode.SHARED, ReuseMode.PACKED)


@pytest.mark.any_version
def test_real_model_of_four_bits_reuses_state(real_model: str) -> None:
    """On a CPU, bitsandbytes computes wide layers in bfloat16, whatever the model's type."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    engine = HFEngine(load(real_model, bitsandbytes_opts={"load_in_4bit": True}), None)
    assert engine.reuse is ReuseMode.SHARED


@pytest.mark.any_version
def test_compiled_model_gives_the_rows_of_a_plain_one(tiny: str) -> None:
    """Traced, and traced again where shapes are new, which takes seconds for each layer;
    `costly_compiled.py` has more of them, and compiled, too."""
    check_compiled(tiny, backend="eager", num_hidden_layers=1)


def check_compiled(tiny: str, backend: str, **hf_opts: Any) -> None:
    graphs = counters["stats"]["unique_graphs"]
    options = {"dynamic": True, "backend": backend}
    model = beside(load(tiny, hf_opts=hf_opts, compile_opts=options), load(tiny, hf_opts=hf_opts))
    assert counters["stats"]["unique_graphs"] > graphs
    assert model.engine.reuse is ReuseMode.SHARED
    model.check((1, 2, 3), (4, 5, 6, 7, 8))
    model.check((1, 2, 3, 4, 7), (1, 2, 3, 4, 8), (5, 6, 9, 10))
    model.check((1, 2, 3, 4, 7, 5), (1, 2, 3, 4, 8, 6), (5, 6))
