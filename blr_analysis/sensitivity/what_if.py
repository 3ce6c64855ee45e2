"""What the model would be if a group of examples were gone, new, or relabelled.

``solver="posterior"``: one step of the memory-perturbation equation for a group G (Nickl et al.,
NeurIPS 2023), in the posterior's own structure; no example that stays is visited:

    m^{\\G} = m + (S − S_G)⁻¹ Σ_{i∈G} J_iᵀ e_i,     S_G = Σ_{i∈G} J_iᵀ Λ_i J_i

``solver="replay"``: the difference that the change makes to a short training from the first
weights (:mod:`blr_analysis.sensitivity.replay`), for models that do not minimise their own loss.

``solver="cg"``: a descent on the objective of the changed data that starts at m, with the learned
S − S_G as preconditioner (:mod:`blr_analysis.sensitivity.minimise`), for a few passes over them.

Real forward passes at m^{\\G} follow. Adding is the same with the sign turned, relabelling a
removal plus an addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking
from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import instance
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior.fingerprint import passed_on
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.stationarity import caveat_of
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.objective import changed
from blr_analysis.sensitivity.perturbed import ByClass, WhatIf, combined, combined_rows
from blr_analysis.sensitivity.replay import Replay
from blr_analysis.sensitivity.retraining import Retrained, Train, retrained
from blr_analysis.sensitivity.scores import all_fitted
from blr_analysis.sensitivity.selection import Selection, groups_by, select
from blr_analysis.sensitivity.sites import site_what_if, sum_of_sites
from blr_analysis.sensitivity.solving import (
    Change,
    GroupSolver,
    Moved,
    checked_plan,
    next_parameters,
)
from blr_analysis.task import Task
from blr_analysis.views import GroupRows

__all__ = ["ByClass", "WhatIf", "what_if", "what_if_each"]


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
    steps: int | str | None = None,
    passes: int | None = None,
    train: Train | None = None,
    seeds: int = 3,
    cache: str | Path | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> WhatIf:
    """The model that other data would have given, predicted without retraining.

    "posterior":  m' = m + (S ∓ S_G)⁻¹ (± Σ_{i∈G} J_iᵀ e_i)
    "cg":         m' from m by minimising F(θ) = Σ_{changed data} ℓ_i(θ) + ½ θᵀ diag(δ) θ

    then forward passes at m' on ``evaluate``. F never rises from one accepted move to the next.
    What is compared is m and m': where m does not minimise its own F (a model stopped early, a
    posterior mean of IVON), part of the change is training that goes on.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data; or a list of those of one training run, the last one
            last: the losses (and hits) before the change are the last one's, and what changes is
            the mean of the changes that each finds at its own weights. ``parameters`` and
            ``posterior`` are the last one's; passes add up. Each replays from other first weights,
            so that ``[q, q]`` averages two replays of one. A fitted probabilistic model of
            :mod:`blr_analysis.learning_rule.inference` stands alone, ``what_if(fitted, remove=...,
            add=data, evaluate=data)``: its sites are subtracted, then come ``steps`` (10) of the
            rule on the changed data; ``error`` estimates how far that is from fitting again.
        remove: a boolean mask ``[N]``, indices, or a function of a row of the scores' table
            (``lambda row: row.target == 3``; metadata columns included).
        add: a task with examples to be added (its model is not used, its data and forward are).
        relabel: index → new target.
        evaluate: where to measure; default: ``task`` itself. Only its examples, their forward
            and their likelihood are used; the model is ``task``'s.
        solver: "posterior" (one step in the posterior's structure; where "auto" takes it for
            want of better, shortened where it would raise the loss on the changed data), "cg"
            (a descent on the changed data), "replay" (a short training from the first weights,
            with and without the change, see
            :mod:`blr_analysis.sensitivity.replay`), "retrain" (``train``), or "auto": "posterior"
            for up to 1 % of the data (a single one where labels are new); above, "cg" for a model
            that minimises its own F (checked by one pass over the data) and "replay" for one that
            does not (stopped early, trained in minibatches, the mean of IVON).
            ``result.solver`` says which.
        steps: of "cg". None: as many quasi-Newton moves as ``passes`` allow, each a forward and
            a backward pass; 1: one Gauss–Newton step, its system solved by preconditioned
            conjugate gradients to 1e-6; K: that many rough Gauss–Newton steps, six
            quasi-Newton moves after each; "converge": moves until nothing is left to gain,
            which is retraining by another name.
        passes: at most about that many passes over the changed data. Of "cg": default 60 where
            ``steps`` is None, no bound else; ``result.error`` says what one more step would
            change. Of "replay": spent on finding the size of the steps and on two trainings;
            default 6, doubled up to twice where the training stays far from the model's loss.
            Retraining takes as many as it had epochs.
        train: of "retrain": your own training, ``train(data, seed)`` → model or state dict, where
            ``data`` is the dataset of the changed data.
        seeds: how many runs of it; the answer is their mean.
        cache: a folder for their weights; what is there is not trained again.

    Raises:
        InputError: nothing to change, nothing left, a bad selection, an unknown solver, bad
            steps or passes, an example both removed and relabelled, ``add`` of another
            likelihood, a replay of a model whose weights cannot be drawn anew, no ``train``.
        DataError: a new target out of range.
        PosteriorError: a posterior of another model or number of examples, S − S_G that is not
            positive definite, weights at which the model breaks down.

    Source: Nickl et al., NeurIPS 2023 (the memory-perturbation equation, for a group); Khan & Rue,
    "The Bayesian Learning Rule", Eqs. 54 and 58 (a posterior as a sum of sites).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> result = what_if(task, q, remove=y == 2, evaluate=task, progress=False)
        >>> low, high = result.interval
        >>> result.removed == int((y == 2).sum()), low <= result.nll <= high
        (True, True)
    """
    if (sites := sum_of_sites(task, posterior)) is not None:
        asked = dict(relabel=relabel, solver=solver, passes=passes, train=train, cache=cache)
        return site_what_if(sites, remove, add, evaluate, steps, asked)  # type: ignore[return-value]
    plan = checked_plan(solver, steps, passes)
    if train is not None and plan.solver != "retrain":
        raise InputError("train= belongs to solver='retrain'")
    chunking = Chunking(chunk_size, memory_budget, progress)

    def answer(q: Posterior, seed: int) -> WhatIf:
        where = _evaluated_on(evaluate, task, q)
        leaving = torch.empty(0, dtype=torch.long) if remove is None else select(remove, task, q)
        if len(leaving) == task.n_data and add is None:
            raise InputError(
                f"remove selects all {task.n_data} examples; leave at least one, or add others"
            )
        new = None if add is None else _added(add, task)
        change = Change(leaving, new, _new_labels(relabel, task, leaving))
        if not change.count:
            raise InputError("nothing to change: give remove=, add= or relabel=")
        before, targets = _measured(where, q.mean, progress)
        counts = {
            "targets": targets,
            "removed": len(leaving),
            "added": 0 if add is None else add.n_data,
            "relabelled": len(change.labels or {}),
        }
        if plan.solver == "retrain":
            runs = _retrained(task, q, change, train, seeds, cache, where)
            return _of_retraining(runs, q, before, counts)
        moved = GroupSolver(task, q, plan, chunking, seed=seed).solve(change)
        references = References(where, before)
        return WhatIf(
            parameters={n: m.cpu() for n, m in moved.posterior.mean.items()},
            posterior=moved.posterior,
            before=before,
            floored=moved.floored,
            caveat="" if moved.solver == "replay" else caveat_of(q),
            **counts,
            **references.account(moved),
        )

    qs = all_fitted(task, posterior)
    return combined([answer(q, seed) for seed, q in enumerate(qs[-1:] if train else qs)])


@torch.inference_mode(False)  # also where the caller switched it on
def what_if_each(
    task: Task,
    posterior: Posterior | Sequence[Posterior] = None,  # type: ignore[assignment]
    *,
    by: str = "target",
    evaluate: Task | None = None,
    solver: str = "auto",
    steps: int | str | None = None,
    passes: int | None = None,
    train: Train | None = None,
    seeds: int = 1,
    retrain: int = 2,
    cache: str | Path | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Take out each class (source, annotator, …) in turn; one row each.

    Args:
        posterior: as in :func:`what_if`; of a list, changes are means over it.
        by: "target" or a metadata column of the task.
        evaluate: where to measure; default: ``task`` itself.
        solver, steps, passes: as in :func:`what_if`, for each group; what a replay needs once
            serves all groups.
        train, seeds, cache: as in :func:`what_if`, with solver="retrain" for all groups, else
            for ``retrain`` of them.
        retrain: how many groups are truly retrained, of the largest and the smallest predicted
            loss; by what they teach the changes of the others are scaled ("…, calibrated").

    Returns:
        DataFrame with columns group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change, nll_low and nll_high (the interval), and solver, passes,
        converged, error, note as in
        :class:`WhatIf`. Changes are after − before: a positive nll_change means that the model
        is worse without the group.

    Raises:
        InputError: no such column, or one with the same value everywhere.
        PosteriorError, DataError: as :func:`what_if`.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y), metadata={"source": ["a", "b"] * 30})
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> table = what_if_each(task, q, by="source", progress=False)
        >>> table.group.tolist(), table.n.tolist()
        (['a', 'b'], [30, 30])
    """
    plan = checked_plan(solver, steps, passes)

    def rows_of(q: Posterior, seed: int) -> list[dict[str, Any]]:
        where = _evaluated_on(evaluate, task, q)
        groups = groups_by(by, task, q)
        if len(groups) == 1:
            raise InputError(
                f"column {by!r} has the same value everywhere; without it nothing is left"
            )
        chunking = Chunking(chunk_size, memory_budget, progress=False)
        before, _ = _measured(where, q.mean, False)
        solver_of_all = GroupSolver(task, q, plan, chunking, groups=len(groups), seed=seed)
        references = References(where, before)
        rows = []
        for value, indices in track(
            groups.items(), total=len(groups), label=f"without each {by}", show=progress
        ):
            if plan.solver == "retrain":
                runs = _retrained(task, q, Change(indices), train, seeds, cache, where)
                account = _of_runs(runs, before)
            else:
                account = references.account(solver_of_all.solve(Change(indices)))
            after, (low, high) = account["after"], account["interval"]
            rows.append(
                {
                    "group": value,
                    "n": len(indices),
                    "nll_before": before.nll,
                    "nll_after": after.nll,
                    "nll_low": low,
                    "nll_high": high,
                    "accuracy_before": before.accuracy,
                    "accuracy_after": after.accuracy,
                    **{k: account[k] for k in ("solver", "passes", "converged", "error", "note")},
                }
            )
        if train is not None and plan.solver != "retrain":
            _calibrate(rows, groups, task, q, train, seeds, retrain, cache, where, before)
        return rows

    qs = all_fitted(task, posterior)
    tables = [rows_of(q, seed) for seed, q in enumerate(qs[-1:] if train else qs)]
    return GroupRows([combined_rows(rows) for rows in zip(*tables, strict=True)]).table


# How far answers are likely off, as a log of the predicted change and as a part of the loss before.
# Those of "replay" were set on digits and Fashion-MNIST (AdamW, SGD, IVON; groups, new labels and
# halves of benchmarks/field), for four truths of five to fall inside; the other cases there judge
# them; those of "one class", of a replay without the others, on small tasks of two classes
# (digits, Fashion-MNIST, wine, made-up ones). Those of "cg" and "posterior" are guesses that no
# retraining has checked.
SPREADS = {
    "cg": (0.15, 0.02),
    "replay": (0.15, 0.0),
    "one class": (0.5, 0.0),
    "one class, kind of steps unclear": (1.5, 0.0),
    "posterior": (1.0, 0.05),
    "calibrated": (0.12, 0.12),
}
NOISE = 0.5  # of a replay, in standard errors of the loss before
NEAR = 0.5  # of the way from the first weights' loss to the model's that a replay must come
LARGE = 0.25  # of the data: what as many epochs of the rest lack in steps counts


class References:
    """What answers are compared with on ``evaluate``, measured once for all groups."""

    def __init__(self, where: Task, before: Evaluation) -> None:
        self.where, self.before = where, before
        self._replays: dict[int, tuple[Evaluation, Evaluation]] = {}

    def account(self, moved: Moved) -> dict[str, Any]:
        """The entries of :class:`WhatIf` that say what came out, and how it was found."""
        raw, _ = _measured(self.where, moved.posterior.mean, False, moved=True)
        account: dict[str, Any] = {
            "after": raw,
            "solver": moved.solver,
            "passes": moved.passes,
            "converged": True,
            "error": None,
            "damping": moved.damping,
            "note": moved.note,
        }
        missing, most, steps, kind = 0.0, -math.inf, 0.0, moved.solver
        if moved.descent is not None:
            missing = self._further(moved, raw)
            account |= {"error": missing, "converged": moved.descent.converged}
            account["moves"] = tuple(moved.descent.moves)
        if moved.replay is not None:
            start, reference = self._of(moved.replay)
            plain = against(raw, reference, self.before)
            account["after"] = supported(plain, self.before, start)
            most = plain.nll
            gap, change = (abs(e.nll - reference.nll) for e in (self.before, raw))
            missing = gap * change / (gap + change) if change > 0 else 0.0
            if moved.alone:  # trained for as many epochs
                kind = "one class" if moved.replay.clear else "one class, kind of steps unclear"
            else:
                steps = math.log(moved.replay.recipe.n_data / moved.posterior.n_data)
            own = self.before.counted.double()
            missing = math.hypot(
                missing, NOISE * float(own.std(correction=0)) / math.sqrt(len(own))
            )
            if moved.alone:
                account["note"] = (
                    "only one class remains: what the other loses grows with every step, and how "
                    "many and how large yours were is not known; solver='retrain' tells"
                )
            elif account["after"].nll < most:
                account["note"] = (
                    "the training without it extrapolates beyond what the other data support; "
                    "solver='retrain' tells more"
                )
            elif start.nll - reference.nll < NEAR * (start.nll - self.before.nll):
                account["note"] = (
                    f"the short training stays far from the model (nll {reference.nll:.2f} against "
                    f"{self.before.nll:.2f}): give more passes=, or initial= to the posterior"
                )
            elif steps > -math.log(1 - LARGE):
                account["note"] = (
                    "a large part of the data: retraining for as many epochs takes fewer steps, "
                    "and may change more"
                )
        low, high = interval(self.before.nll, account["after"].nll, kind, missing, steps)
        least = -math.inf if self.before.correct is None else 0.0  # −log of a probability
        account["interval"] = low, high = max(low, least), max(high, most)
        if moved.replay is not None and not account["note"] and low <= self.before.nll <= high:
            account["note"] = (
                "a short training cannot tell this from no change: give more passes=, or "
                "solver='retrain'"
            )
        return account

    def _of(self, replay: Replay) -> tuple[Evaluation, Evaluation]:
        if id(replay) not in self._replays:
            self._replays[id(replay)] = (
                _measured(self.where, replay.start, False)[0],
                _measured(self.where, replay.reference, False)[0],
            )
        return self._replays[id(replay)]

    def _further(self, moved: Moved, after: Evaluation) -> float:
        """|change of the nll| by one more step."""
        assert moved.descent is not None
        try:
            further, _ = evaluated(self.where, next_parameters(moved.descent), progress=False)
        except ModelError:  # it breaks down there: the search would have shortened the move
            return float("inf")
        return abs(further.nll - after.nll)


def against(without: Evaluation, reference: Evaluation, before: Evaluation) -> Evaluation:
    """The model's losses, changed by what the group does to a replay of its training.

    ℓ_j(m) + ℓ_j(θ^G) − ℓ_j(θ)

    Hits are the replay's where the group decides them (a loss that rises by a nat), or where the
    two replays differ, and the model's own elsewhere.
    """
    change = without.losses.double() - reference.losses.double()
    losses = (before.losses.double() + change).to(before.losses.dtype)
    if before.correct is None or without.correct is None or reference.correct is None:
        return replace(before, losses=losses)
    decided = (without.correct != reference.correct) | (change > 1)
    return replace(
        before, losses=losses, correct=torch.where(decided, without.correct, before.correct)
    )


def supported(after: Evaluation, before: Evaluation, start: Evaluation) -> Evaluation:
    """Of classes, no mean loss below 0, where a difference can lead; else no loss above the worst
    of the first weights'.

    A network that was trained without some inputs says of them anything, however far out; which,
    is the seed's. (Probabilities bound what a class can cost; squares do not.)
    """
    if after.correct is not None:
        return replace(after, losses=after.losses - min(after.nll, 0.0))
    most = torch.maximum(start.losses.max(), before.losses)
    return replace(after, losses=torch.minimum(after.losses, most))


def interval(
    before: float, after: float, solver: str, missing: float = 0.0, steps: float = 0.0
) -> tuple[float, float]:
    """Where the nll after retraining is likely to lie.

    change e^−a … change e^(a + |steps|)  ⊕  b · before  ⊕  missing

    added as independent errors; a, b: SPREADS

    missing: what one more step of a descent would change; of a replay that ends g nats from the
    model and finds a change of d, g d / (g + d), at most either, and half a standard error of the
    loss before, which moves with the seed as it does with the examples; of calibrated answers, the
    standard deviation of the retrained groups' log ratios, times the change.

    steps: log n/n′ of a replay. As many epochs of n′ examples instead of n are n′/n as many steps,
    which a replay does not take: short of steps as it is, they would move it far more than they
    move a whole training. (It does where one class remains: 0.)
    """
    relative, noise = SPREADS[solver]
    change = after - before
    ends = sorted(change * math.exp(log) for log in (-relative, relative + abs(steps)))
    low, high = (math.hypot(change - end, noise * before, missing) for end in ends)
    return after - low, after + high


def _retrained(
    task: Task,
    q: Posterior,
    change: Change,
    train: Train | None,
    seeds: int,
    cache: str | Path | None,
    where: Task,
) -> list[tuple[Retrained, Evaluation]]:
    """The user's own training on the changed data, a run per seed, and how each does."""
    if train is None:
        raise InputError("solver='retrain' needs train=, a function (data, seed) -> model")
    data = changed(task, q.prior, leaving=change.leaving, added=change.new, labels=change.labels)
    runs = retrained(data.parts, q.mean, train, seeds, cache)
    return [(run, _measured(where, run.weights, False, moved=True)[0]) for run in runs]


def _of_runs(runs: list[tuple[Retrained, Evaluation]], before: Evaluation) -> dict[str, Any]:
    """Means over the runs, and the interval that the next one likely falls into."""
    losses = torch.stack([e.losses for _, e in runs]).mean(0)
    hits = [e.correct for _, e in runs if e.correct is not None]
    correct = torch.stack(hits).double().mean(0) if hits else None
    after = replace(before, losses=losses, correct=correct)
    each = torch.tensor([e.nll for _, e in runs], dtype=torch.float64)
    if len(runs) > 1:
        n = len(runs)
        from scipy.special import stdtrit  # 0.3 s: not every import of the package pays for it

        half = float(stdtrit(n - 1, 0.9)) * float(each.std()) * math.sqrt(1 + 1 / n)
    else:
        half = SPREADS["calibrated"][1] * abs(after.nll)
    return {
        "after": after,
        "solver": "retrain",
        "passes": float("nan"),
        "converged": True,
        "error": None,
        "note": "",
        "interval": (after.nll - half, after.nll + half),
    }


def _of_retraining(
    runs: list[tuple[Retrained, Evaluation]],
    q: Posterior,
    before: Evaluation,
    counts: dict[str, Any],
) -> WhatIf:
    weights = {n: w.to(q.mean[n]) for n, w in runs[0][0].weights.items()}
    n_data = q.n_data - counts["removed"] + counts["added"]
    around = Posterior(
        weights,
        q.form,
        prior_precision=q.prior,
        n_data=n_data,
        record={**passed_on(q), "kind": "what_if", "solver": "retrain", "seeds": len(runs)},
    )
    parameters = {n: w.cpu() for n, w in weights.items()}
    return WhatIf(
        parameters=parameters,
        posterior=around,
        before=before,
        floored=0.0,
        **counts,
        **_of_runs(runs, before),
    )


def _calibrate(
    rows: list[dict[str, Any]],
    groups: Mapping[Any, Tensor],
    task: Task,
    q: Posterior,
    train: Train,
    seeds: int,
    count: int,
    cache: str | Path | None,
    where: Task,
    before: Evaluation,
) -> None:
    """Retrain without a few groups, of the largest and the smallest predicted nll first, and
    scale the others' changes by the mean log ratio of true to predicted change, of those groups
    whose range is narrower than their change."""
    order = sorted(range(len(rows)), key=lambda k: rows[k]["nll_after"])
    turns = [order[-1 - k // 2] if k % 2 == 0 else order[k // 2] for k in range(len(order))]
    chosen = turns[:count]
    names = list(groups)
    ratios = []
    for k in chosen:
        runs = _retrained(task, q, Change(groups[names[k]]), train, seeds, cache, where)
        predicted = rows[k]["nll_after"] - before.nll
        seen = rows[k]["nll_high"] - rows[k]["nll_low"] < abs(predicted)
        account = _of_runs(runs, before)
        if seen and predicted * (account["after"].nll - before.nll) > 0:
            ratios.append(math.log((account["after"].nll - before.nll) / predicted))
        low, high = account["interval"]
        rows[k] |= {
            "nll_after": account["after"].nll,
            "nll_low": low,
            "nll_high": high,
            "accuracy_after": account["after"].accuracy,
            "solver": "retrain",
            "note": "",
        }
    if not ratios:
        return
    scale = math.exp(sum(ratios) / len(ratios))
    spread = float(torch.tensor(ratios).std()) if len(ratios) > 1 else 0.0
    for k, row in enumerate(rows):
        if k in chosen:
            continue
        row["nll_after"] = before.nll + scale * (row["nll_after"] - before.nll)
        change = abs(row["nll_after"] - before.nll)
        row["nll_low"], row["nll_high"] = interval(
            before.nll, row["nll_after"], "calibrated", spread * change
        )
        row["solver"] += ", calibrated"


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
    new, old = add.likelihood, task.likelihood
    if not new.same(old):
        raise InputError(
            f"the added examples have the likelihood {new!r}, the task {old!r}; build them with "
            "the same one"
        )
    return add.with_model(task)


def _new_labels(relabel: Any, task: Task, leaving: Tensor) -> dict[int, Any]:
    """Index → new target with plain integers as indices, checked."""
    if relabel is None:
        return {}
    try:
        indices = list(relabel.keys())
        labels = [relabel[index] for index in indices]
    except (AttributeError, TypeError, KeyError) as error:
        raise InputError(
            f"relabel must be a dict from index to new target, got {type(relabel).__name__}"
        ) from error
    chosen = chosen_indices(indices, task.n_data, "relabel") if indices else []
    if len(set(chosen)) < len(indices):
        raise InputError("relabel names an example more than once, or by booleans; use its index")
    both = set(chosen) & set(leaving.tolist())
    if both:
        raise InputError(f"example {min(both)} is both removed and relabelled; choose one")
    return dict(zip(chosen, labels, strict=True))


def _measured(
    task: Task, mean: Tree, progress: bool | None, *, moved: bool = False
) -> tuple[Evaluation, Tensor]:
    """Losses and hits at these weights, by forward passes, and the targets."""
    try:
        return evaluated(task, mean, progress=progress)
    except ModelError as error:
        if not moved:
            raise
        raise PosteriorError(
            f"at the weights after the change {error}. The step is too long for this posterior: "
            "raise prior_precision, change fewer examples, or use a structure with correlations"
        ) from error
