"""Ready-made functions for ``then``: the numbers that programs most often need from a row.

Each runs once for all callers of a step, on the device of the rows, and waits for it once.

Examples:
    Two callers with their own masks, and two that share one:

    >>> import asyncio
    >>> from genlm.core import load_model_by_name
    >>> from genlm.core.reductions import draw, draw_among
    >>> async def draws(lm, *thens):
    ...     return await asyncio.gather(*(lm.next_token_logprobs([72], then=t) for t in thens))
    >>> among = draw_among([97, 98])
    >>> with load_model_by_name("mock", backend="mock") as lm:
    ...     first, second = asyncio.run(draws(lm, draw(0.0, [97, 98]), draw(0.0, [98])))
    ...     same, last = asyncio.run(draws(lm, among(0.0), among(0.999999)))
    >>> first[0], second[0], same == first, last[0]
    (97, 98, True, 98)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from genlm.core.checks import integer, safe_repr
from genlm.core.context import token_ids_of
from genlm.core.drawer import on_cpu
from genlm.core.errors import InvalidInputError
from genlm.core.together import together
from genlm.core.vectors import as_tensor, is_integral

if TYPE_CHECKING:
    import torch

    from genlm.core.trie import TokenCharacterTrie


@together
def draw(rows: torch.Tensor, uniforms: list[float], allowed: list[Any]) -> list[tuple[int, float]]:
    """Draw a token among those that are allowed, in proportion to their probabilities:
    ``then=draw(uniform, allowed)``.

    The caller gives:
        - uniform: A number in [0, 1), by which the token is drawn from the cumulative
          distribution over the allowed ids in ascending order.
        - allowed: The allowed tokens: their ids in a tensor, list or set, in any order; a boolean
          tensor ``[len(lm.byte_vocab)]``; or ``None`` for all. Tensors on the model's device, of
          ids in ascending order, are fastest, and so is one object for all callers.

    Returns:
        The token's id, and the natural logarithm of the mass of all allowed tokens. If that is
        ``-inf``, no token can be drawn, and the id has no meaning.
    """
    import torch

    try:
        right = all(0 <= uniform < 1 for uniform in uniforms)
    except (TypeError, ValueError, RuntimeError):  # not numbers
        right = False
    if not right:
        raise InvalidInputError(
            f"uniform numbers must be in [0, 1); got {', '.join(map(safe_repr, uniforms))}"
        )
    weights, ids = _weights(rows, allowed)
    mass = weights.cumsum(-1)
    whole = mass[:, -1:]
    points = torch.tensor(uniforms, dtype=torch.float64, device=mass.device)[:, None] * whole
    # Points stay below the whole, even if the product was rounded up, so that the token that is
    # found has mass of its own.
    points = points.minimum(whole.nextafter(whole.new_tensor(-math.inf)))
    drawn = torch.searchsorted(mass, points, right=True).clamp_(max=mass.shape[-1] - 1)
    if not on_cpu(rows.device):  # sums computed in parallel may decrease in their last bits
        drawn = drawn.where(weights.gather(-1, drawn) > 0, weights.argmax(-1, keepdim=True))
    token_ids = drawn if ids is None else ids[drawn]
    # The only wait for the device.
    found, logs = torch.cat([token_ids.double(), whole.log()], -1).T.tolist()
    return [*zip(map(int, found), logs, strict=True)]


def draw_among(allowed: Any) -> together[tuple[int, float]]:
    """Make a :data:`draw` whose allowed tokens are the same for all callers: ``draw =
    draw_among(allowed)``, then ``then=draw(uniform)``.

    Args:
        allowed: As for :data:`draw`. A tensor on the model's device is fastest.
    """
    same = None if allowed is None else _read(allowed)
    if same is None and allowed is not None:
        raise InvalidInputError(
            f"allowed tokens must be a boolean tensor, or ids; got {safe_repr(allowed)}"
        )
    if same is not None and is_integral(same) and same.ndim == 1:
        # Once, and not in each step. Ids with repetitions may be a mask of 0 and 1, which the width
        # of a row tells.
        ascending: torch.Tensor = same.long().unique()  # type: ignore[no-untyped-call]
        same = ascending if len(ascending) == len(same) else same

    @together
    def draw_allowed(rows: torch.Tensor, uniforms: list[float]) -> list[tuple[int, float]]:
        return [*draw.function(rows, uniforms, [same] * len(rows))]

    return draw_allowed


@together
def log_mass(rows: torch.Tensor, allowed: list[Any]) -> list[float]:
    """The natural logarithm of the mass of the allowed tokens: ``then=log_mass(allowed)``.

    The caller gives:
        - allowed: As for :data:`draw`.
    """
    weights, _ = _weights(rows, allowed)
    masses: list[float] = weights.sum(-1).log().tolist()
    return masses


@together
def logprobs_of(rows: torch.Tensor, token_ids: list[Sequence[int]]) -> list[list[float]]:
    """The log-probabilities of chosen tokens: ``then=logprobs_of([17, 4])``.

    The caller gives:
        - token_ids: A list of token ids, of any length.
    """
    width = rows.shape[-1]
    return _chosen(rows, [token_ids_of("list of tokens", ids, width, least=0) for ids in token_ids])


@together
def likeliest(rows: torch.Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The likeliest tokens, with their log-probabilities, in descending order:
    ``then=likeliest(5)``. The order of equally likely tokens is not fixed.

    The caller gives:
        - count: The number of tokens; all tokens if the vocabulary has fewer.
    """
    import torch

    counts = [integer("the count of likeliest tokens", count, least=0) for count in counts]
    most = min(max(counts), rows.shape[-1])
    logprobs, token_ids = rows.topk(most)
    both = torch.stack([token_ids.double(), logprobs.double()]) if not rows.is_mps else None
    found, values = both.tolist() if both is not None else (token_ids.tolist(), logprobs.tolist())
    return [
        [*zip(map(int, ids[:count]), own[:count], strict=True)]
        for ids, own, count in zip(found, values, counts, strict=True)
    ]


def prefix_masses(trie: TokenCharacterTrie) -> together[list[float]]:
    """Make a function that gives the probabilities of several prefixes from one sum over a trie:
    ``masses = prefix_masses(trie)``, then ``then=masses([b"th", b"a"])``.

    The caller gives:
        - prefixes: A list of prefixes, as :meth:`TokenCharacterTrie.find` takes them.

    For each prefix the caller gets the probability that the next token begins with it, as
    :meth:`TokenCharacterTrie.mass` gives it: 0.0 if no token does, and special tokens do not count.

    Args:
        trie: A trie over ``lm.byte_vocab``. A trie on the model's device is fastest.
    """

    @together
    def masses(rows: torch.Tensor, prefixes: list[Sequence[Any]]) -> list[list[float]]:
        import torch

        if (width := rows.shape[-1]) != len(trie.decode):
            raise InvalidInputError(
                f"the trie of {len(trie.decode)} items is not one of this model's {width} tokens; "
                "give TokenCharacterTrie(lm.byte_vocab)"
            )
        for own in prefixes:
            if not isinstance(own, Iterable):
                raise InvalidInputError(
                    f"prefixes must be a list, such as [b'th', b'a']; got {safe_repr(own)}"
                )
        nodes = [[trie.find(prefix) for prefix in own] for own in prefixes]
        weights = rows.exp()
        special = torch.from_numpy(trie.is_special).to(rows.device)
        weights.masked_fill_(special, 0)
        dtype = torch.float64 if trie.device == "cpu" else torch.float32
        sums = trie.batch_weight_sum(weights, dtype=dtype)
        some = [[node for node in own if node is not None] for own in nodes]
        found = map(iter, _chosen(sums, some))
        return [
            [0.0 if node is None else next(mine) for node in own]
            for own, mine in zip(nodes, found, strict=True)
        ]

    return masses


def _chosen(rows: torch.Tensor, places: Sequence[Sequence[int]]) -> list[list[float]]:
    """The numbers of each row in these places."""
    import torch

    most = max(map(len, places))
    padded = torch.tensor([[*own, *[0] * (most - len(own))] for own in places], dtype=torch.long)
    numbers = rows.gather(1, padded.to(rows.device)).tolist()
    return [own[: len(mine)] for own, mine in zip(numbers, places, strict=True)]


def _weights(
    rows: torch.Tensor, allowed: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The probabilities of the allowed tokens, ``[k, m]`` float64, and their ids; without ids, of
    all tokens, with 0 for those that are not allowed."""
    import torch

    rows = rows.cpu() if rows.is_mps else rows  # Metal has no float64
    first = allowed[0]
    same = len({*map(id, allowed)}) == 1
    if same and first is not None and (ids := _tensor(first, rows)).dtype != torch.bool:
        return rows[:, ids].double().exp_(), ids
    weights = rows.double().exp_()
    if same and first is None:
        return weights, None
    masks = [_mask(each, rows) for each in ([first] if same else allowed)]
    return weights.masked_fill_(~torch.stack(masks), 0), None


def _mask(allowed: Any, rows: torch.Tensor) -> torch.Tensor:
    """The allowed tokens as a boolean tensor."""
    import torch

    if allowed is None:
        return rows.new_ones(rows.shape[-1], dtype=torch.bool)
    given = _tensor(allowed, rows)
    if given.dtype == torch.bool:
        return given
    return rows.new_zeros(rows.shape[-1], dtype=torch.bool).index_fill_(0, given, True)


def _tensor(allowed: Any, rows: torch.Tensor) -> torch.Tensor:
    """The allowed tokens, as a mask or as ascending ids on the rows' device.

    Raises:
        InvalidInputError: the value is neither a mask nor token ids, or there are no ids.
    """
    import torch

    given, width = _read(allowed), rows.shape[-1]
    if given is not None and given.dtype == torch.bool and given.shape == (width,):
        return given.to(rows.device)
    if given is not None and is_integral(given) and given.ndim == 1 and len(given):
        ids = given.long()
        ascending, least, most = _order(ids)
        if not ascending:
            # In ascending order and without repetitions, as in a mask. So a caller's result is the
            # same whether others give the same object or not.
            ids = ids.unique()  # type: ignore[no-untyped-call]
            _, least, most = _order(ids)
        # As many numbers as tokens, with repetitions, are no ids, but a mask of 0 and 1.
        if least >= 0 and most < width and (len(given) != width or len(ids) == width):
            return ids.to(rows.device)
    got = safe_repr(allowed) if given is None else f"{given.dtype} of shape {[*given.shape]}"
    raise InvalidInputError(
        f"allowed tokens must be a boolean tensor [{width}], or at least one id from 0 to "
        f"{width - 1}; got {got}"
    )


def _read(allowed: Any) -> torch.Tensor | None:
    """The allowed tokens as a tensor; ``None`` if they are not numbers."""
    return as_tensor([*allowed] if isinstance(allowed, Set) else allowed)


def _order(ids: torch.Tensor) -> list[int]:
    """Whether each id is greater than the one before it, the first id, and the last: one wait for
    the device."""
    import torch

    ascending = (ids[1:] > ids[:-1]).all().long()
    found: list[int] = torch.stack([ascending, ids[0], ids[-1]]).tolist()
    return found
