"""Engines beside the models that their rows are compared with."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from genlm.conformance import Program
from genlm.core import EngineError, Query
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from genlm.hf.positions import rope_scalings
from genlm.kit.scaled_copy import VOCABULARY_TOKENS as SMALL_TOKENS
from genlm.kit.scaled_copy import thresholds
from tests.engines import rows_of

from .families import small_family
from .shapes import DEVICE, SHAPE, TOKENS

#: A context, and the continuation of it that is scored.
Scored = tuple[Sequence[int], Sequence[int]]


def draw(n: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random contexts."""
    source = random.Random(seed)
    return [tuple(source.choices(range(TOKENS), k=length)) for _ in range(n)]


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE, **changes})


@define
class Pair:
    """An engine, and the same model beside it as transformers has it.

    ``forwards`` gets the number of input tokens of every forward of the engine's model.
    """

    engine: HFEngine
    reference: Any
    forwards: list[int] = field(factory=list, init=False)

    def ask(self, *contexts: Sequence[int]) -> torch.Tensor:
        return rows_of(self.engine, [Query(tuple(context)) for context in contexts])

    def errors(self, *contexts: Sequence[int]) -> list[str | None]:
        """The errors of contexts that are requested together; ``None`` for a context that has its
        row."""
        queries = [Query(tuple(context)) for context in contexts]
        results: dict[Query, Any] = {}
        while len(results) < len(queries):
            new = [] if results else queries
            answers = self.engine.genlm_step(new, (), self.engine.vocab_size)
            results.update((answer.request, answer.result) for answer in answers)
        found = [results[query] for query in queries]
        return [str(each) if isinstance(each, EngineError) else None for each in found]

    def step(
        self,
        *contexts: Sequence[int],
        dropped: Sequence[Sequence[int]] = (),
        atol: float = 1e-4,
    ) -> set[tuple[int, ...]]:
        """Make one step, compare the rows of the answered contexts, and return these contexts."""
        answers = self.engine.genlm_step(
            [Query(tuple(one)) for one in contexts],
            [Query(tuple(one)) for one in dropped],
            self.engine.vocab_size,
        )
        answered = [answer.request.token_ids for answer in answers]
        if answered:
            rows = torch.stack([answer.result for answer in answers])
            torch.testing.assert_close(rows, self.expected(*answered), atol=atol, rtol=0)
        return set(answered)

    def scores(self, asked: Sequence[Scored]) -> Sequence[torch.Tensor]:
        queries, tails = zip(*((Query(tuple(one)), tail) for one, tail in asked), strict=True)
        return self.engine.genlm_sequence_logprobs(queries, tails, self.engine.vocab_size)

    def expected_scores(self, asked: Sequence[Scored]) -> list[torch.Tensor]:
        scores = []
        for context, tail in asked:
            rows = self.expected(*[(*context, *tail[:n]) for n in range(len(tail))])
            scores.append(rows.gather(1, torch.tensor(tail, device=rows.device)[:, None])[:, 0])
        return scores

    def check_scores(self, *asked: Scored) -> None:
        given, expected = list(self.scores(asked)), self.expected_scores(asked)
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)

    def expected(self, *contexts: Sequence[int]) -> torch.Tensor:
        return torch.stack([row_of(self.reference, one) for one in contexts]).float()

    def check(self, *contexts: Sequence[int]) -> None:
        torch.testing.assert_close(self.ask(*contexts), self.expected(*contexts), atol=1e-4, rtol=0)


@torch.no_grad()
def row_of(model: Any, context: Sequence[int]) -> torch.Tensor:
    """The row of a context in a model of transformers, ``[vocab_size]`` float64."""
    # Copied only if it would remember the longest context, because a copy takes longer than a row.
    config = model.config.get_text_config(decoder=True)
    if rope_scalings(config, "dynamic", "longrope"):
        model = copy.deepcopy(model)
    logits = model(
        input_ids=torch.tensor([list(context)], device=model.device), use_cache=False
    ).logits
    return logits[0, -1].double().log_softmax(-1)


def build(config: PretrainedConfig) -> Any:
    """A random model whose rows are far from uniform, so that a mix-up shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model.to(DEVICE).eval()


def beside(model: Any, reference: Any, **options: Any) -> Pair:
    """An engine over a model, beside a reference model; its ``forwards`` stay empty."""
    return Pair(HFEngine(model, None, HFOptions.parse(options)), reference)


def unproven(model: Any, **options: Any) -> Pair:
    """An engine over a model, or over a new model of a configuration, beside a copy of the
    model."""
    if isinstance(model, PretrainedConfig):
        # The engine sets the attention of its own model's configuration.
        model = build(copy.deepcopy(model))
    pair = beside(model, copy.deepcopy(model), **options)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: pair.forwards.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    return pair


def proven(model: Any, **options: Any) -> Pair:
    """The same engine after it has compared contexts of many lengths with cold ones, so that it
    runs no further forwards for comparison."""
    pair = unproven(model, **options)
    with capture_logs() as events:
        pair.ask(range(250))
    assert "kv.reuse_wrong" not in {event["event"] for event in events}
    pair.engine.genlm_clear_kv_cache()
    pair.forwards.clear()
    return pair


@define(eq=False, kw_only=True)
class Beside(Program):
    """A random program whose rows are compared with the reference of a pair."""

    pair: Pair

    def expected(self, query: Query) -> torch.Tensor:
        return self.pair.expected(query.token_ids)[0]


def check_random_program(
    pair: Pair, seed: object, atol: float = 1e-4, prompt: Sequence[int] = (5, 6, 7)
) -> None:
    """Twenty random things, on contexts of up to 90 tokens, of which many begin with a prompt."""
    Beside(
        engine=pair.engine,
        source=random.Random(str(seed)),
        longest=90,
        tokens=range(pair.engine.vocab_size - 1),
        first=prompt,
        atol=atol,
        most=5,
        pair=pair,
    ).run(20)


@define
class Sweep:
    """The outcome for one family of models.

    ``outcome`` is "right", "wrong", "refused" (with an error that explains it), "not built", or
    "fails by itself" if transformers alone cannot compute the rows. ``why`` gives details.
    """

    family: str
    outcome: str
    why: str = ""
    reuse: str = "-"
    crossed: int = 0


#: The value to which the sweep lowers every threshold of a family.
THRESHOLD = 20


def sweep(family: str, **options: Any) -> Sweep:
    """Build a small model of a family, its thresholds at ``THRESHOLD`` tokens, and compare rows
    from kept state, rows from within a longer context, and scores, with cold ones on both sides of
    the thresholds."""
    try:
        model = small_family(family, THRESHOLD)
    except Exception as error:
        return Sweep(
            family, "not built", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        )
    reference = copy.deepcopy(model)
    if hasattr(reference, "set_attn_implementation"):  # fused attention may ignore some settings
        reference.set_attn_implementation("eager")
    try:
        pair = beside(model, reference, **options)
    except EngineError as error:
        return Sweep(family, "refused", str(error)[:300])
    found = thresholds(model.config.to_dict())
    done = Sweep(family, "right", "", pair.engine.reuse.value, len(found))
    source = random.Random(family)
    longest = min(4 * THRESHOLD + 3, pair.engine.max_context or 4 * THRESHOLD + 3)
    whole, other = (tuple(source.choices(range(SMALL_TOKENS - 4), k=longest)) for _ in range(2))
    worst = 0.0
    with capture_logs() as events:
        for around in (
            (THRESHOLD, 2 * THRESHOLD, 4 * THRESHOLD) if found else (THRESHOLD, 4 * THRESHOLD)
        ):
            stops = range(around - 2, min(around + 3, longest))
            fresh = tuple(source.choices(range(SMALL_TOKENS - 4), k=longest))
            nested = tuple(fresh[:stop] for stop in (1, around // 2, *stops))
            batches = [
                (whole[:stop], (*whole[: stop - 1], 3), other[: stop // 2]) for stop in stops
            ]
            for batch in (*batches, nested):
                try:
                    cold = pair.expected(*batch)
                except Exception as error:
                    return Sweep(family, "fails by itself", f"{error}"[:200], done.reuse)
                distance = (pair.ask(*batch) - cold).abs().nan_to_num(0.0)
                worst = max(worst, float(distance.max()))
            context, tail = other[: around // 2], other[around // 2 : min(around + 3, longest)]
            asked = [(context, tail), (context, (*tail[:-2], 1, 2))]
            for score, cold in zip(pair.scores(asked), pair.expected_scores(asked), strict=True):
                worst = max(worst, float((score - cold).abs().nan_to_num(0.0).max()))
    if any(event["event"] == "kv.reuse_wrong" for event in events):
        done.why = "found out while it ran"
    if worst > 5e-3:  # recurrent state in float32 differs by less
        done.outcome, done.why = "wrong", f"rows are {worst:.3g} off"
    return done
