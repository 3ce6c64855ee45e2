"""How a what-if is answered: by one step, a descent on the changed data, or a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from blr_analysis.backprop.engine import Chunking
from blr_analysis.backprop.loss import evaluated
from blr_analysis.backprop.tree import add, dot, scaled
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import BLRError, InputError
from blr_analysis.posterior.gaussian import Posterior, made_of
from blr_analysis.posterior.stationarity import drifts, stationarity
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import bar
from blr_analysis.sensitivity.groups.first_weights import Start, may_be_tuned, start_of
from blr_analysis.sensitivity.groups.replay import Replay, enough, prepare
from blr_analysis.sensitivity.minimise import Descent, descend
from blr_analysis.sensitivity.objective import (
    Objective,
    Point,
    Share,
    changed,
    relabelled,
    share,
    step,
    whole,
)
from blr_analysis.task import Task

SOLVERS = ("auto", "posterior", "cg", "replay", "retrain")
PASSES = 60  # of "cg" over the changed data, where the user names no bound
REPLAY_PASSES = 6  # of "replay": where nobody says how many, and its training comes near the model
REACHED = 0.75  # of the way from the first weights' loss to the model's is near …
DOUBLINGS = 2  # … and as often, at most, its passes are doubled until it is
MOST_PASSES = 10_000  # of steps="converge"
FEW = 0.01  # of the data: up to there solver="auto" may take one step
REACH = 0.005  # nats that a step promises: a tenth of a posterior standard deviation, no more
TRUST = 0.1  # of what pulls: after a step as much may be left, in the step's own measure
GAINED = 0.5  # of what a step promises must be gained where no gradient can tell
FAR = "the loss on the changed data does not fall as the step promises"
SETTLED = 1e-8  # of the first decrement: what a descent for so few may leave
TOLERANCE = 1e-6  # of the linear system of steps=1
HALVINGS = 10  # of the posterior's one step, where it overshoots
FEWEST = 32  # examples for a replay
SEEN = 2000  # examples that stay, at most, that say whether it does
GIVE = "give the first weights as initial= to the posterior (--initial)"
FAMILIES = {"adam_v": "adam", "rmsprop_v": "adam", "vadam": "adam", "ivon": "sgd", "vogn": "sgd"}


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
class SolverPlan:
    """The solver that was asked for, checked.

    ``steps`` is None (as many as the passes allow), a number, or "converge".
    """

    solver: str
    steps: int | str | None
    passes: int | None

    def short(self, change: Change, n_data: int) -> bool:
        """Whether the posterior's one step may do unasked, by the size of the change."""
        asked = self.steps is not None or self.passes is not None  # for a certain length
        return self.solver == "auto" and not asked and change.count <= max(1, FEW * n_data)


def checked_plan(solver: str, steps: int | str | None, passes: int | None) -> SolverPlan:
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
        raise InputError(f"steps={steps!r}: solver='posterior' makes one step; use solver='cg'")
    if solver == "posterior" and passes is not None:
        raise InputError("passes= bounds solver='cg' and 'replay'; solver='posterior' makes none")
    if solver in ("replay", "retrain") and steps is not None:
        raise InputError(f"steps= belongs to solver='cg'; {solver!r} takes passes= or train=")
    if passes == 1 and solver in ("auto", "cg", "replay"):
        raise InputError(f"solver={solver!r} needs passes of at least 2: one to start, one to move")
    return SolverPlan(solver, steps, passes)


@dataclass(frozen=True)
class Moved:
    """Where a solver ended.

    Attributes:
        posterior: after the change: the new mean, S ∓ S_G, the new n_data.
        floored: the fraction of it that was raised to the prior.
        solver: "posterior", "cg" or "replay".
        passes: over the data.
        descent: of "cg".
        replay: of "replay", what its mean is to be compared with.
        damping: the part of the posterior's step that was taken.
        undamped: of a step that was shortened, where the whole of it leads.
        note: why not to trust it, in one line.
        alone: whether a replay saw one class only.
        relabelled: whether it saw new labels.
        drifting: whether a descent shows more of the training that goes on than of the change.
    """

    posterior: Posterior
    floored: float
    solver: str
    passes: float = 0.0
    descent: Descent | None = None
    replay: Replay | None = None
    damping: float = 1.0
    undamped: Tree | None = None
    note: str = ""
    alone: bool = False
    relabelled: bool = False
    drifting: bool = False


class GroupSolver:
    """Answers changes of one task; what serves them all is found when first asked for."""

    def __init__(
        self,
        task: Task,
        q: Posterior,
        plan: SolverPlan,
        chunking: Chunking,
        *,
        groups: int = 1,
        seed: int = 0,
    ) -> None:
        self.task, self.q, self.plan, self.chunking = task, q, plan, chunking
        self.groups, self.seed = groups, seed  # that share a replay; of its first weights

    def solve(self, change: Change) -> Moved:
        """The posterior after the change, and how it was found."""
        task, q, plan = self.task, self.q, self.plan
        shares: list[tuple[int, Share]] = []
        if len(change.leaving):
            shares.append((-1, share(task, q, change.leaving, self.chunking)))
        if change.new is not None:
            shares.append((1, share(change.new, q, None, self.chunking)))
        if change.labels:
            shares.append((1, relabelled(task, q, change.labels, self.chunking)))
        data = changed(
            task, q.prior, leaving=change.leaving, added=change.new, labels=change.labels
        )
        note, solver = "", plan.solver
        short = plan.short(change, task.n_data)
        if short:
            taken = step(q, shares)
            if (rough := self._rough(change, shares, data, taken[0])) is not None:
                return self._one_step(taken, data, note=rough)
        if solver == "auto":
            if plan.steps is not None or not self._drifts(shares):
                solver = "cg"
            elif (note := self.no_replay) == "":
                solver = "replay"
            else:
                solver = "posterior"
        if solver == "posterior":
            return self._one_step(step(q, shares), data, note=note)
        still = [(sign, replace(part, gradient=scaled(q.mean, 0.0))) for sign, part in shares]
        preconditioner, floored = step(q, still)
        if solver == "replay":
            if self.no_replay:
                raise InputError(f"solver='replay': {self.no_replay}")
            alone = data.one_class(dict(q.mean))
            weights = self.replay.trained(
                [(*part, at) for part, at in zip(data.parts, data.places, strict=True)],
                alone=alone,
                progress=self.chunking.progress,
            )
            spent = self.replay.passes + self.replay.each
            recipe = self.replay.recipe
            about = {"family": recipe.family, "lr": recipe.lr, "steps": recipe.steps}
            about |= {"batch": recipe.batch, "unlike": self.replay.unlike}
            moved = made_of(preconditioner, weights, solver="replay", passes=spent, replay=about)
            how = {"replay": self.replay, "alone": alone, "relabelled": bool(change.labels)}
            return Moved(moved, floored, "replay", spent, **how)
        descent = self._descended(data, preconditioner, SETTLED * short)
        there = descent.point.params
        moved = made_of(preconditioner, there, solver="cg", passes=descent.passes)
        drifting = self._drifts(shares)
        return Moved(moved, floored, "cg", descent.passes, descent=descent, drifting=drifting)

    def _descended(self, data: Objective, preconditioner: Posterior, enough: float) -> Descent:
        plan, budget = self.plan, self.chunking.memory_budget
        passes = plan.passes or (MOST_PASSES if plan.steps is not None else PASSES)
        start = data.at(dict(self.q.mean))
        descent = Descent(data, preconditioner.form, start, budget, enough=enough)
        total = None if passes == MOST_PASSES else passes
        label = "what if: passes over the changed data"
        with bar(total, label, self.chunking.progress) as shown:

            def watch(at: Descent) -> None:
                shown.update(math.floor(at.passes) - shown.n)
                shown.set_postfix_str(f"objective {at.point.value:.6g}")

            steps = None if isinstance(plan.steps, str) else plan.steps
            descend(descent, steps=steps, passes=passes, tolerance=TOLERANCE, watch=watch)
        return descent

    @cached_property
    def _start(self) -> Start | None:
        if self.q.initial:
            return Start(dict(self.q.initial))
        return start_of(self.task, self.seed)

    @cached_property
    def no_replay(self) -> str:
        """Why this model's training cannot be replayed; "" where it can."""
        if self.task.n_data < FEWEST:
            return f"fewer than {FEWEST} examples are no training in minibatches"
        if any(isinstance(m, _BatchNorm) for m in self.task.model.modules()):
            return "its BatchNorm statistics belong to the trained weights"
        if self._start is None:
            return f"its weights cannot be drawn anew; {GIVE}"
        if not self.q.initial and may_be_tuned(self.task, self._start.weights):
            return f"it may have been fine-tuned from another model, or trained anew; {GIVE}"
        return ""

    @cached_property
    def replay(self) -> Replay:
        """The short training on all data, shared by all groups."""
        assert self._start is not None
        family = FAMILIES.get(str(self.q.record.get("kind")))
        least = min(PASSES, enough(self.task.n_data, groups=self.groups, family=family))
        passes = self.plan.passes or max(REPLAY_PASSES, least)
        longest = passes if self.plan.passes else passes * 2**DOUBLINGS
        spent = 0.0
        while True:
            replay = prepare(
                self.task,
                dict(self.q.mean),
                self._start.weights,
                shuffled=self._start.shuffled,
                passes=passes,
                groups=self.groups,
                seed=self.seed,
                family=family,
                progress=self.chunking.progress,
            )
            spent += replay.passes
            if passes >= longest or self._near(replay):
                return replace(replay, passes=spent)
            passes *= 2

    def _near(self, replay: Replay) -> bool:
        """Whether it comes most of the way from the first weights' loss to the model's."""
        some = torch.randperm(self.task.n_data, generator=torch.Generator().manual_seed(self.seed))
        data = self.task.subset(some[:SEEN])
        first, last, model = (
            evaluated(data, w, progress=False)[0].nll
            for w in (replay.start, replay.reference, dict(self.q.mean))
        )
        return first - last >= REACHED * (first - model)

    def _rough(
        self,
        change: Change,
        changes: list[tuple[int, Share]],
        data: Objective,
        taken: Posterior,
    ) -> str | None:
        """What to say of the posterior's one step; None where it should not be taken.

        It is trusted where it is next to nothing in the posterior's own measure, or where it ends
        where the changed data's loss is flat but for what training left over, which is no part of
        the change:

            r = ∇F^G(m + d) − ∇F(m),    ⟨r, (S ∓ S_G)⁻¹ r⟩ ≪ −⟨g_G, d⟩,    d = −(S ∓ S_G)⁻¹ g_G

        (the loss itself may fall as promised and slope across d). Off the minimum that loss must
        fall, by GAINED of what is promised or more."""
        task, several = self.task, bool(change.labels) and change.count > 1
        if not task.likelihood.is_sequence and self._drifts(changes) and several:
            return None
        move = add(taken.mean, -1.0, dict(self.q.mean))
        promised = -0.5 * dot(self._pull(changes), move)
        if promised <= REACH:
            return ""
        start, drifts = self._whole, self._drifts(changes)
        there = add(start.params, 1.0, move)
        try:
            if drifts:
                rise = data.value(there) - self._before(change, data) - dot(start.gradient, move)
                return "" if rise <= -GAINED * promised else FAR
            rest = add(data.at(there).gradient, -1.0, start.gradient)
        except BLRError:  # the model breaks down this far out
            return FAR if drifts else None
        left = 0.5 * dot(rest, taken.form.solve(rest))
        return "" if left <= TRUST**2 * promised else None

    @cached_property
    def _whole(self) -> Point:
        """The objective of the data as they are, at the posterior's mean."""
        return whole(self.task, self.q.prior).at(dict(self.q.mean))

    def _before(self, change: Change, data: Objective) -> float:
        """The objective of the changed data there, by forward passes over what changes alone."""
        left = torch.cat(
            [change.leaving, torch.tensor(list(change.labels or {}), dtype=torch.long)]
        )
        new = replace(data, parts=data.parts[len(left) < self.task.n_data :])
        gone = replace(data, parts=((self.task, left),))
        mean = self._whole.params
        return self._whole.value + new.value(mean) - gone.value(mean)

    def _drifts(self, changes: list[tuple[int, Share]]) -> bool:
        """Whether a descent would show more of the training that goes on than of the change; one
        answer for all changes of a model that is far from its minimum."""
        if not stationarity(self.task, self.q).near:
            return True
        return drifts(self.task, self.q, self._pull(changes))

    def _pull(self, changes: list[tuple[int, Share]]) -> Tree:
        """The gradient of the changes."""
        pull = scaled(self.q.mean, 0.0)
        for sign, part in changes:
            pull = add(pull, sign, part.gradient)
        return pull

    def _one_step(
        self, taken: tuple[Posterior, float], data: Objective, *, note: str = ""
    ) -> Moved:
        """The posterior's step. Of a group that it is too rough for (``note`` says why nothing
        better was done) it is halved until the loss on the changed data does not rise."""
        q = self.q
        moved, floored = taken
        if not note:
            return Moved(moved, floored, "posterior")
        move = add(moved.mean, -1.0, dict(q.mean))
        data = data.sampled(SEEN)
        here = data.value(dict(q.mean))

        def rises(size: float) -> bool:
            try:
                return data.value(add(dict(q.mean), size, move)) > here + 1e-6 * abs(here)
            except BLRError:  # the model breaks down this far out
                return True

        if not rises(1.0):
            return Moved(moved, floored, "posterior", note=note)
        sizes = (0.5**halving for halving in range(1, HALVINGS))
        size = next((size for size in sizes if not rises(size)), 0.0)
        whole = dict(moved.mean)
        moved = made_of(moved, add(dict(q.mean), size, move), damping=size)
        return Moved(moved, floored, "posterior", damping=size, undamped=whole, note=note)
