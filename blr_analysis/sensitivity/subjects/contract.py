"""The questions that every analysis asks of a posterior and its data.

An analysis knows a :class:`Subject`, and not which of three kinds it is: a network with one output
vector per example (:mod:`.network`), a network of sequences (:mod:`.tokens`), or a fitted
probabilistic model that is a sum of sites (:mod:`.sites`). A new kind takes one class that
implements this contract, one line in :func:`blr_analysis.sensitivity.subjects.subject_of`, and one
class in the tests that inherits ``SubjectContract``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.sensitivity.results import LeaveOneOut, Scores, WhatIf
from blr_analysis.sensitivity.selection import Columns
from blr_analysis.sensitivity.solvers import Change, Settings


@dataclass(frozen=True)
class Suspects:
    """Measures of how suspicious each example is, ``[N]`` each; larger is more suspicious.

    Attributes:
        losses: the mean unweighted loss over the run, in nats; of sequences per token.
        training: the unweighted loss at the end of the run.
        left_out: the unweighted loss without the example.
        contradicted: whether the model predicts another label than the example's, either during
            most of its run or without the example.
        wrong: P(y_i is wrong); None without classes.
        unfamiliarity: tr(Λ_i V_i), the part of the model's parameters that the example determines;
            None where this kind of model does not have it.
        proposed: the best other label by the left-out prediction; None without labels.
        targets, predictions: None where this kind of model does not have them.
        guess: the loss per token of a guess by the tokens' frequencies, above which texts are
            suspected; None: by their losses as they are.
    """

    losses: Tensor
    training: Tensor
    left_out: Tensor
    contradicted: Tensor
    unfamiliarity: Tensor | None
    wrong: Tensor | None = None
    proposed: Tensor | None = None
    targets: Tensor | None = None
    predictions: Tensor | None = None
    guess: Tensor | None = None


class Subject(ABC):
    """A posterior and the data that it was learned from.

    Attributes:
        kind: its name in errors: "a network", "a sum of sites".
        n: N, the number of examples.
        metadata: further columns of the examples, by name.
        likelihood: the likelihood of the examples; None where the model has no outputs.
        note: one line on why the scale of numbers cannot be trusted; "" where it can.
        progress: whether long work shows a bar; None shows it on a terminal.
    """

    kind: str
    n: int
    progress: bool | None = None
    metadata: Mapping[str, list[Any]]
    likelihood: Any
    note: str

    @abstractmethod
    def scores(self, variance: bool | None = None) -> Scores:
        """Losses, errors, variances, and how far each example moves the model.

        Args:
            variance: whether to compute the prediction variance; None: if time and memory allow.
        """

    @abstractmethod
    def left_out(self, correction: str = "auto", refine: int = 0) -> LeaveOneOut:
        """Every example's prediction as if the model had been trained without it.

        Args:
            correction: "first_order", "cavity" or "auto".
            refine: for so many examples, those that move most, a descent replaces the formula.
        """

    @abstractmethod
    def influence_on(self, test: Any, measure: Any, normalize: Any, k: int | None) -> Any:
        """The rise of every test loss when each example is left out."""

    @abstractmethod
    def change(self, remove: Any, add: Any, relabel: Any) -> Change:
        """The checked change of the data: removed, added and relabelled examples.

        Raises:
            InputError: there is nothing to change, or this kind of model cannot change it.
        """

    @abstractmethod
    def answering(self, settings: Settings) -> Callable[[Change], WhatIf]:
        """A function change → answer; all its answers share the work that is common to them."""

    @abstractmethod
    def suspects(self, left_out: LeaveOneOut, share: float) -> Suspects:
        """Measures of how suspicious each example is.

        Args:
            left_out: the predictions without each example.
            share: without classes, this share of the examples counts as contradicted.
        """

    @abstractmethod
    def responses(self, samples: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """How each example's outputs move when the weights are drawn from the posterior.

        Returns:
            The responses ``[N, D]``, and the distance between copies that rounding leaves, relative
            to the size of their response ``[N]``; None for a model without weights.
        """

    @cached_property
    def _columns(self) -> Columns:
        return Columns(self)

    def column(self, name: str) -> Sequence[Any]:
        """A column of the scores' table, by its name there.

        Raises:
            InputError: there is no such column.
        """
        return self._columns[name]

    @abstractmethod
    def cheap_columns(self) -> dict[str, Tensor]:
        """The columns of the scores' table that take only forward passes; may be empty."""

    @abstractmethod
    def described(self, indices: Tensor, test: Any = None) -> dict[str, Tensor]:
        """Targets and predictions of these examples, or of examples of ``test``; may be empty."""

    @abstractmethod
    def select(self, selection: Any, name: str = "remove") -> Tensor:
        """The indices of a selection, sorted; ``name`` is the argument's name in errors."""

    def lacks(self, feature: str, remedy: str = "") -> InputError:
        """The error for a feature that this kind of model does not have."""
        words = f"{self.kind} has no {feature}"
        return InputError(f"{words}; {remedy}" if remedy else words)


def first_by(score: Tensor, share: float) -> Tensor:
    """Which examples are among the ``share`` with the largest scores, ``[N]``."""
    is_first = torch.zeros(len(score), dtype=torch.bool)
    count = round(share * len(score))
    ranking = score.argsort(descending=True, stable=True)
    is_first[ranking[:count]] = True
    return is_first
