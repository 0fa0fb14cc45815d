from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import define
from structlog.testing import capture_logs
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
)

from genlm.core import EngineError, Query
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from genlm.hf.positions import rope_scalings
from genlm.kit.twin import TOKENS as SMALL_TOKENS
from genlm.kit.twin import thresholds
from tests.adapter_kinds import Kind, make_adapter
from tests.engines import rows_of
from tests.fixtures import *  # noqa: F403
from tools.tiny import write_tokenizer

from .families import small_family
from .shapes import SHAPE, TOKENS

#: Widths that 4-bit quantisation can cut into its blocks.
BLOCKS = {"hidden_size": 64, "intermediate_size": 128}


@define
class Pair:
    """An engine, and the same model beside it as transformers has it.

    ``forwards`` gets the number of input tokens of every forward of the engine's model.
    """

    engine: HFEngine
    reference: Any
    forwards: list[int]

    def ask(self, *contexts: Sequence[int]) -> torch.Tensor:
        return rows_of(self.engine, [Query(tuple(context)) for context in contexts])

    @torch.no_grad()
    def expected(self, *contexts: Sequence[int]) -> torch.Tensor:
        # Copied only where it would remember the longest context: a copy takes longer than a row.
        config = self.reference.config.get_text_config(decoder=True)
        remembers = rope_scalings(config, "dynamic", "longrope")
        rows = []
        for context in contexts:
            model = copy.deepcopy(self.reference) if remembers else self.reference
            logits = model(torch.tensor([list(context)]), use_cache=False).logits
            rows.append(logits[0, -1].float())
        return torch.stack(rows).log_softmax(-1)

    def check(self, *contexts: Sequence[int], atol: float = 1e-4) -> None:
        torch.testing.assert_close(self.ask(*contexts), self.expected(*contexts), atol=atol, rtol=0)


def build(config: PretrainedConfig, seed: int = 0, **arguments: Any) -> Any:
    """A random model whose rows are far from uniform, so that a mix-up shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


def make_pair(config: PretrainedConfig, **options: Any) -> Pair:
    model = build(config)
    reference = copy.deepcopy(model)
    pair = pair_of(model, reference, **options)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: pair.forwards.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    return pair


def proven(pair: Pair, length: int = 250) -> Pair:
    """The same engine, which has compared contexts up to ``length`` with cold ones: then the
    forwards that it runs are those that are asked for."""
    with capture_logs() as events:
        pair.ask(range(length))
    assert "kv.reuse_wrong" not in {event["event"] for event in events}
    pair.engine.genlm_clear_kv_cache()
    pair.forwards.clear()
    return pair


def pair_of(model: Any, reference: Any, **options: Any) -> Pair:
    return Pair(HFEngine(model, None, HFOptions.parse(options)), reference, [])


@pytest.fixture
def pair() -> Callable[..., Pair]:
    """Makes an engine from a configuration and the backend's options."""
    return lambda config, **options: proven(make_pair(config, **options))


@pytest.fixture
def unproven() -> Callable[..., Pair]:
    """The same, before any row has been compared with a cold one."""
    return make_pair


@pytest.fixture
def beside() -> Callable[..., Pair]:
    """Makes an engine from a model, beside another one that its rows are compared with;
    ``forwards`` stays empty."""
    return pair_of


@pytest.fixture(scope="session")
def interleave() -> Callable[..., None]:
    """Asks an engine in random batches of known, cut, grown and forked contexts, and compares every
    row."""

    def ask(model: Pair, seed: object, atol: float = 1e-4) -> None:
        source = random.Random(str(seed))
        known: list[tuple[int, ...]] = [(5, 6, 7)]
        for _ in range(12):
            batch = set()
            for _ in range(source.randint(1, 5)):
                context = source.choice(known)
                cut = source.choice([len(context), len(context), source.randint(1, len(context))])
                grown = source.choices(range(TOKENS), k=source.choice([0, 1, 1, 1, 3, 20]))
                batch.add((*context[:cut], *grown)[:90])
            model.check(*batch, atol=atol)
            known.extend(batch)

    return ask


@pytest.fixture
def llama_config() -> Callable[..., LlamaConfig]:
    return lambda **changes: LlamaConfig(**{**SHAPE, **changes})


@pytest.fixture
def llama() -> Pair:
    return proven(make_pair(LlamaConfig(**SHAPE)))


@define
class Sweep:
    """What became of one family of models.

    ``outcome`` is "right", "wrong", "refused" (by an error that says why), "not built", or "fails
    by itself", where transformers alone cannot compute the rows; ``why`` says more.
    """

    family: str
    outcome: str
    why: str = ""
    reuse: str = "-"
    crossed: int = 0


#: Where the sweep puts every threshold of a family.
FAR = 20


def sweep_family(family: str) -> Sweep:
    """Build a small model of a family, its thresholds at ``FAR`` tokens, and compare rows from kept
    state, and scores, with cold ones on both sides of them."""
    try:
        model = small_family(family, FAR)
    except Exception as error:
        return Sweep(
            family, "not built", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        )
    reference = copy.deepcopy(model)
    try:
        pair = Pair(HFEngine(model, None), reference, [])
    except EngineError as error:
        return Sweep(family, "refused", str(error)[:300])
    found = thresholds(model.config.to_dict())
    done = Sweep(family, "right", "", pair.engine.reuse.value, len(found))
    source = random.Random(family)
    longest = min(4 * FAR + 3, pair.engine.max_context or 4 * FAR + 3)
    whole, other = (tuple(source.choices(range(SMALL_TOKENS - 4), k=longest)) for _ in range(2))
    worst = 0.0
    with capture_logs() as events:
        for around in (FAR, 2 * FAR, 4 * FAR) if found else (FAR, 4 * FAR):
            for stop in range(around - 2, min(around + 3, longest)):
                batch = (whole[:stop], (*whole[: stop - 1], 3), other[: stop // 2])
                try:
                    cold = pair.expected(*batch)
                except Exception as error:
                    return Sweep(family, "fails by itself", f"{error}"[:200], done.reuse)
                distance = (pair.ask(*batch) - cold).abs().nan_to_num(0.0)
                worst = max(worst, float(distance.max()))
            tokens = torch.tensor(other[around // 2 : min(around + 3, longest)])
            prefixes = [other[: around // 2 + at] for at in range(len(tokens))]
            cold = pair.expected(*prefixes).gather(1, tokens[:, None])[:, 0]
            (scores,) = pair.engine.genlm_sequence_logprobs([Query(prefixes[0])], [tokens.tolist()])
            worst = max(worst, float((scores - cold).abs().nan_to_num(0.0).max()))
    if any(event["event"] == "kv.reuse_wrong" for event in events):
        done.why = "found out while it ran"
    if worst > 5e-3:  # recurrent state in float32 is off by less
        done.outcome, done.why = "wrong", f"rows are {worst:.3g} off"
    return done


@pytest.fixture(scope="session")
def sweep() -> Callable[[str], Sweep]:
    """Tries one family of models; see :func:`sweep_family`."""
    return sweep_family


@pytest.fixture(scope="session")
def contexts() -> Callable[..., list[tuple[int, ...]]]:
    """Draws contexts: how many, and how long."""

    def draw(n: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
        source = random.Random(seed)
        return [tuple(source.choices(range(TOKENS), k=length)) for _ in range(n)]

    return draw


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama and a byte tokenizer."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder, "<end>")
    build(LlamaConfig(**{**SHAPE, **BLOCKS})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Mamba and the same tokenizer."""
    folder = str(tmp_path_factory.mktemp("recurrent"))
    write_tokenizer(folder, "<end>")
    config = MambaConfig(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, state_size=4)
    build(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def lora_folders(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two LoRA adapters of different rank and layers."""
    pytest.importorskip("peft", reason="LoRA needs peft")
    settings = {
        "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "b": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "down_proj"]},
    }
    folder = tmp_path_factory.mktemp("lora")
    return {
        name: make_adapter(Kind(name, given), tiny, folder / name)
        for name, given in settings.items()
    }
