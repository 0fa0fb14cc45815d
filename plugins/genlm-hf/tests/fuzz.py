"""Random programs, each on a small model of a family. The model's thresholds are near the lengths
of contexts, and so are the engine's budget, chunks and constants. Every answer is compared with
that of a copy of the model without the engine."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import peft
import torch
from attrs import define, field
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig

from genlm.conformance import Program, Violation
from genlm.core import Query
from genlm.core.errors import EngineError, InvalidAdapterError, UnsupportedError
from genlm.hf.costs import COSTS, Costs
from genlm.hf.engine import HFEngine
from genlm.hf.graphs import recorder_for
from genlm.hf.operators import Operators
from genlm.hf.options import HFOptions
from genlm.kit.kv.sharing import SharingCosts
from genlm.kit.scaled_copy import VOCABULARY_TOKENS
from tests.programs import constants

from .families import small_family
from .models import build, llama_config, row_of
from .quantised import dequantised

#: Families whose state is kept in snapshots, or not at all.
RECURRENT = (
    "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid",
    "inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2",
    "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_next", "recurrent_gemma", "rwkv",
)  # fmt: skip

#: Families whose state is kept in slots.
ATTENTION = (
    "bloom", "deepseek_v3", "doge", "gemma2", "gemma3_text", "gpt_neo", "gpt_oss", "llama",
    "llama4_text", "ministral3", "mistral", "phi3", "qwen3_moe",
)  # fmt: skip

#: Constants that decide how a context is computed, each with other values.
CONSTANTS = {
    "genlm.hf.costs.COSTS": (
        COSTS,
        {},
        {"cpu": Costs(plenty=100, forward=1)},
        {"cpu": Costs(products=64, plenty=300, forward=4)},
    ),
    "genlm.hf.layout.SPARE_TOKENS": (0, 32, 4096),
    "genlm.hf.static.STEPS_BEFORE_RECORDING": (1, 3),
    "genlm.hf.strategies.recorder_for": (recorder_for, lambda device: Operators()),
    "genlm.hf.strategies.SHARING_COSTS": tuple(
        SharingCosts(waiting=waiting, sharing=sharing, trunk=trunk, each=min(waiting, 8))
        for waiting in (2, 40)
        for sharing in (1, 16, 1024)
        for trunk in (2, 32, 512)
    ),
}

#: Modules that may have an adapter. Experts are adapted only together.
TARGETS = ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj")

#: The largest difference of log-probabilities, in nats. Recurrent state in float32 differs by less.
ATOL = 5e-3

#: The same if products are computed in bfloat16. Rows of other contexts differ by whole nats.
FOUR_BITS_ATOL = 0.3

#: The families that bitsandbytes' kernels for CPUs can compute.
FOUR_BITS_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}

MAX_TOKENS = 90


@contextmanager
def program(families: Sequence[str], source: random.Random) -> Iterator[Program]:
    """A program on a small model of one of the families."""
    options = {
        "max_batch_tokens": source.choice((4, 16, 48, 2048)),
        "kv_cache_bytes": source.choice((None, None, 0, 1 << source.randint(12, 22))),
        "static": source.choice((None, True)),
    }
    with constants(CONSTANTS, source), tempfile.TemporaryDirectory() as folder:
        engine, plain = any_engine(families, source, options)
        made = OnHF(
            engine=engine,
            source=source,
            longest=min(MAX_TOKENS, engine.max_context or MAX_TOKENS),
            tokens=range(VOCABULARY_TOKENS - 4),
            most=12,
            atol=ATOL,
            may_lack_room=True,
            folder=Path(folder),
            references={None: plain},
        )
        made.counts[engine.reuse.value] += 1
        try:
            yield made
        except BaseException as error:
            error.add_note(f"{plain.config.model_type}, {options}, {engine.reuse.value}")
            raise
        engine.genlm_close()


@contextmanager
def program_in_four_bits(source: random.Random) -> Iterator[Program]:
    """One on a model whose weights bitsandbytes has quantised, with adapters; the references have
    the same values in plain weights."""
    with tempfile.TemporaryDirectory() as folder:
        build(llama_config(**FOUR_BITS_SIZES)).save_pretrained(folder)
        options = {
            "dtype": torch.float32,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=source.choice(("fp4", "nf4")),
                bnb_4bit_use_double_quant=source.choice((True, False)),
            ),
        }
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        plain = dequantised(model, folder).eval()
        plain.set_attn_implementation("eager")
        parsed = {"max_batch_tokens": source.choice((4, 16, 2048))}
        engine = HFEngine(model, None, HFOptions.parse(parsed))
        made = InFourBits(
            engine=engine,
            source=source,
            longest=60,
            tokens=range(VOCABULARY_TOKENS - 4),
            most=8,
            atol=FOUR_BITS_ATOL,
            may_lack_room=True,
            folder=Path(folder),
            references={None: plain},
        )
        yield made
        engine.genlm_close()


def any_engine(
    families: Sequence[str], source: random.Random, options: dict[str, Any]
) -> tuple[HFEngine, Any]:
    """An engine on a model of one of the families, and a copy of the model.

    An old version of transformers lacks some families, and computes others in a way that hf
    rejects.
    """
    for family in source.sample(families, len(families)):
        if family in CONFIG_MAPPING:
            model = small_family(family, source.choice((5, 9, 20, 40)))
            plain = copy.deepcopy(model)
            with suppress(EngineError):
                return HFEngine(model, None, HFOptions.parse(options)), plain
    raise AssertionError("none of the families can be used")


@define(eq=False, kw_only=True)
class OnHF(Program):
    """Its references, by the path of their adapter, are models of transformers and PEFT."""

    folder: Path
    references: dict[str | None, Any]
    _rows: dict[tuple[str | None, Query], torch.Tensor] = field(factory=dict, init=False)

    def adapt(self) -> None:
        with suppress(InvalidAdapterError, UnsupportedError):
            super().adapt()

    def adapter(self) -> tuple[str, str] | None:
        """A new adapter of some kinds of layers."""
        plain = self.references[None]
        names = {name.rpartition(".")[2] for name, one in plain.named_modules() if is_linear(one)}
        targets = sorted(names.intersection(TARGETS))
        if not targets:
            return None
        chosen = self.source.sample(targets, self.source.randint(1, len(targets)))
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=chosen)
        adapted = peft.get_peft_model(copy.deepcopy(plain), config)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.source.randrange(1 << 30))
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.2)
        folder = str(self.folder / str(len(self.references)))
        adapted.eval().save_pretrained(folder)
        self.references[folder] = adapted
        return self.source.choice("ab"), folder

    def reference(self, query: Query) -> Any:
        return self.references[query.adapter and query.adapter.path]

    def expected(self, query: Query) -> torch.Tensor:
        key = query.adapter and query.adapter.path, Query(query.context)
        if key not in self._rows:
            self._rows[key] = row_of(self.reference(query), query.token_ids)
        return self._rows[key]

    def compare_row(self, query: Query, row: torch.Tensor, of: slice = slice(None)) -> None:
        try:
            super().compare_row(query, row, of)
        except Violation:
            self.counts["chaotic"] += 1
            if not self.is_chaotic(query):
                raise

    @torch.no_grad()
    def is_chaotic(self, query: Query) -> bool:
        """Whether rounding decides the row, for instance because two experts are about equally
        likely. Then the row changes with the precision, or with changes of the weights as small as
        rounding."""
        noise = torch.Generator().manual_seed(0)
        for off in (0.0, *(1e-6,) * 8):
            model = copy.deepcopy(self.reference(query)).double()
            model.set_experts_implementation("eager")  # other implementations have no float64
            for weight in model.parameters():
                weight.mul_(1 + off * torch.randn(weight.shape, generator=noise))
            away = row_of(model, query.token_ids) - self.expected(query)
            if away.abs().max() > ATOL / 5:
                return True
        return False


@define(eq=False, kw_only=True)
class InFourBits(OnHF):
    """On a CPU, bitsandbytes computes in bfloat16 if the processor supports it."""

    def is_chaotic(self, query: Query) -> bool:
        return False


def is_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear
