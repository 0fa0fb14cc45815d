"""Resampling beside brute force."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from genlm.core import InvalidInputError
from genlm.core.resampling import (
    effective_sample_size,
    log_mean_weight,
    multinomial,
    stratified,
    systematic,
)

pytestmark = pytest.mark.any_version

#: Weights that floating-point numbers represent exactly, some of them 0.
CASES = [[1], [1, 1], [0, 3, 0, 5], [8, 1, 1, 6, 0, 0], [0, 0, 1], [2**-20, 1, 2**-20]]

KINDS = {
    "list": lambda values: [*values],
    "array": lambda values: np.array(values),
    "tensor": lambda values: torch.tensor(values, dtype=torch.float64),
}


def logs(weights):
    return [math.log(weight) if weight else -math.inf for weight in weights]


def by_hand(weights, points):
    """For each point in [0, 1), the index of the weight in whose share it lies, computed
    exactly."""
    found = []
    for point in points:
        left = Fraction(point) * sum(map(Fraction, weights))
        for at, weight in enumerate(map(Fraction, weights)):
            if left < weight:
                found.append(at)
                break
            left -= weight
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", CASES, ids=str)
def test_ancestors_match_brute_force(weights, kind):
    n, source = len(weights), random.Random(3)
    log_weights = KINDS[kind](logs(weights))
    for _ in range(200):
        uniforms = [source.random() for _ in range(n)]
        strata = [(at + Fraction(uniform)) / n for at, uniform in enumerate(uniforms)]
        one = [(at + Fraction(uniforms[0])) / n for at in range(n)]
        assert systematic(log_weights, uniforms[0]).tolist() == by_hand(weights, one)
        assert stratified(log_weights, uniforms).tolist() == by_hand(weights, strata)
        assert multinomial(log_weights, uniforms).tolist() == by_hand(weights, uniforms)


@pytest.mark.parametrize("weights", CASES, ids=str)
def test_the_expected_number_of_copies_is_the_weight(weights):
    """Over equally spaced uniform numbers, which stand for the integral."""
    n, many = len(weights), 1 << 10
    copies = np.zeros(n)
    for at in range(many):
        found = systematic(logs(weights), (at + 0.5) / many)
        copies += np.bincount(found, minlength=n)
    wanted = n * np.array(weights) / sum(weights)
    assert np.abs(copies / many - wanted).max() < 2 / many


@pytest.mark.parametrize("resample", [systematic, stratified, multinomial])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_particle_without_weight_has_no_copies(resample, uniform):
    log_weights = [-math.inf, 0.1, -math.inf, 0.3, -math.inf]
    uniforms = uniform if resample is systematic else [uniform] * 5
    assert {*resample(log_weights, uniforms).tolist()} <= {1, 3}


@pytest.mark.parametrize("shift", [0.0, -2000.0, 2000.0])
@pytest.mark.parametrize("weights", CASES, ids=str)
def test_effective_sample_size_and_log_mean_weight_equal_their_formulas(weights, shift):
    shifted = [each + shift for each in logs(weights)]
    size = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    for make in KINDS.values():
        assert effective_sample_size(make(shifted)) == pytest.approx(size)
        mean = math.log(sum(weights) / len(weights)) + shift
        assert log_mean_weight(make(shifted)) == pytest.approx(mean, abs=1e-9)


def test_ancestors_are_of_the_kind_of_the_weights():
    assert isinstance(systematic([0.0, 0.0], 0.5), np.ndarray)
    found = systematic(torch.zeros(2), 0.5)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.int64
    assert torch.arange(10, 12)[found].tolist() == [10, 11]


@pytest.mark.parametrize(
    "form",
    [
        lambda values: np.array([*reversed(values)])[::-1],
        lambda values: np.array(values, dtype=">f8"),
        lambda values: np.broadcast_to(np.array(values), len(values)),  # read-only
    ],
)
def test_arrays_of_any_memory_are_accepted_without_a_warning(form, recwarn):
    log_weights, uniforms = logs([0, 3, 0, 5]), [0.1, 0.7, 0.2, 0.9]
    given, numbers = form(log_weights), form(uniforms)
    assert effective_sample_size(given) == effective_sample_size(log_weights)
    assert log_mean_weight(given) == log_mean_weight(log_weights)
    for resample in (stratified, multinomial):
        wanted = resample(log_weights, uniforms).tolist()
        assert resample(given, numbers).tolist() == wanted
    assert not recwarn.list


def test_the_mean_of_no_weight_is_minus_infinity():
    assert log_mean_weight([-math.inf, -math.inf]) == -math.inf


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: systematic([-math.inf, -math.inf], 0.5), "not all of them -inf"),
        (lambda: systematic([0.0, math.nan], 0.5), "NaN"),
        (lambda: effective_sample_size([0.0, math.inf]), "inf"),
        (lambda: effective_sample_size([-math.inf]), "not all of them -inf"),
        (lambda: systematic([0.0], 1.0), r"in \[0, 1\)"),
        (lambda: systematic([0.0], math.nan), r"in \[0, 1\)"),
        (lambda: multinomial([0.0], [-0.1]), r"in \[0, 1\)"),
        (lambda: stratified([0.0, 0.0], [0.1]), "2 uniform numbers"),
        (lambda: stratified([0.0, 0.0], 0.1), "2 uniform numbers"),
        (lambda: multinomial([0.0, 0.0], 0.1), "2 uniform numbers"),
        (lambda: systematic([0.0, 0.0], [0.1, 0.2]), "one uniform number"),
        (lambda: systematic([0.0, 0.0], None), "one uniform number"),
        (lambda: multinomial([0.0], "a"), "1 uniform number"),
        (lambda: log_mean_weight([]), "a vector"),
        (lambda: log_mean_weight([[0.0]]), "a vector"),
        (lambda: log_mean_weight("abc"), "a vector"),
    ],
)
def test_wrong_weights_and_numbers_are_rejected(call, said):
    with pytest.raises(InvalidInputError, match=said):
        call()
