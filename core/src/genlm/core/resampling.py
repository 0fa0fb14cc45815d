"""Resampling and weights of particles.

Weights are given as natural logarithms, which need not be normalised, in a NumPy array, a list, or
a tensor on any device. Ancestors are returned in the same kind of container: resampling replaces
particle ``i`` by a copy of particle ``ancestors[i]``.

Sources:
    Douc, Cappé and Moulines, "Comparison of resampling schemes for particle filtering", 2005.
    Kong, "A note on importance sampling using standardized weights", 1992, of the effective sample
    size.

Examples:
    >>> import math
    >>> import numpy as np
    >>> from genlm.core.resampling import effective_sample_size, log_mean_weight, systematic
    >>> log_weights = np.log([0.5, 0.25, 0.25, 1.0])
    >>> round(effective_sample_size(log_weights), 3)
    2.909
    >>> round(math.exp(log_mean_weight(log_weights)), 3)
    0.5
    >>> systematic(log_weights, uniform=0.6).tolist()
    [0, 2, 3, 3]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from genlm.core.checks import safe_repr
from genlm.core.errors import InvalidInputError
from genlm.core.vectors import as_tensor

if TYPE_CHECKING:
    import torch


def effective_sample_size(log_weights: Any) -> float:
    """The effective sample size: the number of equally weighted particles that are worth as much,
    from 1 to ``n``. Waits for the device once.

    Args:
        log_weights: ``[n]`` Log-weights.

    Raises:
        InvalidInputError: no weight is positive, or one is NaN or infinite.
    """
    size = float(1 / _weights(log_weights).softmax(0).square().sum())
    if math.isnan(size):
        raise _worthless(log_weights)
    return size


def log_mean_weight(log_weights: Any) -> float:
    """The natural logarithm of the mean weight. The sum of its values at each resampling and at the
    end estimates the log normalising constant. Waits for the device once.

    Args:
        log_weights: ``[n]`` Log-weights.

    Returns:
        ``-inf`` if no weight is positive.
    """
    weights = _weights(log_weights)
    return float(weights.logsumexp(0)) - math.log(len(weights))


def systematic(log_weights: Any, uniform: float) -> Any:
    """Systematic resampling, with one uniform number for all particles. A particle of normalised
    weight ``w`` gets ``n * w`` copies, rounded up or down.

    Args:
        log_weights: ``[n]`` Log-weights.
        uniform: A number in [0, 1).

    Returns:
        ``[n]`` int64 Ancestors, in ascending order.

    Raises:
        InvalidInputError: no weight is positive, one is NaN or infinite, or ``uniform`` is not in
            [0, 1).
    """
    return _ancestors(log_weights, uniform, strata=True, one=True)


def stratified(log_weights: Any, uniforms: Any) -> Any:
    """Stratified resampling, with one uniform number for each of ``n`` equal parts of the total
    weight. The number of a particle's copies differs from ``n * w`` by less than 2.

    Args:
        log_weights: ``[n]`` Log-weights.
        uniforms: ``[n]`` Numbers in [0, 1).

    Returns:
        ``[n]`` int64 Ancestors, in ascending order.

    Raises:
        InvalidInputError: as for :func:`systematic`.
    """
    return _ancestors(log_weights, uniforms, strata=True)


def multinomial(log_weights: Any, uniforms: Any) -> Any:
    """Multinomial resampling: each particle draws its ancestor independently, with its own uniform
    number.

    Args:
        log_weights: ``[n]`` Log-weights.
        uniforms: ``[n]`` Numbers in [0, 1).

    Returns:
        ``[n]`` int64 Ancestors, in the order of ``uniforms``.

    Raises:
        InvalidInputError: as for :func:`systematic`.
    """
    return _ancestors(log_weights, uniforms, strata=False)


def _ancestors(log_weights: Any, uniforms: Any, strata: bool, one: bool = False) -> Any:
    import torch

    weights = _weights(log_weights)
    n = len(weights)
    points = _vector(uniforms)
    if points is None or points.numel() != (1 if one else n) or points.ndim > 1:
        wanted = "one uniform number" if one else f"{n} uniform numbers, one for each particle"
        raise InvalidInputError(f"{n} particles need {wanted}; got {safe_repr(uniforms)}")
    points = points.to(weights.device).reshape(-1)
    cumulative = weights.softmax(0).cumsum(0)
    whole = cumulative[-1]
    if not bool(torch.isfinite(whole) & (points >= 0).all() & (points < 1).all()):
        if not bool(torch.isfinite(whole)):
            raise _worthless(log_weights)
        raise InvalidInputError(f"uniform numbers must be in [0, 1); got {safe_repr(uniforms)}")
    if strata:
        points = (torch.arange(n, dtype=torch.float64, device=weights.device) + points) / n
    # Points stay below the whole, even if the product was rounded up, so that no particle without
    # weight is found.
    points = (points * whole).minimum(whole.nextafter(whole.new_tensor(-math.inf)))
    found = torch.searchsorted(cumulative, points, right=True).clamp_(max=n - 1)
    return found.to(log_weights.device) if isinstance(log_weights, torch.Tensor) else found.numpy()


def _weights(log_weights: Any) -> torch.Tensor:
    """Log-weights as a tensor, ``[n]`` float64.

    Raises:
        InvalidInputError: they are no vector.
    """
    given = _vector(log_weights)
    if given is None or given.ndim != 1 or not len(given):
        raise InvalidInputError(
            f"log-weights must be a vector with one number for each particle; got "
            f"{safe_repr(log_weights)}"
        )
    return given


def _vector(given: Any) -> torch.Tensor | None:
    """Numbers as a float64 tensor, where there is one; ``None`` if they are not numbers."""
    import torch

    mps = isinstance(given, torch.Tensor) and given.is_mps  # MPS has no float64
    return as_tensor(given.cpu() if mps else given, torch.float64)


def _worthless(log_weights: Any) -> InvalidInputError:
    return InvalidInputError(
        "log-weights must be finite numbers or -inf, not NaN or +inf, and not all of them -inf; "
        f"got {safe_repr(log_weights)}"
    )
