"""Which weights α are tried: one for all models, rows, all combinations, axes to search along."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError

Weights = tuple[float, ...]
STEPS = tuple(k / 10 for k in range(16))  # 0 to 1.5: where nobody says which
MOST = 2000  # combinations


@dataclass(frozen=True)
class Grid:
    """Weights to try: ``rows`` of T numbers or, for a search, the numbers of each model.

    ``shape`` is one of "shared", "grid", "rows", "search"; see
    :class:`blr_analysis.MergeCurve`.
    """

    shape: str
    rows: Sequence[Weights] = ()
    axes: Sequence[Sequence[float]] = ()


def read_grid(weights: Any, models: Sequence[str], *, search: bool) -> Grid:
    """What the argument ``weights`` of :func:`blr_analysis.merge_curve` asks for.

    Raises:
        InputError: nothing to try, rows of another length than there are models, unknown models,
            NaN or inf, too many combinations, rows for a search along axes.
    """
    size = len(models)
    if isinstance(weights, Mapping):
        given = {str(n): v for n, v in weights.items()}
        if set(given) != set(models):
            raise InputError(f"weights are for {sorted(given)}, the models are {sorted(models)}")
        axes = [_numbers(given[n], f"weights[{n!r}]") for n in models]
        count = math.prod(map(len, axes))
        if search:
            return Grid("search", axes=axes)
        if count > MOST:
            raise InputError(
                f"the weights have {count:,} combinations, more than {MOST:,}; pass "
                'search="coordinates", or rows of your own'
            )
        return Grid("grid", rows=list(itertools.product(*axes)))
    table = _table(STEPS if weights is None else weights)
    if table.ndim == 1:
        shared = list(dict.fromkeys(table.tolist()))
        if search:
            return Grid("search", axes=[shared] * size)
        return Grid("shared", rows=[(a,) * size for a in shared])
    if search:
        raise InputError('search="coordinates" takes numbers, or a dict model → numbers, not rows')
    if table.shape[1] != size:
        raise InputError(
            f"a row of weights holds one number for each of the {size} models, got "
            f"{table.shape[1]} numbers"
        )
    return Grid("rows", rows=list(dict.fromkeys(map(tuple, table.tolist()))))


def simplex_grid(n_models: int, steps: int) -> list[tuple[float, ...]]:
    """Every set of weights ≥ 0 in steps of 1/``steps`` that sums to 1, in lexical order.

    C(steps + T − 1, T − 1) of them: 66 for three models in tenths.

    Raises:
        InputError: counts that are no positive whole numbers.

    Example:
        >>> simplex_grid(2, 4)
        [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1.0, 0.0)]
    """
    positive_int("n_models", n_models)
    positive_int("steps", steps)

    def parts(count: int, left: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(left,)]
        return [(k, *rest) for k in range(left + 1) for rest in parts(count - 1, left - k)]

    return [tuple(k / steps for k in row) for row in parts(n_models, steps)]


def _numbers(values: Any, name: str) -> list[float]:
    table = _table(values, name)
    if table.ndim != 1:
        raise InputError(f"{name} must be a list of numbers, got shape {tuple(table.shape)}")
    return list(dict.fromkeys(table.tolist()))


def _table(values: Any, name: str = "weights") -> torch.Tensor:
    """Finite numbers, one- or two-dimensional."""
    try:
        found = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} must be numbers, rows of one number per model, or a dict model → numbers, "
            f"got {values!r}"
        ) from error
    if found.ndim not in (1, 2) or not found.numel():
        raise InputError(f"{name} must hold at least one number, got shape {tuple(found.shape)}")
    if not bool(torch.isfinite(found).all()):
        raise InputError(f"{name} must be finite, got NaN or inf")
    return found
