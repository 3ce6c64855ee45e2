"""How many numbers of an example's room each matrix of parameters gets.

A matrix gets room in proportion to its share of ‖w‖², w = Σ^½ g, which the posterior's eigenvalues
tell: for s = data + δ, the examples' squares add up to Σ data / s. The error of random sums is then
the least that so many numbers allow. Within a matrix the places of rows and of columns are in
proportion to their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.structures.contract import Spectral

LEAST_SHARE = 1e-6  # of an eigenvalue that counts as data, where there are none
HALVINGS = 60

Shape = tuple[int, int, int]  # groups, rows, columns


def data_of(precision: Tensor, delta: float) -> Tensor:
    """The part of the eigenvalues s = data + δ that is the data's."""
    return (precision - delta).maximum(LEAST_SHARE * precision)


def energies(q: Posterior) -> dict[str, float]:
    """Of every matrix in the posterior's basis, its part of Σ_i ‖w_i‖²."""
    assert isinstance(q.form, Spectral)
    delta = q.form.prior_values(q.prior)
    return {
        name: float((data_of(precision, delta[name]) / precision).double().sum())
        for name, precision in q.form.values.items()
    }


def rooms(sizes: Mapping[str, int], energies: Mapping[str, float], total: int) -> dict[str, float]:
    """Numbers that each matrix gets of ``total``: at least one, at most all that it has.

    >>> rooms({"a": 100, "b": 4}, {"a": 1.0, "b": 1.0}, 10)["b"]
    4.0
    """

    def shared(factor: float) -> dict[str, float]:
        return {
            name: min(float(size), max(1.0, factor * energies[name]))
            for name, size in sizes.items()
        }

    low = 0.0
    high = max(size / energies[name] for name, size in sizes.items())
    if sum(sizes.values()) <= total:
        return shared(high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(shared(middle).values()) <= total:
            low = middle
        else:
            high = middle
    return shared(low)


def places_of(shape: Shape, room: float) -> tuple[int, int]:
    """Rows and columns of what stands for a matrix, of each group, in so much room.

    >>> places_of((1, 100, 400), 400.5)
    (10, 40)
    """
    groups, rows, columns = shape
    numbers = max(1, math.floor(room / groups + 1e-9))
    if numbers >= rows * columns:
        return rows, columns
    share = math.sqrt(numbers / (rows * columns))
    left = min(numbers, max(1, math.floor(rows * share)))
    return left, min(columns, numbers // left)
