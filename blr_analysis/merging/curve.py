"""What merges with different weights came to on validation tasks, and which of them is best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from blr_analysis.errors import InputError
from blr_analysis.views import Plottable, Tabular

CRITERIA = ("nll", "accuracy")


@dataclass(frozen=True)
class MergePoint:
    """One merge that was tried.

    Attributes:
        method: its name.
        weights: α_t, in the order of the models.
        nlls: mean loss on each validation task, nats per example; infinite where it failed.
        accuracies: fraction right on each; NaN for regression.
        failure: why it could not be run; "" where it could.
    """

    method: str
    weights: tuple[float, ...]
    nlls: tuple[float, ...]
    accuracies: tuple[float, ...]
    failure: str = ""

    @property
    def nll(self) -> float:
        """The mean over the tasks, each counting the same whatever its size."""
        return sum(self.nlls) / len(self.nlls)

    @property
    def accuracy(self) -> float:
        """The mean over the tasks that have one; NaN where none has."""
        known = [a for a in self.accuracies if not math.isnan(a)]
        return sum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class MergeCurve(Tabular, Plottable):
    """What :func:`blr_analysis.merge_curve` found.

    Attributes:
        points: every merge that was tried, in order.
        models, tasks: their names, in the order of the points' numbers.
        criterion: what ``best`` goes by: "nll" or "accuracy".
        shape: which weights were tried: "shared" (one α for all models), "grid" (all combinations),
            "rows" (as listed), "search" (one coordinate after the other).
    """

    points: Sequence[MergePoint]
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    criterion: str
    shape: str

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.method for p in self.points))

    @cached_property
    def best(self) -> MergePoint:
        """The point with the smallest mean NLL (or the largest mean accuracy).

        Means are over the tasks, each counting the same. Among equals (to six decimals) the other
        of the two decides, then the smallest Σ|α| (nearest to the base), then the order.
        """
        return self.best_of()

    def best_of(self, method: str | None = None) -> MergePoint:
        """The best point of one method, or of all.

        Raises:
            InputError: a method that was not tried.
        """
        if method is not None and method not in self.methods:
            raise InputError(f"method must be one of {self.methods}, got {method!r}")
        points = [p for p in self.points if method in (None, p.method)]
        return min(points, key=lambda p: rank(p, self.criterion))

    @property
    def weights(self) -> dict[str, float]:
        """α_t of the best point, by model."""
        return dict(zip(self.models, self.best.weights, strict=True))

    @property
    def at_edge(self) -> bool:
        """Whether a weight of the best point is the smallest or largest that was tried for it, so
        that a wider grid may hold a better one. Listed rows have no edge."""
        if self.shape == "rows":
            return False
        tried = zip(*(p.weights for p in self.points if p.method == self.best.method), strict=True)
        return any(
            min(values) < max(values) and w in (min(values), max(values))
            for w, values in zip(self.best.weights, tried, strict=True)
        )

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}: {a:.4g}" for n, a in self.weights.items())
        right = "" if math.isnan(self.best.accuracy) else f", accuracy {self.best.accuracy:.4f}"
        edge = "; at the edge of the grid: try a wider one" if self.at_edge else ""
        failed = sum(bool(p.failure) for p in self.points)
        lost = f"; {failed} could not be run" if failed else ""
        return (
            f"MergeCurve(best of {len(self)} by {self.criterion}: {self.best.method} with "
            f"{{{shown}}}, NLL {self.best.nll:.4f}{right}{edge}{lost})"
        )


def rank(point: MergePoint, criterion: str) -> tuple[float, float, float]:
    """What the points are sorted by, the best first."""
    loss = round(point.nll, 6) if math.isfinite(point.nll) else math.inf
    miss = -round(point.accuracy, 6) if not math.isnan(point.accuracy) else math.inf
    size = sum(abs(a) for a in point.weights)
    return (loss, miss, size) if criterion == "nll" else (miss, loss, size)
