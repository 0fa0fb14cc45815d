"""The user's forward hooks on a served model, for instance for steering."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import attrs
import pytest
import torch
from structlog.testing import capture_logs

from genlm.core import EngineError, Query
from genlm.hf.engine import HFEngine

from .families import small_family
from .models import Pair, draw, unproven

#: One model for each way of keeping state: in slots, packed; in slots, by equal lengths; in
#: snapshots.
FAMILIES = ("llama", "bloom", "lfm2")


def steered(module: Any, args: Any, given: Any) -> Any:
    hidden = given if isinstance(given, torch.Tensor) else given[0]
    hidden += 2 * torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)


def steered_at_the_end(module: Any, args: Any, given: Any) -> Any:
    hidden = given if isinstance(given, torch.Tensor) else given[0]
    hidden[:, -1] += 2 * torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)


def set_on(pair: Pair, hook: Any) -> list[Any]:
    """On a layer of both models."""
    found = []
    for model in (pair.engine.model, pair.reference):
        layers = [each for name, each in model.named_modules() if name.endswith((".h.0", "rs.0"))]
        found.append(layers[0].register_forward_hook(hook))
    return found


@pytest.fixture(params=FAMILIES)
def pair(request: Any) -> Pair:
    return unproven(small_family(request.param, 64))


def set_forward(pair: Pair, hook: Any) -> None:
    """In place of that of a layer of both models: the same, followed by a hook's change."""
    for model in (pair.engine.model, pair.reference):
        layers = [each for name, each in model.named_modules() if name.endswith((".h.0", "rs.0"))]
        layers[0].forward = followed_by(hook, layers[0].forward)


def followed_by(hook: Any, forward: Any) -> Any:
    def changed(*args: Any, **kwargs: Any) -> Any:
        given = forward(*args, **kwargs)
        hook(None, args, given)
        return given

    return changed


def texts(n: int, length: int) -> list[tuple[int, ...]]:
    """Random contexts of small models."""
    return [tuple(token % 50 for token in one) for one in draw(n, length)]


def grow(pair: Pair) -> list[int]:
    """Compare rows of contexts that grow; the tokens that each step computed."""
    contexts, forwards = texts(3, 7) + texts(1, 12), []
    for step in range(6):
        pair.forwards.clear()
        pair.check(*contexts)
        forwards.append(sum(pair.forwards))
        contexts = [(*one, 3 + step) for one in contexts]
    return forwards


def test_hook_on_the_last_position_gives_rows_of_whole_forwards(
    pair: Pair,
) -> None:
    before = grow(pair)
    hooks = set_on(pair, steered_at_the_end)
    with capture_logs() as events:
        grow(pair)
    assert "kv.reuse_stopped" in {event["event"] for event in events}
    for hook in hooks:
        hook.remove()
    grow(pair)
    pair.engine.genlm_clear_kv_cache()
    assert grow(pair)[1:3] == before[1:3], "state is kept again"


def test_a_hook_in_a_new_table_of_hooks_is_seen(pair: Pair) -> None:
    """Programs drop all hooks of a module by giving it another table."""
    for model in (pair.engine.model, pair.reference):
        for name, module in model.named_modules():
            if name.endswith((".h.0", "rs.0")):
                module._forward_hooks = OrderedDict()
    grow(pair)
    set_on(pair, steered_at_the_end)
    grow(pair)


def test_a_hook_on_all_positions_of_a_model_in_use_keeps_the_reuse_of_state(pair: Pair) -> None:
    set_on(pair, steered)
    with capture_logs() as events:
        forwards = grow(pair)
    assert "kv.reuse_stopped" not in {event["event"] for event in events}
    assert forwards[2:4] == [4, 4], "a token for each context"


@pytest.mark.parametrize("hook", [steered, steered_at_the_end])
def test_prompt_pinned_under_a_hook_is_not_reused_without_it(pair: Pair, hook: Any) -> None:
    (context,) = texts(1, 7)
    hooks = set_on(pair, hook)
    pair.engine.genlm_cache_prefix(Query(context))
    for one in hooks:
        one.remove()
    pair.check((*context, 9))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hook", [steered, steered_at_the_end])
@pytest.mark.parametrize("comes", [True, False])
def test_row_of_a_chunked_prompt_follows_the_hooks_at_its_last_step(
    family: str, hook: Any, comes: bool
) -> None:
    pair = unproven(small_family(family, 64), max_batch_tokens=8)
    (prompt,) = texts(1, 40)
    hooks = [] if comes else set_on(pair, hook)
    assert not pair.step(prompt), "it has a chunk in this step"
    if comes:
        set_on(pair, hook)
    for one in hooks:
        one.remove()
    while not pair.step():
        pass


def test_state_from_before_a_hook_is_dropped(pair: Pair) -> None:
    (context,) = texts(1, 7)
    pair.check(context)
    set_on(pair, steered)
    with capture_logs() as events:
        pair.check((*context, 9))
        pair.check((*context, 9, 1))
        pair.forwards.clear()
        pair.check((*context, 9, 1, 4))
    assert pair.forwards == [1]
    assert "kv.reuse_stopped" not in {event["event"] for event in events}


def test_a_forward_that_replaces_one_of_a_model_in_use_is_noticed(pair: Pair) -> None:
    (context,) = texts(1, 7)
    pair.check(context)
    set_forward(pair, steered)
    pair.check((*context, 9))
    pair.check((*context, 9, 1))
    pair.forwards.clear()
    pair.check((*context, 9, 1, 4))
    assert pair.forwards == [1], "state is reused"
    set_forward(pair, steered_at_the_end)
    grow(pair)
    for model in (pair.engine.model, pair.reference):
        for module in model.modules():
            vars(module).pop("forward", None)
    grow(pair)


def test_a_forward_that_is_set_on_the_model_itself_is_noticed() -> None:
    pair = unproven(small_family("llama", 64))
    (context,) = texts(1, 7)
    pair.check(context)
    for model in (pair.engine.model, pair.reference):
        model.forward = of_other_tokens(model.forward)
    pair.check((*context, 9), (4, 5, 6))


@attrs.define
class Steering:
    """An object whose ``==`` compares tensors, as that of a dataclass does."""

    forward: Any
    vector: torch.Tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.forward(*args, **kwargs)
        hidden = given if isinstance(given, torch.Tensor) else given[0]
        hidden += self.vector
        return given


def set_steering(pair: Pair, size: float, kept: dict[int, Steering], *, by_method: bool) -> None:
    """Steer a layer of both models: by a new object, or by a method of the one of the first
    call."""
    for at, model in enumerate((pair.engine.model, pair.reference)):
        layer = next(one for name, one in model.named_modules() if name.endswith((".h.0", "rs.0")))
        width = model.get_input_embeddings().weight.shape[1]
        usual = functools.partial(type(layer).forward, layer)
        new = Steering(usual, size * torch.linspace(-1, 1, width))
        one = kept.setdefault(at, new) if by_method else new
        one.vector = new.vector
        layer.forward = one.__call__ if by_method else one


@pytest.mark.parametrize("by_method", [False, True])
def test_a_forward_that_equals_the_one_before_is_another(by_method: bool) -> None:
    pair = unproven(small_family("llama", 64))
    (context,), kept = texts(1, 7), dict[int, Steering]()
    pair.check(*texts(1, 60))  # later rows are compared with no cold ones
    for at in range(3):
        set_steering(pair, 2.0 + at, kept, by_method=by_method)
        pair.check((*context, *range(at)))


def test_a_forward_that_moves_to_another_module_is_noticed() -> None:
    """Programs leave out a part of one layer after another."""

    def left_out(hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)

    pair = unproven(small_family("llama", 64))
    (context,) = texts(1, 7)
    pair.check(*texts(1, 60))  # later rows are compared with no cold ones
    parts = [[each.mlp for each in one.model.layers] for one in (pair.engine.model, pair.reference)]
    for at in range(len(parts[0])):
        for some in parts:
            vars(some[at - 1]).pop("forward", None)
            some[at].forward = left_out
        pair.check((*context, *range(at)))


def of_other_tokens(forward: Any) -> Any:
    """A forward that embeds other tokens than it is given."""

    @functools.wraps(forward)
    def changed(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(input_ids=(input_ids + 1) % 50, **kwargs)

    return changed


def test_observing_hook_keeps_the_state(pair: Pair) -> None:
    forwards = grow(pair)
    set_on(pair, lambda *_: None)
    pair.check(*[(*one, 9) for one in texts(2, 7)])
    assert grow(pair)[2:4] == forwards[2:4]


def test_scores_with_a_hook_on_the_last_position(pair: Pair) -> None:
    (text,) = texts(1, 12)
    pair.check_scores((text[:5], text[5:]))
    set_on(pair, steered_at_the_end)
    pair.check_scores((text[:5], text[5:]), (text[:5], (1, 2, 3)))


def test_global_module_hook_is_tried() -> None:
    pair = unproven(small_family("bloom", 64))
    grow(pair)

    def on_blocks(module: Any, args: Any, given: Any) -> Any:
        if type(module).__name__ == "BloomBlock":
            steered_at_the_end(module, args, given)

    hook = torch.nn.modules.module.register_module_forward_hook(on_blocks)
    try:
        grow(pair)
    finally:
        hook.remove()


def test_hook_on_the_last_position_at_load_is_rejected() -> None:
    model = small_family("bloom", 64)
    model.transformer.h[0].register_forward_hook(steered_at_the_end)
    with pytest.raises(EngineError, match="forward hook that changes the last position"):
        HFEngine(model, None)
