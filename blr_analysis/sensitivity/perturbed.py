"""What a what-if gives: the perturbed model, how it does, and how far that can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blr_analysis.backprop.loss import Evaluation
from blr_analysis.checks import instance
from blr_analysis.errors import ModelError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.ranks import divided, held_as
from blr_analysis.sensitivity.minimise import AcceptedMove
from blr_analysis.task import unwrapped
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
                raise ModelError(
                    f"cannot apply {name!r} of shape {tuple(value.shape)}: the model has {got}"
                )
        with torch.no_grad():
            for name, value in self.parameters.items():
                own[name].copy_(held_as(value, own[name]))
        return model

    def __repr__(self) -> str:
        change = [
            f"{count} {word}"
            for count, word in (
                (self.removed, "removed"),
                (self.added, "added"),
                (self.relabelled, "relabelled"),
            )
            if count
        ]
        right = (
            ""
            if self.accuracy is None
            else f", accuracy {self.before.accuracy:.4f} -> {self.accuracy:.4f}"
        )
        if self.solver == "posterior":
            taken = "" if self.damping == 1 else f", damped to {self.damping:.2g}"
            how = f"; one step{taken}" + ("" if self.converged else ", not converged")
        elif self.solver != "cg":
            spent = f", {self.passes:.0f} passes" if self.solver == "replay" else ""
            spent += "" if self.converged else ", not converged"
            how = f"; {self.solver}{spent}"
        else:
            left = "" if self.converged else f", not converged: one more step {self.error:.1g} nats"
            how = f"; {self.solver}, {self.passes:.0f} passes{left}"
        if self.checkpoints > 1:
            how += f"; mean change at {self.checkpoints} checkpoints"
        low, high = self.interval
        nll = f"nll {self.before.nll:.4f} -> {self.nll:.4f} ({low:.2f} to {high:.2f})"
        said = (self.note, self.caveat)
        note = "".join(f"; {line}" for line in said if line)
        return f"WhatIf({', '.join(change)}: {nll}{right}{how}{note})"


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
