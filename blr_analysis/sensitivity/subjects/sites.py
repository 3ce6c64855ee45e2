"""A fitted probabilistic model that is a sum of sites, one per example.

    λ = λ_prior + Σ_i λ̃_i,      λ^{\\i} = λ − λ̃_i          (Khan & Rue, Eqs. 5 and 54)

Conjugate models, message passing, Gaussian processes, generalised linear models, EM and hidden
Markov models keep their data and their sites; here only what they answer is asked for. Removing an
example is a subtraction: exact for conjugate models, elsewhere the first step of fitting again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

AT_REST = 1e-6  # nats per example still to go
LEAST_STEPS = 10  # of the rule after a subtraction, where nobody says how many
SECONDS = 10.0  # after those, as long as this
MOST_STEPS = 2000
WINDOW = 3  # steps by which it is judged how fast they shrink
CIRCLE = 1e-9  # by which the sizes of steps differ that go around for ever


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
    """A fitted model; its data are those that it kept."""

    kind = "a sum of sites"

    def __init__(self, fitted: Any) -> None:
        self.fitted = fitted
        self.n = getattr(fitted, "n_data", 0)
        self.metadata: Mapping[str, list[Any]] = {}
        self.likelihood = None
        self.note = getattr(fitted, "note", "")

    def scores(self, variance: bool | None = None) -> Scores:
        losses_before, losses_without = self._losses()
        error = latent_variance = None
        if hasattr(self.fitted, "perturbation"):
            error, _, latent_variance = self.fitted.perturbation()
        if variance and latent_variance is None:
            raise self.lacks("prediction variance", "leave out variance=")
        return Scores(
            losses=losses_before,
            deviation=losses_without - losses_before,
            error=None if error is None else error.cpu().unsqueeze(-1),
            variance=None if latent_variance is None else latent_variance.cpu()[:, None, None],
            self_influence=self._self_influence(error, latent_variance),
            targets=self._targets(),
            note=self.note,
        )

    @staticmethod
    def _self_influence(error: Tensor | None, variance: Tensor | None) -> Tensor | None:
        if error is None or variance is None:
            return None
        return (error.square() * variance).cpu()

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
        """−log p(y_i) with the example and without it; NaN where nothing was observed."""
        after = self.fitted.left_out()
        if self.fitted.data is None:
            raise InputError("the examples were not kept with the fit: their losses are unknown")
        before = self.fitted.log_predictive(self.fitted.data)
        return -observed(before, self.fitted.data).cpu(), -observed(after, self.fitted.data).cpu()

    def _targets(self) -> Tensor | None:
        """y of data that are pairs (x, y) or labels; None of others."""
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
        fitted = self.fitted
        before = fitted.log_predictive(test)
        rises = [before - fitted.predictive(fitted.without([i]), test) for i in range(self.n)]
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
        rising = left_out.losses.nan_to_num(nan=-torch.inf)
        return Suspects(
            losses=scores.losses,
            training=scores.losses,
            left_out=left_out.losses,
            contradicted=first_by(rising, share),
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
    """How many examples a tensor, a sparse matrix or a tuple of them holds; 0 of None."""
    return 0 if data is None else tree_leaves(data)[0].shape[0]


class OfObserved(Evaluation):
    """Losses, NaN where nothing was observed."""

    @property
    def counted(self) -> Tensor:
        return self.losses[~self.losses.isnan()]


def observed(values: Tensor, data: Any) -> Tensor:
    """NaN where nothing was observed."""
    if not isinstance(data, Tensor) or not data.is_floating_point():
        return values
    missing = data.isnan().reshape(len(data), -1).all(1)
    return values.masked_fill(missing.to(values.device), torch.nan)


@dataclass(frozen=True)
class Refit:
    """Steps of the rule toward fitting again, after a subtraction.

    Attributes:
        posterior: after the last step.
        losses: −log p(y_j) under it, ``[M]``.
        steps: how many were taken after the subtraction.
        error: an estimate, in nats, of how far the mean loss is from fitting again, by the size of
            the last step and how fast steps shrink (no bound); 0 for conjugate models, infinite
            where steps do not shrink, None where the model has no step to repeat.
        asked: how many steps somebody asked for; None: until rest.
    """

    posterior: Any
    losses: Tensor
    steps: int
    error: float | None
    asked: int | None

    @property
    def at_rest(self) -> bool:
        if self.error is None or not self.steps:
            return True
        return not math.isinf(self.error) and (self.asked is not None or self.error < 1e-3)

    def note(self, subtraction_note: str) -> str:
        """What to know of it; of a subtraction alone what the model says of those."""
        if not self.steps:
            return subtraction_note
        if self.at_rest:
            return ""
        return f"not at rest after {self.steps} steps: give passes=, or fit again"


def _refitted(fitted: Any, data: Any, leaving: Tensor, added: Any, passes: int | None) -> Refit:
    """The posterior on other data: at rest or, after enough steps, when the time is over."""
    least, most, until = LEAST_STEPS, MOST_STEPS, monotonic() + SECONDS
    if passes is not None:
        least = most = passes
        until = math.inf
    path: list[Tensor] = []
    posterior = None
    steps = 0
    for steps, posterior in enumerate(fitted.refitted(leaving, add=added, steps=most)):
        loss = -observed(fitted.predictive(posterior, data), data)
        path = [*path[-WINDOW:], loss]
        runs_to_the_end = least == most
        if not steps or runs_to_the_end:
            continue
        is_late = steps >= least and monotonic() > until
        if _rests(path, steps) or is_late:
            break
    return Refit(posterior, path[-1].cpu(), steps, _error(path, steps), passes)


def _rests(path: list[Tensor], steps: int) -> bool:
    """Whether the losses of the last steps have stopped moving, or go around for ever."""
    sizes = _step_sizes(path)
    if sizes[-1] <= _rounding(path):
        return True
    if steps < WINDOW:
        return False
    still_to_go = sizes[-1] * _steps_left(path)
    goes_in_circles = max(sizes) - min(sizes) <= CIRCLE * min(sizes)
    return goes_in_circles or still_to_go <= AT_REST * math.sqrt(path[-1].numel())


def _error(path: list[Tensor], steps: int) -> float | None:
    if not steps:
        return None
    means = [float(losses.double().nanmean()) for losses in path]
    changes = [after - before for before, after in pairwise(means)]
    ratios = [changes[-1] / change if change else 0 for change in changes]
    grows = len(changes) == WINDOW and min(ratios) >= 1
    left = _steps_left(path)
    if grows or math.isinf(left):
        return math.inf
    return abs(changes[-1]) * left


def _step_sizes(path: list[Tensor]) -> list[float]:
    steps = [after - before for before, after in pairwise(path)]
    return [float(step.double().nan_to_num().norm()) for step in steps]


def _rounding(path: list[Tensor]) -> float:
    last = path[-1]
    eps = 1e-9 if last.dtype == torch.float64 else torch.finfo(last.dtype).eps
    return eps * float(last.double().nan_to_num().norm())


def _steps_left(path: list[Tensor]) -> float:
    """How many times its last step a sequence still goes whose steps shrink geometrically.

    By three steps where there are so many: coordinates that take turns may grow from one to the
    next.
    """
    sizes = _step_sizes(path)
    if len(sizes) < 2 or sizes[-1] <= _rounding(path):
        return 1.0
    if not sizes[0]:
        return math.inf
    ratio = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    return max(1.0, ratio / (1 - ratio)) if ratio < 1 else math.inf
