"""Solvers: functions that predict how a network does after a change of its data.

"posterior"   one step in the posterior's own structure, which visits only the changed examples:

                  m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

"cg"          a descent from m on the objective of the changed data; for a model at a minimum

"replay"      the difference that the change makes to a short training by the model's own recipe,
              from fresh weights, averaged over seeds s:

                  ℓ_j^{\\G} ≈ ℓ_j(m) + mean_s [ ℓ_j(θ_K^{\\G}, s) − ℓ_j(θ_K, s) ]

"retrain"     the whole recipe on the changed data
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.backprop.tree import scaled
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.forecast import step_seconds
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import BAR_DELAY, announce, duration, track
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import (
    Objective,
    Share,
    objective_after,
    posterior_after,
    share,
    with_labels,
)
from blr_analysis.sensitivity.other_units import unlike_training
from blr_analysis.sensitivity.results import WhatIf
from blr_analysis.sensitivity.solver_endings import ReplayEndings, WholeTrainings, retraining_note
from blr_analysis.sensitivity.training import EPOCHS as DEFAULT_EPOCHS
from blr_analysis.sensitivity.training import (
    Part,
    default_recipe,
    known_recipe,
    trained,
    whole_data,
)
from blr_analysis.snapshots import State
from blr_analysis.task import Task

FEW = 0.01  # share of the data, up to which "auto" takes one step
EPOCHS = 8  # of a short training
DESCENT_PASSES = 60  # of "cg" over the data
# Factor of t · spread over seeds, so that intervals contain the truth in four of five cases
# (python -m benchmarks.field --widening).
WIDENED = 3.3
WAYS = {
    "posterior": "in one step",
    "cg": "by a descent",
    "replay": "by short trainings",
    "retrain": "by whole trainings",
}
ONE_STEP_NOTE = "off the minimum: one step only ranks changes"
DESCENT_NOTE = "off the minimum: the change includes further training"


@dataclass(frozen=True)
class Change:
    """A change of the data.

    Attributes:
        leaving: the indices of examples that are removed.
        new: further examples: a task, or data as a fitted model takes them; None: none.
        labels: new targets by index; None: none.
    """

    leaving: Tensor
    new: Any = None
    labels: Mapping[int, Any] | None = None

    @property
    def count(self) -> int:
        """The number of removed, added and relabelled examples."""
        added = 0 if self.new is None else len(self.new)
        return len(self.leaving) + added + len(self.labels or {})


@dataclass(frozen=True)
class Settings:
    """The user's settings for answers to changes.

    Attributes:
        evaluate: the examples to measure on; None: the training data.
        solver: "auto", or a name in SOLVERS.
        seeds: the number of trainings of "replay" and "retrain".
        passes: the passes of "cg", or the epochs of a short training; None: the default.
        groups: the number of changes that will be answered.
        quiet: whether progress bars are off.
    """

    evaluate: Any = None
    solver: str = "auto"
    seeds: int = 3
    passes: int | None = None
    groups: int = 1
    quiet: bool = False


@dataclass(frozen=True)
class Cost:
    """What an answer takes, at most.

    Attributes:
        solver: its name.
        passes: over the data, forward and backward; 0 of one step, NaN of a ``train=``.
        seconds: by the time that a few examples take.
    """

    solver: str
    passes: float
    seconds: float

    def __str__(self) -> str:
        way = WAYS[self.solver]
        if math.isnan(self.passes):
            return f"{way} by your train=; the first one shows how long they take"
        if self.passes == 0:
            return way
        return f"{way}: {self.passes:.0f} passes over the data, about {duration(self.seconds)}"


class Solvers:
    """A function from changes of a network's data to answers.

    Trainings on the unchanged data are made once, and serve all answers.

    Args:
        runs: checked tasks and posteriors of one or several runs; the last run is the model.
        evaluation_task: the examples to measure on, under the trained model.
        settings: the user's settings.
    """

    def __init__(
        self, runs: Sequence[tuple[Task, Posterior]], evaluation_task: Task, settings: Settings
    ) -> None:
        check_settings(settings.solver, settings.seeds, settings.passes)
        self.runs = runs
        self.evaluation_task = evaluation_task
        self.settings = settings
        task, self.posterior = runs[-1]
        self.task = task.quiet if settings.quiet else task
        self.before, self.targets = evaluated(evaluation_task, self.posterior.mean)
        self.unlike = unlike_training(self.task, evaluation_task, self.posterior.mean)
        self._unchanged_trainings: dict[int, Evaluation] = {}
        self._progress = task.progress

    def __call__(self, change: Change) -> WhatIf:
        """The answer to a change, by the user's solver or the one that suits the change."""
        solver = self._solver_for(change)
        if self._progress is not False and solver != "posterior":
            self._announce(self.cost(change))
        return SOLVERS[solver](self, change)

    def _announce(self, cost: Cost) -> None:
        """Say what all answers take, before the first of them, where that is long."""
        is_long = not cost.seconds < BAR_DELAY
        if is_long or self._progress:
            announce(f"what if: {cost}")
        self._progress = False

    def cost(self, change: Change) -> Cost:
        """What the answer takes, with those of all groups."""
        return cost_of(self.task, self._solver_for(change), self.settings, self.known_recipe)

    def _solver_for(self, change: Change) -> str:
        """The name of the solver: the user's, or what "auto" means by the size of the change and
        the fit."""
        by_descent, by_training = possible_solvers(
            self.task, self.settings, self.known_recipe, change.count
        )
        return by_descent if self.posterior.at_minimum else by_training

    @cached_property
    def known_recipe(self) -> Recipe | None:
        """The recipe of the model's training, if it is known."""
        return known_recipe(self.task, self.posterior)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the model's training, or a short default one."""
        return self.known_recipe or default_recipe(self.task, self.posterior)

    @cached_property
    def endings(self) -> ReplayEndings:
        """The losses at the end of short trainings on the unchanged data."""
        return ReplayEndings(self.whole_trainings, self.settings.seeds)

    @cached_property
    def whole_trainings(self) -> WholeTrainings:
        """Whole trainings on the unchanged data, made only where an answer needs them."""
        return WholeTrainings(self.task, self.posterior, self.recipe)

    def seeds(self, label: str) -> Iterator[int]:
        """The seed of each training, with a progress bar over them."""
        seeds = range(self.settings.seeds)
        return track(seeds, total=len(seeds), label=label, show=self.task.progress)

    def measured(self, state: Mapping[str, Tensor]) -> Evaluation:
        """Losses and correctness of the measured examples at these weights and buffers."""
        try:
            return evaluated(self.evaluation_task, dict(state))[0]
        except ModelError as error:
            raise PosteriorError(
                f"at the weights after the change {error}. The step is too long for this "
                "posterior: raise prior_precision, or change fewer examples"
            ) from error

    def unchanged_training(self, recipe: Recipe, seed: int, label: str) -> Evaluation:
        """Losses and correctness after a training on the unchanged data; once for each seed."""
        if seed not in self._unchanged_trainings:
            data = whole_data(self.task)
            with shortened():
                state = trained(self.task, data, recipe, seed, label=label)
            self._unchanged_trainings[seed] = self.measured(state)
            self.endings.add(state)
        return self._unchanged_trainings[seed]

    def precision_after(self, change: Change) -> Posterior:
        """The posterior with the precision of the changed data, but the mean of the old ones."""
        zero_gradient = scaled(self.posterior.mean, 0.0)
        curvatures = [
            (sign, replace(share, gradient=zero_gradient))
            for sign, share in shares_of(self.task, self.posterior, change)
        ]
        return posterior_after(self.posterior, curvatures)

    def answer(
        self,
        change: Change,
        solver: str,
        after: Evaluation,
        state: Mapping[str, Tensor],
        applied_nll: float,
        note: str,
        interval: tuple[float, float] | None = None,
        passes: float = 0.0,
        converged: bool = True,
    ) -> WhatIf:
        """The result of a solver.

        Args:
            after: losses and correctness after the change.
            state: weights and buffers of the changed model.
            applied_nll: the mean loss at these weights and buffers.
        """
        names = self.posterior.mean
        return WhatIf(
            before=self.before,
            after=after,
            solver=solver,
            posterior_after=partial(self._posterior_after, change, state),
            parameters={name: value.cpu() for name, value in state.items() if name in names},
            buffers={name: value.cpu() for name, value in state.items() if name not in names},
            applied_nll=applied_nll,
            targets=self.targets,
            removed=len(change.leaving),
            added=0 if change.new is None else len(change.new),
            relabelled=len(change.labels or {}),
            note="; ".join(filter(None, [self.unlike, note])),
            interval=interval,
            passes=passes,
            converged=converged,
        )

    def _posterior_after(self, change: Change, state: Mapping[str, Tensor]) -> Posterior:
        """The posterior of the changed data, with these weights as its mean, and these buffers."""
        old_mean = self.posterior.mean
        mean = {name: state[name].to(m) for name, m in old_mean.items()}
        buffers = {name: value for name, value in state.items() if name not in old_mean}
        return self.precision_after(change).changed(mean=mean, buffers=buffers)


def possible_solvers(
    task: Task, settings: Settings, recipe: Recipe | None, count: int
) -> tuple[str, str]:
    """The solver for a change of so many examples at a minimum, and off it.

    Args:
        recipe: of the model's training; None: it is unknown.
    """
    if settings.solver != "auto":
        return settings.solver, settings.solver
    if count <= max(1, FEW * task.n_data):
        return "posterior", "posterior"
    takes_whole_recipe = retrains(recipe, settings.groups, settings.passes)
    return "cg", "retrain" if takes_whole_recipe else "replay"


def cost_of(task: Task, solver: str, settings: Settings, recipe: Recipe | None) -> Cost:
    """What the answers to all groups take by a solver; without a recipe by a default one."""
    passes = _passes(solver, settings, recipe)
    seconds = 0.0
    if passes:
        seconds = passes * task.n_data * step_seconds(task)
    return Cost(solver, passes, seconds)


def _passes(solver: str, settings: Settings, recipe: Recipe | None) -> float:
    """At most, over the data; NaN of a training of the user's."""
    if solver == "posterior":
        return 0.0
    if solver == "cg":
        return float((settings.passes or DESCENT_PASSES) * settings.groups)
    if recipe is not None and recipe.train is not None:
        return math.nan
    whole_epochs = float(DEFAULT_EPOCHS) if recipe is None else recipe.epochs
    if solver == "retrain":
        return whole_epochs * settings.seeds * settings.groups
    short_epochs = settings.passes or EPOCHS
    epochs = min(short_epochs, whole_epochs)
    if recipe is not None:
        epochs = recipe.shortened(short_epochs).epochs
    return epochs * settings.seeds * (settings.groups + 1)


def one_step(solvers: Solvers, change: Change) -> WhatIf:
    """One step λ ∓ Σ λ̃_i; for several runs, the mean of the changes of losses by their steps."""
    differences = []
    posterior = solvers.posterior
    for task, q in solvers.runs:
        posterior = posterior_after(q, shares_of(task, q, change))
        before, _ = evaluated(solvers.evaluation_task.holding(q.buffers), q.mean)
        after = solvers.measured({**posterior.mean, **posterior.buffers})
        differences.append(after.losses.double() - before.losses.double())
    state = {**posterior.mean, **posterior.buffers}
    last = solvers.measured(state)
    losses = solvers.before.losses + torch.stack(differences).mean(0)
    after = replace(last, losses=losses)
    note = solvers.posterior.note if solvers.posterior.at_minimum else ONE_STEP_NOTE
    return solvers.answer(change, "posterior", after, state, last.nll, note=note)


def descended(solvers: Solvers, change: Change) -> WhatIf:
    """Quasi-Newton steps on the objective of the changed data, preconditioned by the posterior."""
    q = solvers.posterior
    objective = changed_objective(solvers.task, q, change)
    preconditioner = solvers.precision_after(change)
    descent = Descent(objective, preconditioner.form, objective.at(dict(q.mean)))
    descent.run(solvers.settings.passes or DESCENT_PASSES)
    state = {**descent.point.params, **q.buffers}
    after = solvers.measured(state)
    return solvers.answer(
        change,
        "cg",
        after,
        state,
        after.nll,
        passes=descent.passes,
        converged=descent.converged,
        note=q.note if q.at_minimum else DESCENT_NOTE,
    )


def replayed(solvers: Solvers, change: Change) -> WhatIf:
    """Short trainings with and without the change, from the same weights, in the same order."""
    if solvers.recipe.train is not None:
        raise InputError("a recipe of train= cannot be shortened: use solver='retrain'")
    recipe = solvers.recipe.shortened(solvers.settings.passes or EPOCHS)
    objective = changed_objective(solvers.task, solvers.posterior, change)
    parts = _parts_at(objective, objective.places)
    label = "what if: short trainings"
    states: list[State] = []
    with_change: list[Evaluation] = []
    without_change: list[Evaluation] = []
    for seed in solvers.seeds("what if: pairs of trainings"):
        without_change.append(solvers.unchanged_training(recipe, seed, label))
        with shortened():
            states.append(trained(solvers.task, parts, recipe, seed, label=label))
        with_change.append(solvers.measured(states[-1]))
    after = _with_mean_difference(solvers.before, with_change, without_change)
    differences = [
        changed_end.nll - unchanged_end.nll
        for changed_end, unchanged_end in zip(with_change, without_change, strict=True)
    ]
    return solvers.answer(
        change,
        "replay",
        after,
        states[0],
        with_change[0].nll,
        interval=interval_around(after.nll, differences, least=least_loss(after)),
        passes=float(2 * recipe.epochs * solvers.settings.seeds),
        note=recipe.note or solvers.endings.note(recipe),
    )


def _parts_at(objective: Objective, places: Sequence[Tensor]) -> list[Part]:
    """The parts of an objective's data, with the places of their examples in the minibatches."""
    return [
        (task, indices, part_places)
        for (task, indices), part_places in zip(objective.parts, places, strict=True)
    ]


def _with_mean_difference(
    before: Evaluation, with_change: Sequence[Evaluation], without_change: Sequence[Evaluation]
) -> Evaluation:
    """``before`` plus the mean difference of losses and correctness between the two lists."""
    losses = _mean_losses(with_change) - _mean_losses(without_change)
    after = replace(before, losses=before.losses + losses)
    if before.correct is None:
        return after
    correct = _mean_correct(with_change) - _mean_correct(without_change)
    return replace(after, correct=(before.correct + correct).clamp(0, 1))


def _mean_losses(evaluations: Sequence[Evaluation]) -> Tensor:
    """The losses averaged over evaluations, in float64."""
    return torch.stack([evaluation.losses.double() for evaluation in evaluations]).mean(0)


def _mean_correct(evaluations: Sequence[Evaluation]) -> Tensor:
    """Correctness averaged over evaluations, in float64."""
    return torch.stack([correct_of(evaluation) for evaluation in evaluations]).mean(0)


def retrained(solvers: Solvers, change: Change) -> WhatIf:
    """The whole recipe on the changed data, once for each seed."""
    objective = changed_objective(solvers.task, solvers.posterior, change)
    n = objective.n_data
    sizes = [len(indices) for _, indices in objective.parts]
    parts = _parts_at(objective, torch.arange(n).split(sizes))

    def training(seed: int) -> State:
        label = "what if: retraining"
        return trained(solvers.task, parts, solvers.recipe, seed, n=n, label=label)

    states = [training(seed) for seed in solvers.seeds("what if: trainings")]
    evaluations = [solvers.measured(state) for state in states]
    losses = [evaluation.nll for evaluation in evaluations]
    first = evaluations[0]
    after = replace(first, losses=torch.stack([e.losses for e in evaluations]).mean(0))
    if first.correct is not None:
        after = replace(after, correct=_mean_correct(evaluations))
    return solvers.answer(
        change,
        "retrain",
        after,
        states[0],
        first.nll,
        interval=interval_around(after.nll, losses, least=least_loss(after)),
        passes=float(solvers.recipe.epochs * solvers.settings.seeds),
        note=solvers.recipe.note or _retraining_note(solvers, change, objective, states),
    )


def _retraining_note(
    solvers: Solvers,
    change: Change,
    objective: Objective,
    states: Sequence[State],
) -> str:
    """One line if retrainings end at other losses than the model, by the examples that stay."""
    task, stays = objective.parts[0]
    some_examples_stay = task is solvers.task
    if not some_examples_stay:
        return ""
    changed = change.count / task.n_data
    return retraining_note(solvers.whole_trainings, stays, states, changed=changed)


SOLVERS: dict[str, Callable[[Solvers, Change], WhatIf]] = {
    "posterior": one_step,
    "cg": descended,
    "replay": replayed,
    "retrain": retrained,
}


def check_settings(solver: str, seeds: int, passes: int | None) -> None:
    """Raise :class:`InputError` for an unknown solver, or numbers of trainings below 1."""
    one_of("solver", solver, ("auto", *SOLVERS))
    positive_int("seeds", seeds)
    if passes is not None:
        positive_int("passes", passes)


def retrains(recipe: Recipe | None, groups: int, passes: int | None) -> bool:
    """Whether "auto" takes the whole recipe instead of short trainings.

    It does if the recipe cannot be shortened, or if it is known and takes no more epochs. Short
    trainings include one on the unchanged data.

    Args:
        recipe: of the model's training; None: it is unknown.

    >>> [retrains(Recipe("sgd", lr=0.1, epochs=k, batch_size=8), 1, None) for k in (16, 17)]
    [True, False]
    """
    if recipe is None:
        return False
    if recipe.train is not None:
        return True
    short_epochs = recipe.shortened(passes or EPOCHS).epochs * (groups + 1)
    return recipe.known and recipe.epochs * groups <= short_epochs


def training_epochs(recipe: Recipe | None, groups: int, passes: int | None) -> float:
    """Epochs over all data that "auto" takes off a minimum for one seed, as an estimate beforehand.

    Each of the groups leaves the data in turn. Without a recipe the default one is assumed. The
    epochs of a ``train=`` are not known: 0.
    """
    if recipe is not None and recipe.train is not None:
        return 0
    # Every example is missing in one of the trainings, which together see the data groups − 1
    # times in an epoch; a training on the unchanged data sees them once more.
    changed_data = groups - 1
    all_data = changed_data + 1
    epochs = EPOCHS if passes is None else passes
    if recipe is None:
        return epochs * all_data
    if retrains(recipe, groups, passes):
        return recipe.epochs * changed_data
    return recipe.shortened(epochs).epochs * all_data


@contextmanager
def shortened() -> Iterator[None]:
    """Around a training in fewer epochs than the recipe's: an error suggests to take more."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f'{error}, or give other passes=, or solver="retrain"') from error


def correct_of(evaluation: Evaluation) -> Tensor:
    """1 for correct answers and 0 for others, in float64."""
    assert evaluation.correct is not None
    return evaluation.correct.double()


def least_loss(evaluation: Evaluation) -> float:
    """The least loss that a model can have: 0 of a classifier, whose loss is −log of a chance."""
    is_classifier = evaluation.correct is not None
    return 0.0 if is_classifier else -math.inf


def interval_around(
    middle: float, values: Sequence[float], *, least: float = -math.inf
) -> tuple[float, float] | None:
    """middle ± WIDENED · t · spread, with the spread of the values over seeds; None of one seed.

    t is the 90 % quantile of Student's distribution: the truth is inside in four of five cases.
    The interval ends at the ``least`` loss, unless its middle is below that.
    """
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # takes 0.3 s to import

    spread = float(torch.tensor(values, dtype=torch.float64).std())
    quantile = float(stdtrit(len(values) - 1, 0.9))
    half_width = WIDENED * quantile * spread
    lower_end = max(middle - half_width, min(least, middle))
    return lower_end, middle + half_width


def shares_of(task: Task, posterior: Posterior, change: Change) -> list[tuple[int, Share]]:
    """The shares of examples that leave the posterior (−1) and of those that join it (+1)."""
    relabelled = torch.tensor(list(change.labels or ()), dtype=torch.long)
    leaving = torch.cat([change.leaving, relabelled])
    shares = []
    if len(leaving) > 0:
        shares.append((-1, share(task, posterior, leaving)))
    if change.new is not None:
        shares.append((1, share(change.new.with_model(task), posterior)))
    if change.labels:
        shares.append((1, share(with_labels(task, change.labels), posterior)))
    return shares


def changed_objective(task: Task, posterior: Posterior, change: Change) -> Objective:
    """The objective of the changed data under the posterior's prior."""
    new = None if change.new is None else change.new.with_model(task)
    return objective_after(
        task, posterior.prior, leaving=change.leaving, added=new, labels=change.labels
    )
