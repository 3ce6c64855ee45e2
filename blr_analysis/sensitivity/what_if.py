"""What the model would be if a group of examples were gone, new, or relabelled.

"posterior": one step, in the posterior's own structure; no example that stays is visited:

    m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

"cg": a descent from m on the objective of the changed data, for models at a minimum of it.

"replay": the difference that the change makes to a short training by the model's own recipe, from
fresh weights, averaged over seeds s,

    ℓ_j^{\\G} ≈ ℓ_j(m) + mean_s [ ℓ_j(θ_K^{\\G}, s) − ℓ_j(θ_K, s) ]

"retrain": the whole recipe on the changed data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.backprop.tree import scaled
from blr_analysis.checks import instance, one_of, positive_int, some
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import (
    Objective,
    Share,
    changed,
    share,
    step,
    with_labels,
)
from blr_analysis.sensitivity.other_units import unlike_training
from blr_analysis.sensitivity.results import Noted
from blr_analysis.sensitivity.run import losses_at
from blr_analysis.sensitivity.scores import all_fitted
from blr_analysis.sensitivity.selection import Selection, groups_by, select
from blr_analysis.sensitivity.sites import site_what_if, sum_of_sites
from blr_analysis.sensitivity.training import Part, recipe_of, trained, whole_data
from blr_analysis.snapshots import PARTS, State
from blr_analysis.task import Task, unwrapped
from blr_analysis.views import GroupRows, Plottable, make_table

SOLVERS = ("auto", "posterior", "cg", "replay", "retrain")
FEW = 0.01  # of the data: up to there "auto" takes one step
EPOCHS = 8  # of a short training
DESCENT = 60  # passes of "cg"
WIDENED = 3.3  # times t · spread, for four of five: python -m benchmarks.field --widening
CHECKING = "what if: does the recipe end where the model did?"
STEP = "off the minimum: one step, a ranking of changes"
DRIFT = "off the minimum: shows training that goes on"
UNKNOWN = "the recipe of the training is not known, a default one was taken: rough"


@dataclass(frozen=True, kw_only=True)
class WhatIf(Noted, Plottable):
    """What :func:`what_if` found.

    Attributes:
        before, after: losses and hits on ``evaluate`` without and with the change.
        interval: (low, high), where the nll after retraining lies in four of five cases, by the
            spread over seeds; None of a single answer.
        solver: what was used, "posterior", "cg", "replay" or "retrain".
        parameters, buffers: of the changed model by name; of several trainings the first one's.
        applied_nll: the loss of that model on ``evaluate``.
        passes: over the data, in forward-and-backward passes.
        converged: of "cg", whether nothing was left to gain.
        targets: of ``evaluate``.
        removed, added, relabelled: how many examples.
    """

    before: Evaluation
    after: Evaluation
    interval: tuple[float, float] | None
    solver: str
    parameters: Tree
    buffers: Tree
    applied_nll: float
    passes: float
    converged: bool
    targets: Tensor
    removed: int
    added: int
    relabelled: int

    @property
    def nll(self) -> float:
        """Mean loss on ``evaluate`` after the change, in nats, of the examples that count."""
        return self.after.nll

    @property
    def accuracy(self) -> float | None:
        """Accuracy on ``evaluate`` after the change; None for regression."""
        return self.after.accuracy

    @property
    def change(self) -> float:
        """What the nll rises by."""
        return self.after.nll - self.before.nll

    def row(self, group: Any) -> dict[str, Any]:
        """In the table of groups."""
        low, high = self.interval or (math.nan, math.nan)
        return {
            "group": group,
            "n": self.removed,
            "nll_before": self.before.nll,
            "nll_after": self.nll,
            "nll_low": low,
            "nll_high": high,
            "accuracy_before": self.before.accuracy,
            "accuracy_after": self.accuracy,
            "solver": self.solver,
            "passes": self.passes,
            "converged": self.converged,
            "note": self.note,
        }

    @property
    def by_class(self) -> Any:
        """DataFrame: one row per class of ``evaluate``, before and after."""
        return make_table(ByClass(self.targets, self.before, self.after))

    def apply(self, model: nn.Module) -> nn.Module:
        """Write :attr:`parameters` and :attr:`buffers` into ``model`` (in place) and return it.

        Raises:
            ModelError: the model lacks one or has another shape; nothing is written.
        """
        instance("model", model, nn.Module, "a torch.nn.Module")
        bare = unwrapped(model)
        own = dict(bare.named_parameters()) | dict(bare.named_buffers())
        values = {**self.parameters, **self.buffers}
        for name, value in values.items():
            if name not in own or own[name].shape != value.shape:
                got = tuple(own[name].shape) if name in own else "no such parameter"
                shape = tuple(value.shape)
                raise ModelError(f"cannot apply {name!r} of shape {shape}: the model has {got}")
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)
        return model

    def __repr__(self) -> str:
        counts = {"removed": self.removed, "added": self.added, "relabelled": self.relabelled}
        change = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        said = f"nll {self.before.nll:.4f} -> {self.nll:.4f}"
        if self.interval is not None:
            said += " ({:.2f} to {:.2f})".format(*self.interval)
        if self.accuracy is not None:
            said += f", accuracy {self.before.accuracy:.4f} -> {self.accuracy:.4f}"
        said += "; one step" if self.solver == "posterior" else f"; {self.solver}"
        if self.passes:
            said += f", {self.passes:.0f} passes"
        return f"WhatIf({change}: {said}{self._noted})"


@dataclass(frozen=True)
class ByClass:
    """Losses and hits by target, for a table."""

    targets: Tensor
    before: Evaluation
    after: Evaluation


@dataclass(frozen=True)
class Change:
    """What leaves, what comes, and what has new labels."""

    leaving: Tensor
    new: Task | None = None
    labels: Mapping[int, Any] | None = None

    @property
    def count(self) -> int:
        added = 0 if self.new is None else self.new.n_data
        return len(self.leaving) + added + len(self.labels or {})


@torch.inference_mode(False)  # also where the caller switched it on
def what_if(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    *,
    remove: Selection | None = None,
    add: Task | None = None,
    relabel: Mapping[int, Any] | None = None,
    evaluate: Task | None = None,
    solver: str = "auto",
    seeds: int = 3,
    passes: int | None = None,
) -> WhatIf:
    """The model that other data would have given, predicted in one step or by short trainings.

    Args:
        task: the model, the data it was trained on, and its ``recipe``. Without one a posterior's
            record may know it; else a short default training is taken, and ``note`` says so.
        posterior: learned on those data; or a list of those of several runs, the last one last:
            the step is the mean of theirs. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` stands alone, ``what_if(fitted, remove=...,
            add=data, evaluate=data)``: its sites are subtracted, then come steps of the rule on
            the changed data, until they rest or ``passes`` of them; ``error`` estimates how far
            that is from fitting again.
        remove: a boolean mask ``[N]``, indices, a query string (``"annotator == 'eve'"``), or a
            function of a row of the scores' table (``lambda row: row.target == 3``). A pandas
            Series is a mask by its own index, a pandas Index names rows.
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target; a pandas Series: row label → new target. Sequences have a
            target per token: remove them, and add them corrected.
        evaluate: where to measure; default: ``task`` itself. Only its examples, their forward
            and their likelihood are used; the model is ``task``'s.
        solver: "posterior" (one step), "cg" (a descent), "replay" (short trainings), "retrain" (the
            whole recipe), or "auto": "posterior" for up to 1 % of the data, else "cg" for a model
            at its minimum, else "replay", or "retrain" where the recipe makes no more passes, or is
            a ``train=``. ``result.solver`` says which.
        seeds: trainings of "replay" and "retrain"; one gives no interval.
        passes: of "cg" over the changed data (60); epochs of a "replay" (8, or the recipe's).

    Raises:
        InputError: nothing to change, nothing left, a bad selection, an unknown solver, an example
            both removed and relabelled, ``add`` of another likelihood, weights that cannot be drawn
            anew, ``relabel`` of sequences.
        DataError: a new target out of range.
        ModelError: a training that diverges.
        PosteriorError: a posterior of another model or number of examples, S − S_G that is not
            positive definite, weights at which the model breaks down.

    Source: Nickl et al., NeurIPS 2023 (the memory-perturbation equation, for a group); Khan & Rue,
    "The Bayesian Learning Rule", Eqs. 54 and 58 (a posterior as a sum of sites).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> result = what_if(task, q, remove=y == 2, evaluate=task)
        >>> result.removed == int((y == 2).sum()), result.solver
        (True, 'replay')
    """
    if (sites := sum_of_sites(task, posterior)) is not None:
        asked = dict(relabel=relabel, solver=None if solver == "auto" else solver)
        return site_what_if(sites, remove, add, evaluate, passes, asked)  # type: ignore[return-value]
    solvers = _Solvers(task, posterior, evaluate, solver, seeds, passes)
    q = solvers.q
    leaving = torch.empty(0, dtype=torch.long) if remove is None else select(remove, task, q)
    if len(leaving) == task.n_data and add is None:
        n = task.n_data
        raise InputError(f"remove selects all {n} examples; leave at least one, or add others")
    new = None if add is None else _added(add, task)
    change = Change(leaving, new, _new_labels(relabel, task, leaving))
    if not change.count:
        raise InputError("nothing to change: give remove=, add= or relabel=")
    return solvers.answer(change)


@torch.inference_mode(False)  # also where the caller switched it on
def what_if_each(
    task: Task,
    posterior: Posterior | Sequence[Posterior],
    *,
    by: str = "target",
    evaluate: Task | None = None,
    solver: str = "auto",
    seeds: int = 3,
    passes: int | None = None,
) -> Any:
    """Take out each class (source, annotator, …) in turn; one row each.

    The short trainings on all data are made once for all groups.

    Args:
        by: "target" or a metadata column of the task.
        evaluate, solver, seeds, passes: as for :func:`what_if`.

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change, nll_low and nll_high (the interval), and solver, passes,
        converged, note as in :class:`~blr_analysis.sensitivity.WhatIf`. Changes are after −
        before: a positive nll_change means that the model is worse without the group.

    Raises:
        InputError: no such column, or one with the same value everywhere.
        PosteriorError, DataError, ModelError: as :func:`what_if`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y), metadata={"source": ["a", "b"] * 30})
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> table = what_if_each(task, q, by="source")
        >>> table.group.tolist(), table.n.tolist()
        (['a', 'b'], [30, 30])
    """
    solvers = _Solvers(task, posterior, evaluate, solver, seeds, passes)
    groups = groups_by(by, task, solvers.q)
    if len(groups) == 1:
        raise InputError(f"column {by!r} has the same value everywhere; choose another")
    shown = track(groups.items(), total=len(groups), label=f"without each {by}", show=task.progress)
    solvers.task = task.quiet
    solvers.groups = len(groups)
    return GroupRows([solvers.answer(Change(i)).row(value) for value, i in shown]).table


def retrains(recipe: Recipe, groups: int, passes: int | None) -> bool:
    """Whether "auto" takes the whole recipe in place of short trainings, which take one more of all
    data: where it cannot be shortened, or is known and makes no more passes.

    >>> [retrains(Recipe("sgd", lr=0.1, epochs=k, batch_size=8), 1, None) for k in (16, 17)]
    [True, False]
    """
    if recipe.train is not None:
        return True
    short = recipe.shortened(passes or EPOCHS).epochs * (groups + 1)
    return recipe.known and recipe.epochs * groups <= short


def training_epochs(recipe: Recipe | None, groups: int, passes: int | None) -> int:
    """Epochs of the trainings of "auto" off a minimum, for one seed; without a recipe, those of the
    default one."""
    if recipe is not None and recipe.train is None and retrains(recipe, groups, passes):
        return recipe.epochs * groups
    epochs = EPOCHS if passes is None else passes
    if recipe is not None and recipe.train is None:
        epochs = recipe.shortened(epochs).epochs
    return epochs * (groups + 1)


class _Solvers:
    """Answers changes of one task; the trainings on all data are made once."""

    def __init__(
        self, task: Task, posterior: Any, evaluate: Any, solver: str, seeds: int, passes: Any
    ) -> None:
        one_of("solver", solver, SOLVERS)
        self.several = all_fitted(task, posterior)
        self.task, self.solver = task, solver
        self.seeds = positive_int("seeds", seeds)
        self.passes = None if passes is None else positive_int("passes", passes)
        self.home, self.q = self.several[-1]
        self.where = self.home if evaluate is None else _evaluated_on(evaluate, self.home, self.q)
        self.before, self.targets = evaluated(self.where, self.q.mean)
        self.unlike = unlike_training(self.home, self.where, self.q.mean)
        self.groups = 1  # that are asked about, one after the other
        self._references: dict[int, Evaluation] = {}
        self._whole: str | None = None  # what the ending of the whole recipe says
        self._endings: list[Tensor] = []  # training losses at the ends of short trainings

    def answer(self, change: Change) -> WhatIf:
        """How the model does after a change."""
        solver = self.solver
        if solver == "auto":
            few = change.count <= max(1, FEW * self.task.n_data)
            solver = "posterior" if few else "cg" if self.q.at_minimum else "replay"
            if solver == "replay" and retrains(self.recipe, self.groups, self.passes):
                solver = "retrain"
        return getattr(self, f"_{solver}")(change)

    def _posterior(self, change: Change) -> WhatIf:
        stepped = [step(q, _shares(task, q, change)) for task, q in self.several]
        states = [{**q.mean, **q.buffers} for q in stepped]
        changes = [
            self._measured(state).losses.double()
            - evaluated(self.where.holding(q.buffers), q.mean)[0].losses.double()
            for state, (_, q) in zip(states, self.several, strict=True)
        ]
        last = self._measured(states[-1])
        after = replace(last, losses=self.before.losses + torch.stack(changes).mean(0))
        note = self.q.note if self.q.at_minimum else STEP
        return self._result(change, "posterior", after, states[-1], last.nll, note=note)

    def _cg(self, change: Change) -> WhatIf:
        task, q = self.home, self.q
        data = _changed(task, q, change)
        still = [(s, replace(p, gradient=scaled(q.mean, 0.0))) for s, p in _shares(task, q, change)]
        around = step(q, still)
        passes = self.passes or DESCENT
        descent = Descent(data, around.form, data.at(dict(q.mean)))
        descent.run(passes)
        state = {**descent.point.params, **q.buffers}
        after = self._measured(state)
        note = self.q.note if self.q.at_minimum else DRIFT
        said = {"passes": descent.passes, "converged": descent.converged, "note": note}
        return self._result(change, "cg", after, state, after.nll, **said)

    def _replay(self, change: Change) -> WhatIf:
        if self.recipe.train is not None:
            raise InputError("a recipe of train= cannot be shortened: solver='retrain'")
        data = _changed(self.home, self.q, change)
        parts = [(*part, at) for part, at in zip(data.parts, data.places, strict=True)]
        recipe = self.recipe.shortened(self.passes or EPOCHS)
        label, pairs = "what if: short trainings", []
        first: State = {}
        for seed in range(self.seeds):
            if seed not in self._references:
                with _shortened():
                    state = trained(self.home, whole_data(self.home), recipe, seed, label=label)
                self._references[seed] = self._measured(state)
                self._endings.append(losses_at(self.home, state))
            with _shortened():
                state = trained(self.home, parts, recipe, seed, label=label)
            first = first or state
            pairs.append((self._measured(state), self._references[seed]))
        losses = torch.stack([a.losses.double() - b.losses.double() for a, b in pairs])
        after = replace(self.before, losses=self.before.losses + losses.mean(0))
        if self.before.correct is not None:
            hits = [a.correct.double() - b.correct.double() for a, b in pairs]  # type: ignore[union-attr]
            correct = self.before.correct + torch.stack(hits).mean(0)
            after = replace(after, correct=correct.clamp(0, 1))
        around = _interval(after.nll, [a.nll - b.nll for a, b in pairs])
        note = self._rough or self._replay_ending(recipe)
        said = {"interval": around, "note": note, "passes": 2 * recipe.epochs * self.seeds}
        return self._result(change, "replay", after, first, pairs[0][0].nll, **said)

    def _retrain(self, change: Change) -> WhatIf:
        data = _changed(self.home, self.q, change)
        places = torch.arange(n := data.n_data).split([len(i) for _, i in data.parts])
        placed: list[Part] = [(*part, at) for part, at in zip(data.parts, places, strict=True)]

        def training(seed: int) -> State:
            return trained(self.home, placed, self.recipe, seed, n=n, label="what if: retraining")

        states = [training(seed) for seed in range(self.seeds)]
        each = [self._measured(state) for state in states]
        after = replace(each[0], losses=torch.stack([e.losses for e in each]).mean(0))
        if after.correct is not None:
            hits = [e.correct for e in each if e.correct is not None]
            after = replace(after, correct=torch.stack(hits).double().mean(0))
        around = _interval(after.nll, [e.nll for e in each])
        passes = float(self.recipe.epochs * self.seeds)
        note = self._rough or self._retrain_ending(change, data, states, training)
        said = {"interval": around, "note": note, "passes": passes}
        return self._result(change, "retrain", after, states[0], each[0].nll, **said)

    def _retrain_ending(
        self,
        change: Change,
        data: Objective,
        states: list[State],
        training: Callable[[int], State],
    ) -> str:
        """Whether the trainings ended where the model's own did, on the examples that stay."""
        part, stays = data.parts[0]
        if part is not self.home:
            return ""
        return ending_note(
            losses_at(self.home, self.q.mean, stays),
            [losses_at(self.home, state, stays) for state in states],
            changed=change.count / self.home.n_data,
            another=lambda: losses_at(self.home, training(len(states)), stays),
        )

    def _replay_ending(self, recipe: Recipe) -> str:
        """The same of short trainings on all data: none ends below the model's own loss, and none
        above that of the checkpoint where the run had made half of its rate × steps."""
        if note := self.q.ending:
            return note
        own = losses_at(self.home, self.q.mean)
        note = ending_note(own, self._endings)
        means = [float(losses.mean()) for losses in self._endings]
        whole = recipe is self.recipe  # not shortened
        if not note or whole or sum(means) / len(means) < float(own.mean()):
            return note
        if len(self.q.earlier) < len(PARTS):
            return self._whole_ending(own, recipe)
        half = self.q.earlier[self.recipe.halfway(PARTS)]
        there = losses_at(self.home.holding(half.buffers), half.mean)
        above = sum(means) / len(means) > float(there.mean())
        return note if above and ending_note(there, self._endings) else ""

    def _whole_ending(self, own: Tensor, short: Recipe) -> str:
        """That of the whole recipe, where it costs no more than the short trainings did."""
        if self.recipe.epochs > 2 * short.epochs * self.seeds:
            return ""

        def losses(seed: int) -> Tensor:
            state = trained(self.home, whole_data(self.home), self.recipe, seed, label=CHECKING)
            return losses_at(self.home, state)

        if self._whole is None:
            self._whole = ending_note(own, [losses(0)], another=lambda: losses(1))
        return self._whole

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_of(self.home, self.q)

    @property
    def _rough(self) -> str:
        return "" if self.recipe.known else UNKNOWN

    def _measured(self, state: Mapping[str, Tensor]) -> Evaluation:
        try:
            return evaluated(self.where, dict(state))[0]
        except ModelError as error:
            raise PosteriorError(
                f"at the weights after the change {error}. The step is too long for this "
                "posterior: raise prior_precision, or change fewer examples"
            ) from error

    def _result(
        self,
        change: Change,
        solver: str,
        after: Evaluation,
        state: Mapping[str, Tensor],
        applied_nll: float,
        *,
        interval: tuple[float, float] | None = None,
        passes: float = 0.0,
        converged: bool = True,
        note: str = "",
    ) -> WhatIf:
        names = self.q.mean
        note = "; ".join(filter(None, [self.unlike, note]))
        return WhatIf(
            before=self.before,
            after=after,
            interval=interval,
            solver=solver,
            parameters={n: t.cpu() for n, t in state.items() if n in names},
            buffers={n: t.cpu() for n, t in state.items() if n not in names},
            applied_nll=applied_nll,
            passes=passes,
            converged=converged,
            note=note,
            targets=self.targets,
            removed=len(change.leaving),
            added=0 if change.new is None else change.new.n_data,
            relabelled=len(change.labels or {}),
        )


@contextmanager
def _shortened() -> Iterator[None]:
    """Around a training in fewer epochs than the recipe's, at a higher rate."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f'{error}, or give other passes=, or solver="retrain"') from error


def _interval(middle: float, each: Sequence[float]) -> tuple[float, float] | None:
    """Around the mean WIDENED · t · spread over seeds, four of five; None of one."""
    if len(each) < 2:
        return None
    from scipy.special import stdtrit  # 0.3 s: not every import of the package pays for it

    spread = float(torch.tensor(each, dtype=torch.float64).std())
    half = WIDENED * float(stdtrit(len(each) - 1, 0.9)) * spread
    return middle - half, middle + half


def _shares(task: Task, q: Posterior, change: Change) -> list[tuple[int, Share]]:
    """What leaves the posterior (−1) and what joins it (+1)."""
    gone = torch.cat([change.leaving, torch.tensor(list(change.labels or ()), dtype=torch.long)])
    shares = [(-1, share(task, q, gone))] if len(gone) else []
    if change.new is not None:
        shares.append((1, share(change.new.with_model(task), q)))
    if change.labels:
        shares.append((1, share(with_labels(task, change.labels), q)))
    return shares


def _changed(task: Task, q: Posterior, change: Change) -> Objective:
    new = None if change.new is None else change.new.with_model(task)
    return changed(task, q.prior, leaving=change.leaving, added=new, labels=change.labels)


def _evaluated_on(evaluate: Task | None, task: Task, q: Posterior) -> Task:
    """The examples to measure on, under the trained model (buffers, frozen weights and all)."""
    if evaluate is None:
        return task
    instance("evaluate", evaluate, Task, "a blr_analysis.Task with the examples to measure on")
    q.on(evaluate, same_data=False)
    return evaluate.with_model(task)


def _added(add: Task, task: Task) -> Task:
    """The new examples under the old task's model."""
    instance("add", add, Task, "a blr_analysis.Task with the new examples")
    add = add.with_model(task)
    new, old = add.likelihood, task.likelihood
    if not new.same(old):
        raise InputError(
            f"the added examples have the likelihood {new!r}, the task {old!r}; take one for both"
        )
    return add


def _new_labels(relabel: Any, task: Task, leaving: Tensor) -> dict[int, Any]:
    """Index → new target with plain integers as indices, checked."""
    if relabel is None:
        return {}
    try:
        named = relabel.keys()
        labels = [relabel[index] for index in named]
    except (AttributeError, TypeError, KeyError) as error:
        got = type(relabel).__name__
        raise InputError(f"relabel must be a dict from index to new target, got {got}") from error
    if task.likelihood.is_sequence:
        raise InputError("relabel= takes one target per example; use remove= and add=")
    indices = named if hasattr(named, "get_indexer") else list(named)  # an Index holds row labels
    chosen = []
    if labels:
        chosen = chosen_indices(indices, task.n_data, "relabel", task.examples.labels)
    if len(set(chosen)) < len(labels):
        raise InputError("relabel names an example more than once, or by booleans; use its index")
    both = set(chosen) & set(leaving.tolist())
    if both:
        raise InputError(f"example {min(both)} is both removed and relabelled; choose one")
    words = task.examples.classes or ()
    for place, label in enumerate(labels):
        if isinstance(label, str):
            if label not in words:
                known = f"none of {some(words)}" if words else "no number"
                raise InputError(f"relabel: {label!r} is {known}")
            labels[place] = words.index(label)
    return dict(zip(chosen, labels, strict=True))
