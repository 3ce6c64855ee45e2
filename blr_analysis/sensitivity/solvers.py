"""How a network answers a change of its data: a table of solvers, change → answer.

"posterior"   one step in the posterior's own structure; no example that stays is visited:

                  m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

"cg"          a descent from m on the objective of the changed data, at a minimum of it

"replay"      the difference that the change makes to a short training by the model's own recipe,
              from fresh weights, averaged over seeds s,

                  ℓ_j^{\\G} ≈ ℓ_j(m) + mean_s [ ℓ_j(θ_K^{\\G}, s) − ℓ_j(θ_K, s) ]

"retrain"     the whole recipe on the changed data
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.backprop.tree import scaled
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import Objective, Share, changed, share, step, with_labels
from blr_analysis.sensitivity.other_units import unlike_training
from blr_analysis.sensitivity.results import WhatIf
from blr_analysis.sensitivity.solver_endings import ReplayEndings, retraining_note
from blr_analysis.sensitivity.training import Part, recipe_of, trained, whole_data
from blr_analysis.snapshots import State
from blr_analysis.task import Task

FEW = 0.01  # of the data: up to there "auto" takes one step
EPOCHS = 8  # of a short training
DESCENT = 60  # passes of "cg"
WIDENED = 3.3  # times t · spread, for four of five: python -m benchmarks.field --widening
ONE_STEP_NOTE = "off the minimum: one step, a ranking of changes"
DESCENT_NOTE = "off the minimum: shows training that goes on"


@dataclass(frozen=True)
class Change:
    """What leaves, what comes, and what has new labels."""

    leaving: Tensor
    new: Any = None
    labels: Mapping[int, Any] | None = None

    @property
    def count(self) -> int:
        """How many examples it concerns."""
        added = 0 if self.new is None else len(self.new)
        return len(self.leaving) + added + len(self.labels or {})


@dataclass(frozen=True)
class Settings:
    """How changes are answered.

    Attributes:
        evaluate: where to measure; None: on the data themselves.
        solver: "auto", or a name in SOLVERS.
        seeds: trainings of "replay" and "retrain".
        passes: of "cg", or epochs of a short training; None: the default.
        groups: that are asked about, one after the other.
        quiet: without progress bars.
    """

    evaluate: Any = None
    solver: str = "auto"
    seeds: int = 3
    passes: int | None = None
    groups: int = 1
    quiet: bool = False


class Solvers:
    """Answers changes of the data of one network; the trainings on all data are made once.

    Args:
        runs: tasks and posteriors of one or several runs, checked; the last ones are the model.
        where: the examples to measure on, under the trained model.
    """

    def __init__(
        self, runs: Sequence[tuple[Task, Posterior]], where: Task, settings: Settings
    ) -> None:
        one_of("solver", settings.solver, ("auto", *SOLVERS))
        positive_int("seeds", settings.seeds)
        if settings.passes is not None:
            positive_int("passes", settings.passes)
        self.runs = runs
        self.where = where
        self.settings = settings
        task, self.posterior = runs[-1]
        self.task = task.quiet if settings.quiet else task
        self.before, self.targets = evaluated(where, self.posterior.mean)
        self.unlike = unlike_training(self.task, where, self.posterior.mean)
        self._unchanged_trainings: dict[int, Evaluation] = {}

    def __call__(self, change: Change) -> WhatIf:
        """How the model does after a change."""
        solver = self.settings.solver
        if solver == "auto":
            solver = self._chosen(change)
        return SOLVERS[solver](self, change)

    def _chosen(self, change: Change) -> str:
        """By the size of the group, and what the fit recorded of the minimum."""
        if change.count <= max(1, FEW * self.task.n_data):
            return "posterior"
        if self.posterior.at_minimum:
            return "cg"
        settings = self.settings
        whole = retrains(self.recipe, settings.groups, settings.passes)
        return "retrain" if whole else "replay"

    @cached_property
    def recipe(self) -> Recipe:
        """The training's own, or a short default one."""
        return recipe_of(self.task, self.posterior)

    @cached_property
    def endings(self) -> ReplayEndings:
        """Where the short trainings on all data end."""
        return ReplayEndings(self.task, self.posterior, self.recipe, self.settings.seeds)

    def measured(self, state: Mapping[str, Tensor]) -> Evaluation:
        """Losses and hits at these weights and buffers."""
        try:
            return evaluated(self.where, dict(state))[0]
        except ModelError as error:
            raise PosteriorError(
                f"at the weights after the change {error}. The step is too long for this "
                "posterior: raise prior_precision, or change fewer examples"
            ) from error

    def unchanged_training(self, recipe: Recipe, seed: int, label: str) -> Evaluation:
        """Where a training on all data ends; made once for each seed."""
        if seed not in self._unchanged_trainings:
            data = whole_data(self.task)
            with shortened():
                state = trained(self.task, data, recipe, seed, label=label)
            self._unchanged_trainings[seed] = self.measured(state)
            self.endings.add(state)
        return self._unchanged_trainings[seed]

    def precision_after(self, change: Change) -> Posterior:
        """The posterior with the precision of the changed data, its mean where it was."""
        still = scaled(self.posterior.mean, 0.0)
        shares = [
            (sign, replace(part, gradient=still))
            for sign, part in shares_of(self.task, self.posterior, change)
        ]
        return step(self.posterior, shares)

    def answer(
        self,
        change: Change,
        solver: str,
        after: Evaluation,
        state: Mapping[str, Tensor],
        applied_nll: float,
        note: str,
        **more: Any,
    ) -> WhatIf:
        """The result: ``state`` are the changed model's weights and buffers."""
        names = self.posterior.mean
        weights = {n: t for n, t in state.items() if n in names}
        buffers = {n: t for n, t in state.items() if n not in names}

        def posterior() -> Posterior:
            mean = {n: weights[n].to(m) for n, m in names.items()}
            return self.precision_after(change).changed(mean=mean, buffers=buffers)

        return WhatIf(
            before=self.before,
            after=after,
            solver=solver,
            posterior_after=posterior,
            parameters={n: t.cpu() for n, t in weights.items()},
            buffers={n: t.cpu() for n, t in buffers.items()},
            applied_nll=applied_nll,
            targets=self.targets,
            removed=len(change.leaving),
            added=0 if change.new is None else len(change.new),
            relabelled=len(change.labels or {}),
            note="; ".join(filter(None, [self.unlike, note])),
            **more,
        )


def one_step(solvers: Solvers, change: Change) -> WhatIf:
    """λ ∓ Σ λ̃_i; of several runs the mean of what their steps change."""
    differences = []
    posterior = solvers.posterior
    for task, q in solvers.runs:
        posterior = step(q, shares_of(task, q, change))
        before, _ = evaluated(solvers.where.holding(q.buffers), q.mean)
        after = solvers.measured({**posterior.mean, **posterior.buffers})
        differences.append(after.losses.double() - before.losses.double())
    state = {**posterior.mean, **posterior.buffers}
    last = solvers.measured(state)
    losses = solvers.before.losses + torch.stack(differences).mean(0)
    after = replace(last, losses=losses)
    note = solvers.posterior.note if solvers.posterior.at_minimum else ONE_STEP_NOTE
    return solvers.answer(change, "posterior", after, state, last.nll, note=note)


def descended(solvers: Solvers, change: Change) -> WhatIf:
    """Quasi-Newton steps on the objective of the changed data, which know the posterior."""
    q = solvers.posterior
    objective = changed_objective(solvers.task, q, change)
    preconditioner = solvers.precision_after(change)
    descent = Descent(objective, preconditioner.form, objective.at(dict(q.mean)))
    descent.run(solvers.settings.passes or DESCENT)
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
        raise InputError("a recipe of train= cannot be shortened: solver='retrain'")
    recipe = solvers.recipe.shortened(solvers.settings.passes or EPOCHS)
    objective = changed_objective(solvers.task, solvers.posterior, change)
    parts = [(*part, at) for part, at in zip(objective.parts, objective.places, strict=True)]
    label = "what if: short trainings"
    states: list[State] = []
    pairs: list[tuple[Evaluation, Evaluation]] = []
    for seed in range(solvers.settings.seeds):
        unchanged = solvers.unchanged_training(recipe, seed, label)
        with shortened():
            states.append(trained(solvers.task, parts, recipe, seed, label=label))
        pairs.append((solvers.measured(states[-1]), unchanged))
    before = solvers.before
    losses = [after.losses.double() - base.losses.double() for after, base in pairs]
    after = replace(before, losses=before.losses + torch.stack(losses).mean(0))
    if before.correct is not None:
        hits = [hits_of(after) - hits_of(base) for after, base in pairs]
        correct = before.correct + torch.stack(hits).mean(0)
        after = replace(after, correct=correct.clamp(0, 1))
    return solvers.answer(
        change,
        "replay",
        after,
        states[0],
        pairs[0][0].nll,
        interval=interval_around(after.nll, [after.nll - base.nll for after, base in pairs]),
        passes=float(2 * recipe.epochs * solvers.settings.seeds),
        note=recipe.note or solvers.endings.note(recipe),
    )


def retrained(solvers: Solvers, change: Change) -> WhatIf:
    """The whole recipe on the changed data, once for each seed."""
    objective = changed_objective(solvers.task, solvers.posterior, change)
    n = objective.n_data
    places = torch.arange(n).split([len(indices) for _, indices in objective.parts])
    parts: list[Part] = [(*part, at) for part, at in zip(objective.parts, places, strict=True)]

    def training(seed: int) -> State:
        label = "what if: retraining"
        return trained(solvers.task, parts, solvers.recipe, seed, n=n, label=label)

    states = [training(seed) for seed in range(solvers.settings.seeds)]
    evaluations = [solvers.measured(state) for state in states]
    first = evaluations[0]
    after = replace(first, losses=torch.stack([e.losses for e in evaluations]).mean(0))
    if first.correct is not None:
        after = replace(after, correct=torch.stack([hits_of(e) for e in evaluations]).mean(0))
    note = solvers.recipe.note
    part, stays = objective.parts[0]
    if not note and part is solvers.task:
        share_changed = change.count / solvers.task.n_data
        note = retraining_note(
            solvers.task,
            solvers.posterior,
            stays,
            states,
            changed=share_changed,
            training=training,
        )
    return solvers.answer(
        change,
        "retrain",
        after,
        states[0],
        first.nll,
        interval=interval_around(after.nll, [e.nll for e in evaluations]),
        passes=float(solvers.recipe.epochs * solvers.settings.seeds),
        note=note,
    )


SOLVERS: dict[str, Callable[[Solvers, Change], WhatIf]] = {
    "posterior": one_step,
    "cg": descended,
    "replay": replayed,
    "retrain": retrained,
}


def retrains(recipe: Recipe, groups: int, passes: int | None) -> bool:
    """Whether "auto" takes the whole recipe in place of short trainings, which take one more of all
    data: where it cannot be shortened, or is known and makes no more passes.

    >>> [retrains(Recipe("sgd", lr=0.1, epochs=k, batch_size=8), 1, None) for k in (16, 17)]
    [True, False]
    """
    if recipe.train is not None:
        return True
    short_epochs = recipe.shortened(passes or EPOCHS).epochs * (groups + 1)
    return recipe.known and recipe.epochs * groups <= short_epochs


def training_epochs(recipe: Recipe | None, groups: int, passes: int | None) -> float:
    """Epochs over all data that the trainings of "auto" off a minimum take for one seed, where each
    of these groups leaves the data in turn; without a recipe, those of the default one."""
    all_without_one = groups - 1  # in parts of the data, the trainings without each group together
    epochs = EPOCHS if passes is None else passes
    if recipe is None or recipe.train is not None:
        return epochs * (all_without_one + 1)
    if retrains(recipe, groups, passes):
        return recipe.epochs * all_without_one
    return recipe.shortened(epochs).epochs * (all_without_one + 1)


@contextmanager
def shortened() -> Iterator[None]:
    """Around a training in fewer epochs than the recipe's, at a higher rate."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f'{error}, or give other passes=, or solver="retrain"') from error


def hits_of(evaluation: Evaluation) -> Tensor:
    """Which answers are right, in float64."""
    assert evaluation.correct is not None
    return evaluation.correct.double()


def interval_around(middle: float, values: Sequence[float]) -> tuple[float, float] | None:
    """Around the middle WIDENED · t · spread over seeds, four of five; None of one seed."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # 0.3 s: not every import of the package pays for it

    spread = float(torch.tensor(values, dtype=torch.float64).std())
    half = WIDENED * float(stdtrit(len(values) - 1, 0.9)) * spread
    return middle - half, middle + half


def shares_of(task: Task, posterior: Posterior, change: Change) -> list[tuple[int, Share]]:
    """What leaves the posterior (−1) and what joins it (+1)."""
    relabelled = torch.tensor(list(change.labels or ()), dtype=torch.long)
    leaving = torch.cat([change.leaving, relabelled])
    shares = []
    if len(leaving):
        shares.append((-1, share(task, posterior, leaving)))
    if change.new is not None:
        shares.append((1, share(change.new.with_model(task), posterior)))
    if change.labels:
        shares.append((1, share(with_labels(task, change.labels), posterior)))
    return shares


def changed_objective(task: Task, posterior: Posterior, change: Change) -> Objective:
    """The objective of the changed data under the posterior's prior."""
    new = None if change.new is None else change.new.with_model(task)
    return changed(task, posterior.prior, leaving=change.leaving, added=new, labels=change.labels)
