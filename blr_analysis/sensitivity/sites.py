"""The same questions to posteriors that are sums of sites, one per example.

    λ = λ_prior + Σ_i λ̃_i,      λ^{\\i} = λ − λ̃_i          (Khan & Rue, Eqs. 5 and 54)

What fits such a posterior (conjugate models, message passing, conjugate-computation VI) keeps its
data and its sites; here only what it answers is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.results import LeftOut, Noted, PerExample
from blr_analysis.views import Plottable


@runtime_checkable
class SumOfSites(Protocol):
    """A fitted posterior from which every example can be subtracted."""

    data: Any

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i), in nats, ``[N]``."""
        ...

    def log_predictive(self, data: Any, /) -> Tensor:
        """log p(y_j | λ), in nats, ``[M]``."""
        ...


@dataclass(frozen=True, kw_only=True)
class SiteLeaveOneOut(LeftOut, Plottable):
    """What :func:`blr_analysis.leave_one_out` gives for a sum of sites.

    Exact for conjugate models; elsewhere the sites of the other examples stay as they are.

    Attributes:
        losses: −log p(y_i | λ − λ̃_i), in nats, ``[N]``; larger is worse; NaN where nothing was
            observed.
        losses_before: −log p(y_i | λ), ``[N]``.
        note: what to know of them, in a line.
        table: one row per example. ``plot()`` draws one against the other.
    """

    @property
    def nll(self) -> float:
        """The mean over what was observed: the estimate of the loss on new data."""
        return float(self.losses.double().nanmean())

    def __repr__(self) -> str:
        return f"SiteLeaveOneOut(nll={self.nll:.4f}, N={len(self)}{self._noted})"


@dataclass(frozen=True, kw_only=True)
class SiteScores(PerExample, Plottable):
    """What :func:`blr_analysis.sensitivity` gives for a sum of sites.

    Attributes:
        losses: −log p(y_i | λ), in nats, ``[N]``.
        deviation: how far the example's own log-predictive falls without it, in nats, ``[N]``;
            larger shapes the model more; NaN where nothing was observed.
        note: what to know of them, in a line.
        table: one row per example. ``plot()`` draws the deviations, the largest first.
    """

    deviation: Tensor

    def top(self, k: int = 10) -> Tensor:
        """The k examples that shape the model most, by index, the first of them most.

        Raises:
            InputError: k below 1, or more than there are examples with a deviation.
        """
        seen = int(self.deviation.isfinite().sum())
        if positive_int("k", k) > seen:
            raise InputError(f"k must be at most {seen}, the examples with a deviation, got {k}")
        ranked = self.deviation.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return ranked.argsort(descending=True, stable=True)[:k]

    def __repr__(self) -> str:
        mean = float(self.deviation.nanmean())
        note = self.note or "see .table, .plot()"
        return f"SiteScores(N={len(self)}, mean deviation {mean:.4g} nats; {note})"


@dataclass(frozen=True, kw_only=True)
class SiteWhatIf(Noted):
    """What :func:`blr_analysis.what_if` gives for a sum of sites.

    Attributes:
        q: the posterior on the changed data.
        before: the mean of −log p(y_j | λ) over what is evaluated, in nats.
        nll: the same on the changed data.
        losses: its terms, ``[M]``.
        error: an estimate of how far ``nll`` is from fitting again, by the size of the last step
            and how fast steps shrink (no bound; with few ``passes=`` it misses what is slow to
            begin); 0 for conjugate models, infinite where steps do not shrink, None where the model
            has no step to repeat, and the subtraction is all there is.
        steps: how many were taken after the subtraction.
    """

    q: Any
    before: float
    nll: float
    losses: Tensor
    error: float | None
    steps: int

    def __repr__(self) -> str:
        error = "error unknown" if self.error is None else f"± {self.error:.2g}"
        moved = f"nll {self.before:.4f} → {self.nll:.4f}, {error}"
        return f"SiteWhatIf({moved}, steps={self.steps}{self._noted})"


@dataclass(frozen=True, kw_only=True)
class SiteInfluence:
    """What :func:`blr_analysis.influence` gives for a sum of sites.

    Attributes:
        matrix: the rise of −log p(y_j), in nats, when training example i is left out by one
            subtraction, ``[N, M]``. Exact for conjugate models; elsewhere ``what_if`` takes an
            example out by steps of the rule.
    """

    matrix: Tensor

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.matrix.shape))
        return f"SiteInfluence({shape}; see .matrix, .top(j))"

    def top(self, j: int, k: int = 10) -> Tensor:
        """The k training examples that help test example j most.

        Raises:
            InputError: k below 1, or above N.
        """
        if positive_int("k", k) > len(self.matrix):
            raise InputError(f"k must be at most {len(self.matrix)}, got {k}")
        return self.matrix[:, j].argsort(descending=True, stable=True)[:k]


def sum_of_sites(task: Any, posterior: Any) -> SumOfSites | None:
    """The fitted model that was given in the place of one of them or both; None: a network's.

    Raises:
        InputError: there is a task beside it.
    """
    given = posterior if isinstance(posterior, SumOfSites) else task
    if not isinstance(given, SumOfSites):
        return None
    other = task if given is posterior else posterior
    if other is not None and other is not given:
        kinds = (type(each).__name__ for each in (given, other))
        raise InputError("a fitted {} stands alone: leave out the {}".format(*kinds))
    return given


def site_leave_one_out(fitted: SumOfSites, **options: Any) -> SiteLeaveOneOut:
    """Leave-one-out of a sum of sites."""
    before, after = _log_predictives(fitted, options)
    note = getattr(fitted, "note", "")
    return SiteLeaveOneOut(losses=-after, losses_before=-before, note=note)


def site_sensitivity(fitted: SumOfSites, **options: Any) -> SiteScores:
    """Sensitivity of a sum of sites."""
    before, after = _log_predictives(fitted, options)
    return SiteScores(losses=-before, deviation=before - after, note=getattr(fitted, "note", ""))


TOL = 1e-6  # nats per example still to go, of steps at rest
STEPS, SECONDS, LIMIT = 10, 10.0, 2000  # at least so many, then so long, at most so many
WINDOW = 3  # steps by which it is judged how fast they shrink
CIRCLE = 1e-9  # by which the sizes of steps differ that go around for ever


def site_what_if(
    fitted: Any, remove: Any, add: Any, evaluate: Any, steps: Any, options: dict[str, Any]
) -> SiteWhatIf:
    """Other data for a sum of sites: a subtraction, then steps of the rule on what is left, until
    they rest or ``steps`` of them."""
    _refuse(options)
    if remove is None and add is None:
        raise InputError("nothing to change: give remove= or add=")
    data = fitted.data if evaluate is None else evaluate
    gone = () if remove is None else remove
    if steps is None:
        until = monotonic() + SECONDS
        q, path, taken = _refitted(fitted, data, gone, add=add, least=STEPS, until=until)
    else:
        number = positive_int("passes", steps)
        q, path, taken = _refitted(fitted, data, gone, add=add, least=number, limit=number)
    before = float(-_seen(fitted.log_predictive(data), data).double().nanmean())
    means = [float(values.double().nanmean()) for values in path]
    error, note = None, getattr(fitted, "note", "")
    if taken:
        changes = [b - a for a, b in pairwise(means)]
        grows = len(changes) == WINDOW and min(changes[-1] / c if c else 0 for c in changes) >= 1
        left = _steps_left(path)
        error = math.inf if grows or math.isinf(left) else abs(changes[-1]) * left
        at_rest = not math.isinf(error) and (steps is not None or error < 1e-3)
        note = "" if at_rest else f"not at rest after {taken} steps: give passes=, or fit again"
    return SiteWhatIf(
        q=q,
        before=before,
        nll=means[-1],
        losses=path[-1].cpu(),
        error=error,
        steps=taken,
        note=note,
    )


def _refitted(
    fitted: Any,
    data: Any,
    gone: Any,
    *,
    add: Any = None,
    least: int,
    limit: int = LIMIT,
    until: float = math.inf,
) -> tuple[Any, list[Tensor], int]:
    """q after steps of the rule toward fitting again, the losses of the last of them, how many.

    They end at rest or, after ``least``, at the time ``until``.
    """
    path: list[Tensor] = []
    q, taken = None, 0
    for taken, q in enumerate(fitted.refitted(gone, add=add, steps=limit)):
        path = [*path[-WINDOW:], -_seen(fitted.predictive(q, data), data)]
        if not taken or least == limit:
            continue
        sizes, enough = _sizes(path), TOL * math.sqrt(path[-1].numel())
        rests = taken >= WINDOW and sizes[-1] * _steps_left(path) <= enough
        circles = taken >= WINDOW and max(sizes) - min(sizes) <= CIRCLE * min(sizes)
        late = taken >= least and monotonic() > until
        if rests or circles or sizes[-1] <= _rounding(path) or late:
            break
    return q, path, taken


def _sizes(path: list[Tensor]) -> list[float]:
    return [float((b - a).double().nan_to_num().norm()) for a, b in pairwise(path)]


def _rounding(path: list[Tensor]) -> float:
    eps = 1e-9 if path[-1].dtype == torch.float64 else torch.finfo(path[-1].dtype).eps
    return eps * float(path[-1].double().nan_to_num().norm())


def _steps_left(path: list[Tensor]) -> float:
    """How many times its last step a sequence still goes whose steps shrink geometrically.

    By three steps where there are so many: coordinates that take turns may grow from one to the
    next.
    """
    sizes = _sizes(path)
    if len(sizes) < 2 or sizes[-1] <= _rounding(path):
        return 1.0
    ratio = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1)) if sizes[0] else math.inf
    return max(1.0, ratio / (1 - ratio)) if ratio < 1 else math.inf


def site_influence(fitted: Any, test: Any, options: dict[str, Any]) -> SiteInfluence:
    """Every training example left out by its site, and what that does to test examples."""
    _refuse(options)
    if test is None:
        raise InputError("give the examples to predict, as the model takes them, third")
    before = fitted.log_predictive(test)
    rises = [before - fitted.predictive(fitted.without([i]), test) for i in range(fitted.n_data)]
    return SiteInfluence(matrix=torch.stack(rises).cpu())


def _refuse(options: dict[str, Any]) -> None:
    named = [name for name, value in options.items() if value not in (None, 0, "auto")]
    if named:
        raise InputError(f"{named[0]} is for a network's weights, not for a sum of sites")


def _log_predictives(fitted: SumOfSites, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    _refuse(options)
    after = fitted.left_out()
    if fitted.data is None:
        raise InputError("the examples were not kept with the fit, so their losses are not known")
    before = fitted.log_predictive(fitted.data)
    return _seen(before, fitted.data).cpu(), _seen(after, fitted.data).cpu()


def _seen(values: Tensor, data: Any) -> Tensor:
    """NaN where nothing was observed."""
    if not isinstance(data, Tensor) or not data.is_floating_point():
        return values
    unseen = data.isnan().reshape(len(data), -1).all(1)
    return values.masked_fill(unseen.to(values.device), torch.nan)
