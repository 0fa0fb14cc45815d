"""With ``check=True`` every result of a live engine is held against the contract, and a violation
names where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from genlm.core import AsyncLM, PluginError, hookimpl
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine
from genlm.core.runtime.results import CHECKED_RESULTS

from ..doubles import Processor

pytestmark = pytest.mark.any_version

BAD_CONTEXT = (7, 7)  # Its row is wrong.


@pytest.fixture
def load() -> Iterator[Callable[..., AsyncLM]]:
    """Makes models over an engine class, and closes them."""
    made: list[AsyncLM] = []

    def load(engine: Callable[[ByteTokenizer], MockEngine], **options: Any) -> AsyncLM:
        made.append(AsyncLM(lambda: engine(ByteTokenizer()), backend="faulty", **options))
        return made[-1]

    yield load
    for lm in made:
        lm.close()


def with_rows(
    wrong: Callable[[torch.Tensor], torch.Tensor], base: type[MockEngine] = MockEngine
) -> type[MockEngine]:
    """An engine with one wrong row."""

    class Engine(base):  # type: ignore[misc, valid-type]
        def row(self, query: Any) -> torch.Tensor:
            row = super().row(query)
            return wrong(row) if query.token_ids == BAD_CONTEXT else row

    return Engine


def answering(hook: str, answer: Any) -> type[MockEngine]:
    """An engine that gives the same answer whatever a hook is asked."""
    return type("Engine", (MockEngine,), {hook: hookimpl(lambda self: answer)})


WRONG = {
    "logsumexp": lambda row: row + 0.5,
    "nan": lambda row: row.index_fill(0, torch.tensor([3]), float("nan")),
    "or \\+inf": lambda row: row.index_fill(0, torch.tensor([3]), float("inf")),
}


@pytest.mark.parametrize("base", [MockEngine, ContinuousMockEngine])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_row_fails_alone_and_is_named(load, what, base):
    lm = load(with_rows(WRONG[what], base), check=True)

    async def together():
        return await asyncio.gather(
            *map(lm.next_token_logprobs, [[1], BAD_CONTEXT, [2]]), return_exceptions=True
        )

    first, error, last = asyncio.run(together())
    hook = "genlm_step" if base is ContinuousMockEngine else "genlm_next_token_logprobs"
    said = rf"backend 'faulty': {hook} returned .*{what}.*\(7, 7\)"
    with pytest.raises(PluginError, match=said):
        raise error
    assert isinstance(first, torch.Tensor)
    assert isinstance(last, torch.Tensor)


@pytest.mark.parametrize(
    ("part", "shape"), [(np.s_[:0], r"\(0, 258\)"), (np.s_[:, :10], r"\(1, 10\)")]
)
@pytest.mark.parametrize("check", [True, None])
def test_rows_of_another_shape_are_rejected(load, part, shape, check):
    class Engine(MockEngine):
        @hookimpl
        def genlm_next_token_logprobs(self, queries):
            return super().genlm_next_token_logprobs(queries)[part]

    with pytest.raises(PluginError, match=rf"_logprobs returned shape {shape}.* \(1, 258\)"):
        load(Engine, check=check).next_token_logprobs_sync([1])


@pytest.mark.parametrize(
    ("drawn", "what"),
    [
        ([[9, 1, 2]], "3 tokens"),
        ([[5]], "the stop token 5"),
        ([[-1]], "the token id -1"),
        ([[258]], "the token id 258; the model has ids 0 to 257"),
        ([7], r"7, not a list of token ids"),
        ([], "0 results"),
        (3, "3 for 1 queries"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_wrong_sample_is_rejected(load, drawn, what, check):
    def padded(tokenizer):
        engine = answering("genlm_sample", drawn)(tokenizer)
        engine.vocab_size = 264
        return engine

    with pytest.raises(PluginError, match=f"genlm_sample returned {what}"):
        asyncio.run(load(padded, check=check).sample([1], 2, [5]))


@pytest.mark.parametrize(
    ("score", "what"),
    [
        (torch.tensor([0.5]), "a score that is nan or above 0"),
        (torch.tensor([float("nan")]), "a score that is nan or above 0"),
        (torch.tensor([-1.0, -1.0]), r"shape \(2,\), torch.float32.*; expected \(1,\)"),
        (torch.tensor([-1.0]).double(), "shape .* torch.float64"),
        ([-1.0], "list, not a tensor"),
    ],
)
@pytest.mark.parametrize("check", [True, None])  # By default the first scores are checked.
def test_wrong_score_is_rejected(load, score, what, check):
    engine = answering("genlm_sequence_logprobs", [score])
    with pytest.raises(PluginError, match=f"genlm_sequence_logprobs returned {what}"):
        load(engine, check=check).sequence_logprobs_sync([1], [2])


@pytest.mark.parametrize("base", [MockEngine, ContinuousMockEngine])
def test_request_declined_by_the_engine_is_made_from_rows(load, base):
    class Engine(base):
        @hookimpl
        def genlm_sample(self, queries, params): ...

        @hookimpl
        def genlm_sequence_logprobs(self, queries, continuations): ...

        def _draws(self, queries, params):
            return [None] * len(queries)

        def _score(self, query, continuation): ...

    lm, native = load(Engine, check=True), load(MockEngine)
    assert lm.sample_sync([1], 3, [], seed=1) == native.sample_sync([1], 3, [], seed=1)
    scores = native.sequence_logprobs_sync([1], [2, 0])
    torch.testing.assert_close(lm.sequence_logprobs_sync([1], [2, 0]), scores)


def test_wrong_return_value_of_a_hook_is_rejected(load):
    said = "genlm_add_lora returned 'loaded'; expected True, for Adapter"
    with pytest.raises(PluginError, match=said):
        load(answering("genlm_add_lora", "loaded"), check=True).add_new_lora("path", "a")


# --- without the option ---------------------------------------------------------------------------


@pytest.mark.parametrize("base", [MockEngine, ContinuousMockEngine])
@pytest.mark.parametrize("what", WRONG)
def test_first_rows_are_checked_by_default(load, what, base):
    """An engine that does not normalise does so in every row: later rows are rejected, too."""

    class Engine(base):
        def row(self, query):
            return WRONG[what](super().row(query))

    lm = load(Engine)
    for i in range(2 * CHECKED_RESULTS):
        with pytest.raises(PluginError, match=f"returned .*{what}"):
            lm.next_token_logprobs_sync([i])
    assert load(Engine, check=False).next_token_logprobs_sync([1]).shape == (258,)


@pytest.mark.parametrize("base", [MockEngine, ContinuousMockEngine])
def test_rows_after_the_first_are_not_checked_by_default(load, base):
    lm = load(with_rows(WRONG["logsumexp"], base))
    lm.batch_next_token_logprobs_sync([[i] for i in range(CHECKED_RESULTS)])
    assert float(lm.next_token_logprobs_sync(BAD_CONTEXT).logsumexp(0)) == pytest.approx(
        0.5, abs=1e-4
    )


@pytest.mark.parametrize("change", [lambda row: row / 0.5, torch.exp, lambda row: row * torch.nan])
def test_first_rows_of_a_wrapper_are_checked_by_default(load, change):
    lm = load(MockEngine, wrappers=[Processor(lambda _, rows: change(rows))])
    for i in range(2 * CHECKED_RESULTS):
        with pytest.raises(PluginError, match="Processor: genlm_process_logprobs returned"):
            lm.next_token_logprobs_sync([i])


def test_wrapper_in_half_precision_is_accepted_by_default(load):
    coarse = Processor(lambda _, rows: rows + 2e-3)
    load(MockEngine, wrappers=[coarse]).next_token_logprobs_sync([1])
    with pytest.raises(PluginError, match=r"to 0 within 0\.0001"):
        load(MockEngine, wrappers=[coarse], check=True).next_token_logprobs_sync([1])


def test_wrapper_may_leave_a_row_without_mass(load):
    """As one that knows no way on."""
    lost = Processor(lambda _, rows: torch.full_like(rows, -torch.inf))
    lm = load(MockEngine, wrappers=[lost])
    assert lm.next_token_logprobs_sync([1]).isneginf().all()


def test_class_in_place_of_an_engine_is_rejected():
    with pytest.raises(PluginError, match="returned the class MockEngine; return an instance"):
        AsyncLM(lambda: MockEngine, backend="mine")
