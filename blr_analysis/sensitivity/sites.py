"""The same questions to posteriors that are sums of sites, one per example.

    λ = λ_prior + Σ_i λ̃_i,      λ^{\\i} = λ − λ̃_i          (Khan & Rue, Eqs. 5 and 54)

What fits such a posterior (conjugate models, message passing, conjugate-computation VI) keeps its
data and its sites; here only what it answers is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.results import LeftOut, PerExample
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
        raise InputError(
            f"a fitted {type(given).__name__} stands alone: leave out the {type(other).__name__}"
        )
    return given


def site_leave_one_out(fitted: SumOfSites, **options: Any) -> SiteLeaveOneOut:
    """Leave-one-out of a sum of sites."""
    before, after = _log_predictives(fitted, options)
    return SiteLeaveOneOut(losses=-after, losses_before=-before, note=getattr(fitted, "note", ""))


def site_sensitivity(fitted: SumOfSites, **options: Any) -> SiteScores:
    """Sensitivity of a sum of sites."""
    before, after = _log_predictives(fitted, options)
    return SiteScores(losses=-before, deviation=before - after, note=getattr(fitted, "note", ""))


def _log_predictives(fitted: SumOfSites, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    named = [name for name, value in options.items() if value not in (None, 0, "auto")]
    if named:
        raise InputError(
            f"{named[0]} is for posteriors over a network's weights, not for a sum of sites"
        )
    after = fitted.left_out()
    if fitted.data is None:
        raise InputError("the examples were not kept with the fit, so their losses are not known")
    before = fitted.log_predictive(fitted.data)
    if isinstance(fitted.data, Tensor) and fitted.data.is_floating_point():
        unseen = (
            fitted.data.isnan().flatten(1).all(1) if fitted.data.ndim > 1 else (fitted.data.isnan())
        )
        before, after = (t.masked_fill(unseen.to(t.device), torch.nan) for t in (before, after))
    return before.cpu(), after.cpu()
