"""What a what-if gives: the perturbed model, how it does, and in which range the truth may lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blr_analysis.backprop.engine import predict
from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.backprop.tree import add
from blr_analysis.checks import instance
from blr_analysis.errors import ModelError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.ranks import divided, held_as
from blr_analysis.sensitivity.groups.replay import Replay
from blr_analysis.sensitivity.groups.solving import Moved
from blr_analysis.sensitivity.minimise import AcceptedMove, Descent
from blr_analysis.task import Task, unwrapped
from blr_analysis.views import Plottable, make_table


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How the model does after a change, and how far that can be trusted; see :class:`WhatIf`."""

    before: Evaluation
    after: Evaluation
    interval: tuple[float, float]
    solver: str
    passes: float = 0.0
    converged: bool = True
    error: float | None = None
    moves: Sequence[AcceptedMove] = ()
    damping: float = 1.0
    note: str = ""
    checkpoints: int = 1

    @property
    def nll(self) -> float:
        """Mean loss on ``evaluate`` after the change, in nats, of the examples that count; with
        weights Σ w_i ℓ_i / N, as :class:`blr_analysis.sensitivity.LeaveOneOut` has it."""
        return self.after.nll

    @property
    def accuracy(self) -> float | None:
        """Accuracy on ``evaluate`` after the change; None for regression."""
        return self.after.accuracy

    @property
    def change(self) -> float:
        """What the nll rises by."""
        return self.after.nll - self.before.nll

    def row(self, group: Any, n: int) -> dict[str, Any]:
        """Of a group of n examples, in the table of groups."""
        low, high = self.interval
        return {
            "group": group,
            "n": n,
            "nll_before": self.before.nll,
            "nll_after": self.nll,
            "nll_low": low,
            "nll_high": high,
            "accuracy_before": self.before.accuracy,
            "accuracy_after": self.accuracy,
            "solver": self.solver,
            "passes": self.passes,
            "converged": self.converged,
            "error": self.error,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class WhatIf(Answer, Plottable):
    """What :func:`what_if` found.

    Attributes:
        parameters: m^{\\G}, the weights that the model would have, by name.
        posterior: the posterior that would be left: mean m^{\\G}, precision S − S_G, new n_data.
        after, before: losses and hits on ``evaluate`` with and without the change.
        targets: of ``evaluate``.
        removed, added, relabelled: how many examples.
        floored: the fraction of S − S_G that had to be raised to the prior, where the learned
            precision is smaller than the group's share; near 0 for a posterior that fits.
        interval: (low, high), where the nll after retraining is likely to lie. Of "replay" its
            width follows the change, the part of the data that goes and how far the replay stays
            from the model, as small networks whose retraining is known had it; of "retrain" the
            spread of two seeds or more; of "posterior", "cg" and one seed it is a guess.
        damping: the part of the posterior's step that was taken: less than 1 where the whole of
            it would have raised the loss on the changed data.
        note: why not to trust the answer, in one line; "" where nothing speaks against it.
        caveat: what follows for steps and descents from a model that is off its minimum, in one
            line; "" at it, or where nobody measured that.
        solver: what was used, "posterior", "cg", "replay" or "retrain".
        passes: over the changed data, in forward-and-backward passes: 0 for "posterior"; for
            "cg" one for each gradient, two for each product with the Gauss–Newton matrix.
        converged: whether nothing was left to gain; of "cg" ``error`` says how much. False of
            "posterior" and "replay" where they stand in for a training that cannot be replayed.
        error: by how many nats one more step would change the nll on ``evaluate``, up or down;
            several more add up to more: the size of what is missing, no bound on it. None for
            "posterior".
        moves: the accepted ones, the start first: kind, passes so far, objective on the changed
            data in nats (it never rises), expected decrease by the next.
        checkpoints: how many posteriors answered; of more than one, ``after`` is ``before`` plus
            the mean of their changes, ``passes`` their sum, ``error`` their mean.
    """

    parameters: Tree
    posterior: Posterior
    targets: Tensor
    removed: int
    added: int
    relabelled: int
    floored: float
    caveat: str = ""

    @property
    def by_class(self) -> Any:
        """DataFrame: one row per class of ``evaluate``, before and after."""
        return make_table(ByClass(self.targets, self.before, self.after))

    def apply(self, model: nn.Module) -> nn.Module:
        """Write :attr:`parameters` into ``model`` (in place) and return it.

        Raises:
            ModelError: the model lacks a parameter or has another shape; nothing is written.
        """
        instance("model", model, nn.Module, "a torch.nn.Module")
        bare = unwrapped(model)
        divided(bare)
        own = dict(bare.named_parameters())
        for name, value in self.parameters.items():
            if name not in own or own[name].shape != value.shape:
                got = tuple(own[name].shape) if name in own else "no such parameter"
                shape = tuple(value.shape)
                raise ModelError(f"cannot apply {name!r} of shape {shape}: the model has {got}")
        with torch.no_grad():
            for name, value in self.parameters.items():
                own[name].copy_(held_as(value, own[name]))
        return model

    def __repr__(self) -> str:
        counts = {"removed": self.removed, "added": self.added, "relabelled": self.relabelled}
        change = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        low, high = self.interval
        said = f"nll {self.before.nll:.4f} -> {self.nll:.4f} ({low:.2f} to {high:.2f})"
        if self.accuracy is not None:
            said += f", accuracy {self.before.accuracy:.4f} -> {self.accuracy:.4f}"
        said += "; one step" if self.solver == "posterior" else f"; {self.solver}"
        if self.damping != 1:
            said += f", damped to {self.damping:.2g}"
        if self.solver in ("cg", "replay"):
            said += f", {self.passes:.0f} passes"
        if not self.converged:
            said += ", not converged"
            if self.solver == "cg":
                said += f": one more step {self.error:.1g} nats"
        if self.checkpoints > 1:
            said += f"; mean change at {self.checkpoints} checkpoints"
        notes = "".join(f"; {line}" for line in (self.note, self.caveat) if line)
        return f"WhatIf({change}: {said}{notes})"


Answered = TypeVar("Answered", bound=Answer)


def combined(answers: Sequence[Answered]) -> Answered:
    """The last answer, changed by the mean of what all of them change."""
    last = answers[-1]
    if len(answers) == 1:
        return last

    def changed(part: str) -> Tensor | None:
        before = getattr(last.before, part)
        if before is None:
            return None
        pairs = [(getattr(a.after, part), getattr(a.before, part)) for a in answers]
        return before + torch.stack([after * 1.0 - was * 1.0 for after, was in pairs]).mean(0)

    errors = [a.error for a in answers if a.error is not None]
    ends = ([a.interval[k] - a.before.nll for a in answers] for k in (0, 1))
    low, high = (last.before.nll + sum(end) / len(end) for end in ends)
    return replace(
        last,
        after=replace(last.after, losses=changed("losses"), correct=changed("correct")),
        passes=sum(a.passes for a in answers),
        converged=all(a.converged for a in answers),
        error=sum(errors) / len(errors) if errors else None,
        interval=(low, high),
        checkpoints=len(answers),
    )


@dataclass(frozen=True)
class ByClass:
    """Losses and hits by target, for a table."""

    targets: Tensor
    before: Evaluation
    after: Evaluation


# How far answers are likely off, as a log of the predicted change and as a part of the loss before.
# That of "replay", upwards, was set on digits and Fashion-MNIST (AdamW, SGD, IVON; groups, new
# labels and halves of benchmarks/field), for four truths of five to fall inside; OVERSTATED on 26
# trainings of MNIST, Fashion-MNIST, tables and made-up classes that are no cases there; those of
# "one class", of a replay without the others, on small tasks of two classes
# (digits, Fashion-MNIST, wine, made-up ones). Those of "cg" and "posterior" are guesses that no
# retraining has checked.
SPREADS = {
    "cg": (0.15, 0.02),
    "cg, off the minimum": (1.0, 0.05),
    "replay": (0.15, 0.0),
    "one class": (0.5, 0.0),
    "one class, kind of steps unclear": (1.5, 0.0),
    "posterior": (1.0, 0.05),
    "replay, some weights shuffled": (1.0, 0.1),
    "replay, most weights shuffled": (2.0, 0.1),
    "calibrated": (0.12, 0.12),
}
CHANCES = 64  # examples that say what equal chances cost
WORST = 3.0  # of an example, times the largest loss of now or of equal chances for all classes
OVERSTATED = 0.3  # log of how many times too large the change of a replay likely is, at most
NOISE = 0.5  # of a replay, in standard errors of the loss before
NEAR = 0.5  # of the way from the first weights' loss to the model's that a replay must come
LEARNT = 0.8  # log of how much more a long training, which learns wrong labels by heart, may lose
SQUARES = 0.4  # of a regression's loss before: what a long training may lose further out
LARGE = 0.25  # of the data: what as many epochs of the rest lack in steps counts


class References:
    """What answers are compared with on ``where``, measured once for all groups."""

    def __init__(self, where: Task, before: Evaluation, mean: Tree) -> None:
        self.where, self.before, self.mean = where, before, mean
        self._replays: dict[int, tuple[Evaluation, Evaluation]] = {}
        self._reaches: dict[int, float] = {}

    def answer(self, moved: Moved) -> Answer:
        """How the model does where a solver ended."""
        after = measured(self.where, moved.posterior.mean)
        if moved.replay is not None:
            return self._replayed(moved, moved.replay, after)
        answer = Answer(
            before=self.before,
            after=after,
            interval=self._range(after, moved.solver, 0.0),
            solver=moved.solver,
            passes=moved.passes,
            damping=moved.damping,
            converged=not moved.note,
            note=moved.note,
        )
        if moved.undamped is not None:
            low, high = answer.interval
            high = max(high, self._at_most(moved.undamped))
            return replace(answer, interval=(low, high))
        if moved.descent is None:
            return answer
        missing, kind = self._further(moved.descent, after), moved.solver
        ends = self._range(after, kind, missing)
        if moved.drifting:  # all of the change may be training that goes on
            change = abs(after.nll - self.before.nll)
            ends = self._range(after, f"{kind}, off the minimum", math.hypot(missing, change))
        return replace(
            answer,
            interval=ends,
            error=missing,
            converged=moved.descent.converged,
            moves=tuple(moved.descent.moves),
        )

    def _replayed(self, moved: Moved, replay: Replay, without: Evaluation) -> Answer:
        """The model's losses, changed as those of a replay are."""
        before = self.before
        start, reference = self._of(replay)
        plain = against(without, reference, before)
        after = supported(plain, before, start)
        gap, change = (abs(e.nll - reference.nll) for e in (before, without))
        own = before.counted.double()
        missing = math.hypot(
            gap * change / (gap + change) if change > 0 else 0.0,
            NOISE * float(own.std(correction=0)) / math.sqrt(len(own)),
        )
        kind, steps = "replay", math.log(replay.recipe.n_data / moved.posterior.n_data)
        if moved.alone:  # trained for as many epochs
            kind, steps = "one class", 0.0
            if not replay.clear:
                kind = "one class, kind of steps unclear"
        elif replay.shuffled:
            kind = f"replay, {'most' if replay.shuffled > 0.5 else 'some'} weights shuffled"
        more = {"steps": steps + LEARNT * moved.relabelled, "reach": self._reach(replay)}
        low, high = self._range(after, kind, missing, **more)
        high = max(high, plain.nll)
        if before.correct is None:
            high = after.nll + math.hypot(high - after.nll, SQUARES * before.nll)
        note = ""
        if moved.alone:
            note = (
                "only one class remains: what the other loses grows with every step, and how "
                "many and how large yours were is not known; solver='retrain' tells"
            )
        elif replay.shuffled:
            note = (
                f"{replay.shuffled:.0%} of its weights cannot be drawn anew and began as they "
                "are, shuffled; give the first ones as initial= to the posterior (--initial)"
            )
        elif after.nll < plain.nll:
            note = (
                "the training without it extrapolates beyond what the other data support; "
                "solver='retrain' tells more"
            )
        elif start.nll - reference.nll < NEAR * (start.nll - before.nll):
            note = (
                f"the short training stays far from the model (nll {reference.nll:.2f} against "
                f"{before.nll:.2f}): give more passes=, or initial= to the posterior"
            )
        elif steps > -math.log(1 - LARGE):
            note = (
                "a large part of the data: retraining for as many epochs takes fewer steps, "
                "and may change more"
            )
        elif low <= before.nll <= high:
            note = (
                "a short training cannot tell this from no change: give more passes=, or "
                "solver='retrain'"
            )
        return Answer(
            before=before,
            after=after,
            interval=(low, high),
            solver=moved.solver,
            passes=moved.passes,
            converged=not replay.shuffled,
            note=note,
        )

    def _at_most(self, undamped: Tree) -> float:
        """The nll where the whole of a step leads, no example's above WORST."""
        try:
            after = evaluated(self.where, undamped, progress=False)[0]
        except ModelError:  # it breaks down there
            after = replace(self.before, losses=torch.full_like(self.before.losses, math.inf))
        some = torch.arange(min(len(after.losses), CHANCES))
        with torch.no_grad(), self.where.evaluation():
            f, y = self.where.run(self.where.fetch(some), self.where.parameters(), some)
        chances = self.where.likelihood.at(some).nll(torch.zeros_like(f), y)
        most = WORST * float(torch.maximum(self.before.losses.max(), chances.max().cpu()))
        return replace(after, losses=after.losses.clamp(max=most)).nll

    def _range(
        self, after: Evaluation, kind: str, missing: float, **more: float
    ) -> tuple[float, float]:
        low, high = interval(self.before.nll, after.nll, kind, missing, **more)
        least = -math.inf if self.before.correct is None else 0.0  # −log of a probability
        return max(low, least), high

    def _of(self, replay: Replay) -> tuple[Evaluation, Evaluation]:
        """At its first weights, and at those that it reaches on all data."""
        if id(replay) not in self._replays:
            start, reference = (
                evaluated(self.where, weights, progress=False)[0]
                for weights in (replay.start, replay.reference)
            )
            self._replays[id(replay)] = start, reference
        return self._replays[id(replay)]

    def _reach(self, replay: Replay) -> float:
        """log of how many times as far apart as the replay's the logits of the model are, at
        least 0; 0 where there are none."""
        if id(replay) not in self._reaches:
            own, reached = (self._spread(weights) for weights in (self.mean, replay.reference))
            gain = math.log(own / reached) if own > 0 and reached > 0 else 0.0
            self._reaches[id(replay)] = max(0.0, gain)
        return self._reaches[id(replay)]

    def _spread(self, weights: Tree) -> float:
        """Of the logits, in mean over the examples; 0 where there are none."""
        kind = self.where.likelihood.kind
        if kind.is_sequence:
            return 0.0
        spread = kind.spread(predict(self.where, weights, progress=False)[0])
        return 0.0 if spread is None else float(spread.double().mean())

    def _further(self, descent: Descent, after: Evaluation) -> float:
        """|change of the nll| by one more step."""
        try:
            there = add(descent.point.params, 1.0, descent.next_step())
            further, _ = evaluated(self.where, there, progress=False)
        except ModelError:  # it breaks down there: the search would have shortened the move
            return float("inf")
        return abs(further.nll - after.nll)


def measured(task: Task, mean: Tree) -> Evaluation:
    """Losses and hits at the weights after a change, by forward passes."""
    try:
        return evaluated(task, mean, progress=False)[0]
    except ModelError as error:
        raise PosteriorError(
            f"at the weights after the change {error}. The step is too long for this posterior: "
            "raise prior_precision, or change fewer examples"
        ) from error


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
    before: float,
    after: float,
    solver: str,
    missing: float = 0.0,
    steps: float = 0.0,
    reach: float = 0.0,
) -> tuple[float, float]:
    """Where the nll after retraining is likely to lie.

    change e^−a … change e^(max(a, reach) + |steps|)  ⊕  b · before  ⊕  missing

    added as independent errors; a, b: SPREADS; of "replay" a is OVERSTATED below

    missing: what one more step of a descent would change; of a replay that ends g nats from the
    model and finds a change of d, g d / (g + d), at most either, and half a standard error of the
    loss before, which moves with the seed as it does with the examples; of calibrated answers, the
    standard deviation of the retrained groups' log ratios, times the change.

    reach: log of how many times as far apart as a replay's the model's logits are, with which a
    change of losses may grow.

    steps: log n/n′ of a replay, and LEARNT of new labels. As many epochs of n′ examples instead of
    n are n′/n as many steps, which a replay does not take: short of steps as it is, they would move
    it far more than they move a whole training. (It does where one class remains: 0.)
    """
    relative, noise = SPREADS[solver]
    change = after - before
    least = OVERSTATED if solver == "replay" else relative
    furthest = max(relative, reach) + abs(steps)
    ends = sorted(change * math.exp(log) for log in (-least, furthest))
    low, high = (math.hypot(change - end, noise * before, missing) for end in ends)
    return after - low, after + high
