"""A fitted probabilistic model that is a sum of sites, one per example.

    λ = λ_prior + Σ_i λ̃_i,      λ^{\\i} = λ − λ̃_i          (Khan & Rue, Eqs. 5 and 54)

Conjugate models, message passing, Gaussian processes, generalised linear models, EM and hidden
Markov models store their data and sites, and answer by methods of their own; this module calls
these methods. Removing an example is a subtraction. It is exact for conjugate models, and the first
step of fitting again for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.loss import Evaluation
from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.influence.results import Influence, Pairs
from blr_analysis.sensitivity.results import LeaveOneOut, Scores, WhatIf
from blr_analysis.sensitivity.selection import select
from blr_analysis.sensitivity.solvers import Change, Settings
from blr_analysis.sensitivity.subjects.contract import Subject, Suspects, first_by

# Steps of the rule after a subtraction, if the user does not give their number:
LEAST_STEPS = 10
MOST_STEPS = 2000
SECONDS = 10.0  # after the least steps, they stop when this time is over
AT_REST = 1e-6  # nats per example; they stop when less is still to go
LITTLE_ERROR = 1e-3  # nats per example; a refit with a smaller error counts as at rest
WINDOW = 3  # the last steps, from whose sizes the remaining way is extrapolated
CIRCLE = 1e-9  # relative difference of the sizes of steps that go around in a circle
ROUNDING = 1e-9  # relative size of losses in float64 below which a step is rounding


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


class Sites(Subject):
    """A fitted model with the data that it stores."""

    kind = "a sum of sites"

    def __init__(self, fitted: Any) -> None:
        self.fitted = fitted
        self.n = getattr(fitted, "n_data", 0)
        self.metadata: Mapping[str, list[Any]] = {}
        self.likelihood = None
        self.note = getattr(fitted, "note", "")

    def scores(self, variance: bool | None = None) -> Scores:
        losses_before, losses_without = self._losses()
        scores = Scores(
            losses=losses_before,
            deviation=losses_without - losses_before,
            targets=self._targets(),
            note=self.note,
        )
        has_latent_numbers = hasattr(self.fitted, "perturbation")
        if variance and not has_latent_numbers:
            raise self.lacks("prediction variance", "leave out variance=")
        if not has_latent_numbers:
            return scores
        error, _, latent_variance = self.fitted.perturbation()
        return replace(
            scores,
            error=error.cpu().unsqueeze(-1),
            variance=latent_variance.cpu()[:, None, None],
            self_influence=(error.square() * latent_variance).cpu(),
        )

    def left_out(self, correction: str = "auto", refine: int = 0) -> LeaveOneOut:
        if correction != "auto":
            raise self.lacks("correction", "its sites are subtracted")
        if refine:
            raise self.lacks("refine=", "what_if takes an example out by steps of the rule")
        losses_before, losses_without = self._losses()
        return LeaveOneOut(
            losses=losses_without,
            losses_before=losses_before,
            correction=["subtraction"] * len(losses_before),
            targets=self._targets(),
            note=self.note,
        )

    def _losses(self) -> tuple[Tensor, Tensor]:
        """−log p(y_i) with the example and without it, ``[N]``; NaN where nothing was observed."""
        log_left_out = self.fitted.left_out()
        data = self.fitted.data
        if data is None:
            raise InputError("the examples were not kept with the fit: their losses are unknown")
        log_predictive = self.fitted.log_predictive(data)
        return -observed(log_predictive, data).cpu(), -observed(log_left_out, data).cpu()

    def _targets(self) -> Tensor | None:
        """y of data that are pairs (x, y) or labels y; None of other data."""
        data = self.fitted.data
        target = data[-1] if isinstance(data, tuple | list) else data
        is_one_number = isinstance(target, Tensor) and target.ndim == 1
        return target.cpu() if is_one_number else None

    def influence_on(self, test: Any, measure: Any, normalize: Any, k: int | None) -> Any:
        if normalize:
            raise self.lacks("normalize=", "its influences are in nats")
        if measure != "loss":
            raise self.lacks("measure=", "its influences are of the loss")
        if test is None:
            raise InputError("give the examples to predict, as the model takes them, third")
        before = self.fitted.log_predictive(test)
        rises = []
        for i in range(self.n):
            q_without = self.fitted.without([i])
            rises.append(before - self.fitted.predictive(q_without, test))
        matrix = Influence.of(torch.stack(rises).cpu(), Pairs(self, test))
        return matrix if k is None else matrix.top(k)

    def change(self, remove: Any, add: Any, relabel: Any) -> Change:
        if relabel is not None:
            raise self.lacks("relabel=", "remove the examples and add them with other labels")
        if remove is None and add is None:
            raise InputError("nothing to change: give remove= or add=")
        leaving = torch.empty(0, dtype=torch.long)
        if remove is not None:
            leaving = self.select(remove)
        return Change(leaving, add)

    def answering(self, settings: Settings) -> Callable[[Change], WhatIf]:
        if settings.solver != "auto":
            raise self.lacks("solver=", "its sites are subtracted, then come steps of the rule")
        data = self.fitted.data if settings.evaluate is None else settings.evaluate
        before = -observed(self.fitted.log_predictive(data), data).cpu()
        if settings.passes is not None:
            positive_int("passes", settings.passes)

        def answer(change: Change) -> WhatIf:
            refit = _refitted(self.fitted, data, change.leaving, change.new, settings.passes)
            return WhatIf(
                before=OfObserved(before, None),
                after=OfObserved(refit.losses, None),
                solver="subtraction",
                posterior_after=lambda: refit.posterior,
                passes=refit.steps,
                converged=refit.at_rest,
                error=refit.error,
                removed=len(change.leaving),
                added=number_of(change.new),
                note=refit.note(self.note),
            )

        return answer

    def suspects(self, left_out: LeaveOneOut, share: float) -> Suspects:
        scores = self.scores()
        unfamiliarity = None
        if hasattr(self.fitted, "perturbation"):
            _, curvature, variance = self.fitted.perturbation()
            unfamiliarity = (curvature * variance).cpu()
        observed_losses = left_out.losses.nan_to_num(nan=-torch.inf)
        return Suspects(
            losses=scores.losses,
            training=scores.losses,
            left_out=left_out.losses,
            contradicted=first_by(observed_losses, share),
            unfamiliarity=unfamiliarity,
            targets=scores.targets,
        )

    def responses(self, samples: int, seed: int) -> None:
        return None

    def cheap_columns(self) -> dict[str, Tensor]:
        return {}

    def described(self, indices: Tensor, test: Any = None) -> dict[str, Tensor]:
        return {}

    def select(self, selection: Any, name: str = "remove") -> Tensor:
        return select(selection, self, name=name)


def number_of(data: Any) -> int:
    """The number of examples in a tensor, a sparse matrix or a tuple of them; 0 for None."""
    if data is None:
        return 0
    return tree_leaves(data)[0].shape[0]


class OfObserved(Evaluation):
    """An evaluation whose losses are NaN where nothing was observed; these do not count."""

    @property
    def counted(self) -> Tensor:
        return self.losses[~self.losses.isnan()]


def observed(values: Tensor, data: Any) -> Tensor:
    """The values ``[N]``, with NaN for examples of which no number was observed."""
    if not isinstance(data, Tensor) or not data.is_floating_point():
        return values
    missing = data.isnan().reshape(len(data), -1).all(1)
    return values.masked_fill(missing.to(values.device), torch.nan)


@dataclass(frozen=True)
class Refit:
    """The result of a subtraction and further steps of the rule, which approach a new fit.

    Attributes:
        posterior: the posterior after the last step.
        losses: −log p(y_j) under it, ``[M]``.
        steps: the number of steps after the subtraction.
        error: an estimate, in nats, of how far the mean loss is from that of a new fit. It is
            extrapolated from the last steps, and is no bound. It is 0 for conjugate models,
            infinite where steps do not shrink, and None where there was no step.
        passes: the number of steps that the user asked for; None: until rest.
    """

    posterior: Any
    losses: Tensor
    steps: int
    error: float | None
    passes: int | None

    @property
    def at_rest(self) -> bool:
        """Whether the steps converge, and have arrived if the user did not ask for their number."""
        if self.error is None or self.steps == 0:
            return True
        if self.passes is not None:
            return not math.isinf(self.error)
        return self.error < LITTLE_ERROR

    def note(self, subtraction_note: str) -> str:
        """A line on how exact the result is; ``subtraction_note`` is that of no further step."""
        if self.steps == 0:
            return subtraction_note
        if self.at_rest:
            return ""
        return f"not at rest after {self.steps} steps: give passes=, or fit again"


def _refitted(fitted: Any, data: Any, leaving: Tensor, added: Any, passes: int | None) -> Refit:
    """The posterior on other data, after steps of the rule.

    The steps are ``passes`` in number, or they go on until rest or until their time is over.

    Args:
        data: the examples whose losses are computed.
        leaving: indices of examples to remove.
        added: further examples, or None.
    """
    most_steps = MOST_STEPS if passes is None else passes
    deadline = monotonic() + SECONDS
    path: list[Tensor] = []  # the losses before and after the last steps
    posterior = None
    steps = 0
    for steps, posterior in enumerate(fitted.refitted(leaving, add=added, steps=most_steps)):
        losses = -observed(fitted.predictive(posterior, data), data)
        path = [*path[-WINDOW:], losses]
        if steps == 0 or passes is not None:
            continue
        is_late = steps >= LEAST_STEPS and monotonic() > deadline
        if _rests(path, steps) or is_late:
            break
    error = _error(path) if steps > 0 else None
    return Refit(posterior, path[-1].cpu(), steps, error, passes)


def _rests(path: list[Tensor], steps: int) -> bool:
    """Whether the losses along the path have stopped moving, or go around in a circle."""
    sizes = _step_sizes(path)
    if sizes[-1] <= _rounding(path):
        return True
    if steps < WINDOW:
        return False
    still_to_go = sizes[-1] * _remaining_steps(path)
    goes_in_circles = max(sizes) - min(sizes) <= CIRCLE * min(sizes)
    return goes_in_circles or still_to_go <= AT_REST * math.sqrt(path[-1].numel())


def _error(path: list[Tensor]) -> float:
    """How far the mean loss at the end of the path is from its limit, in nats; may be infinite."""
    means = [float(losses.double().nanmean()) for losses in path]
    changes = [after - before for before, after in pairwise(means)]
    last_change = changes[-1]
    ratios = [last_change / change if change else 0 for change in changes]
    grows = len(changes) == WINDOW and min(ratios) >= 1
    remaining = _remaining_steps(path)
    if grows or math.isinf(remaining):
        return math.inf
    return abs(last_change) * remaining


def _step_sizes(path: list[Tensor]) -> list[float]:
    """The norms of the differences between the losses before and after each step."""
    steps = [after - before for before, after in pairwise(path)]
    return [float(step.double().nan_to_num().norm()) for step in steps]


def _rounding(path: list[Tensor]) -> float:
    """The size of a step that rounding alone can make."""
    losses = path[-1]
    relative = ROUNDING if losses.dtype == torch.float64 else torch.finfo(losses.dtype).eps
    return relative * float(losses.double().nan_to_num().norm())


def _remaining_steps(path: list[Tensor]) -> float:
    """The remaining way to the limit, in units of the last step, if steps shrink geometrically.

    The ratio is the mean over the steps of the path, because single steps may grow where
    coordinates move in turn.
    """
    sizes = _step_sizes(path)
    if len(sizes) < 2 or sizes[-1] <= _rounding(path):
        return 1.0
    if sizes[0] == 0:
        return math.inf
    ratio = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    if ratio >= 1:
        return math.inf
    return max(1.0, ratio / (1 - ratio))
