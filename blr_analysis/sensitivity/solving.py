"""How a what-if is answered: the posterior's one step, or a descent on the changed data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from blr_analysis.backprop.engine import Chunking
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.sensitivity.minimise import Descent, add, descend
from blr_analysis.sensitivity.objective import changed, dot, whole
from blr_analysis.sensitivity.shares import Share, relabelled, share, step
from blr_analysis.task import Task

SOLVERS = ("auto", "posterior", "cg")
PASSES = 60  # over the changed data, where the user names no bound
MOST_PASSES = 10_000  # of steps="converge"
FEW = 0.01  # of the data: up to there the posterior's one step is taken by solver="auto"
LEAST_PASSES = 8  # with fewer a descent is not worth its start
DRIFT = 0.1  # of the change: a model farther from its own minimum is not descended by "auto"
TOLERANCE = 1e-6  # of the linear system of steps=1


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


@dataclass(frozen=True)
class Plan:
    """The solver that was asked for, checked.

    ``steps`` is None (as many as the passes allow), a number, or "converge".
    """

    solver: str
    steps: int | str | None
    passes: int | None

    def short(self, change: Change, n_data: int) -> bool:
        """Whether the posterior's one step will do, by the size of the change and the passes that
        are allowed."""
        if self.solver != "auto":
            return self.solver == "posterior"
        if self.passes is not None and self.passes < LEAST_PASSES:
            return True
        return not self.asked and change.count <= max(1, FEW * n_data)

    @property
    def asked(self) -> bool:
        """Whether a descent of a certain length is asked for."""
        return self.steps is not None or self.passes is not None


def checked_plan(solver: str, steps: int | str | None, passes: int | None) -> Plan:
    """The three arguments together.

    Raises:
        InputError: an unknown solver, steps that are neither a positive number nor "converge",
            several steps of the posterior solver, which makes one, passes that are not positive.
    """
    one_of("solver", solver, SOLVERS)
    if isinstance(steps, str):
        if steps != "converge":
            raise InputError(f"steps must be a positive integer, 'converge' or None, got {steps!r}")
    elif steps is not None:
        steps = positive_int("steps", steps)
    if passes is not None:
        passes = positive_int("passes", passes)
    if solver == "posterior" and steps not in (None, 1):
        raise InputError(
            f"steps={steps!r}: solver='posterior' makes one step; use solver='cg' for more"
        )
    if solver == "posterior" and passes is not None:
        raise InputError("passes= bounds solver='cg'; solver='posterior' makes none")
    if solver == "cg" and passes is not None and passes < 2:
        raise InputError("solver='cg' needs passes of at least 2: one to start, one to move")
    return Plan(solver, steps, passes)


def solve(
    task: Task,
    q: Posterior,
    change: Change,
    plan: Plan,
    chunking: Chunking,
) -> tuple[Posterior, float, Descent | None]:
    """The posterior after the change, the fraction of it that was floored, and the descent."""
    shares: list[tuple[int, Share]] = []
    if len(change.leaving):
        shares.append((-1, share(task, q, change.leaving, chunking)))
    if change.new is not None:
        shares.append((1, share(change.new, q, None, chunking)))
    labels = [(1, relabelled(task, q, change.labels, chunking))] if change.labels else []
    if plan.short(change, task.n_data) or (
        plan.solver == "auto" and not plan.asked and _drifts(task, q, [*shares, *labels])
    ):
        return *step(q, [*shares, *labels]), None
    still = [(sign, replace(part, gradient=_nothing(part))) for sign, part in shares]
    preconditioner, floored = step(q, still)
    descent = _descended(task, q, preconditioner, change, plan, chunking)
    moved = Posterior(
        descent.point.params,
        preconditioner.form,
        prior_precision=q.prior,
        n_data=preconditioner.n_data,
        record={**preconditioner.record, "solver": "cg", "passes": descent.passes},
    )
    return moved, floored, descent


def _drifts(task: Task, q: Posterior, changes: list[tuple[int, Share]]) -> bool:
    """Whether a descent would show more of the training that goes on than of the change."""
    pull = {n: torch.zeros_like(m) for n, m in q.mean.items()}
    for sign, part in changes:
        pull = add(pull, sign, part.gradient)
    return drifts(q, own_slope(task, q), pull)


def own_slope(task: Task, q: Posterior) -> float:
    """gᵀ Σ g for the gradient g = ∇ℓ̄(m) of the model's own objective; one pass over the data."""
    own = whole(task, q.prior).at(q.mean).gradient
    return dot(own, q.form.solve(own))


def drifts(q: Posterior, own: float, pull: Tree) -> bool:
    """Whether m is too far from the minimum of its own objective for a change that pulls at it
    with this gradient: its own slope is above a tenth of the change's."""
    return own > DRIFT * dot(pull, q.form.solve(pull))


def _nothing(part: Share) -> Tree:
    return {n: torch.zeros_like(g) for n, g in part.gradient.items()}


def _descended(
    task: Task,
    q: Posterior,
    preconditioner: Posterior,
    change: Change,
    plan: Plan,
    chunking: Chunking,
) -> Descent:
    data = changed(task, q.prior, leaving=change.leaving, added=change.new, labels=change.labels)
    steps = None if isinstance(plan.steps, str) else plan.steps
    bound = MOST_PASSES if plan.steps is not None else PASSES
    passes = plan.passes or bound
    descent = Descent.start(
        data, dict(q.mean), preconditioner.form, memory_budget=chunking.memory_budget
    )
    with tqdm(
        total=None if passes == MOST_PASSES else passes,
        desc="what if: passes over the changed data",
        disable=None if chunking.progress is None else not chunking.progress,
        delay=0.0 if chunking.progress else 1.0,
        leave=False,
    ) as bar:

        def watch(at: Descent) -> None:
            bar.update(math.floor(at.passes) - bar.n)
            bar.set_postfix_str(f"objective {at.point.value:.6g}")

        descend(descent, steps=steps, passes=passes, tolerance=TOLERANCE, watch=watch)
    return descent


def next_parameters(descent: Descent) -> Tree:
    """Where one more secant move would go, before any damping."""
    return add(descent.point.params, 1.0, descent.next_step())
