"""What can be asked of a posterior and its data, whatever they are.

An analysis asks a :class:`Subject` and never which kind it has: a network with one output vector an
example (:mod:`.network`), a network of sequences (:mod:`.tokens`), or a fitted probabilistic model
that is a sum of sites (:mod:`.sites`). A new kind of data is one class that keeps this contract,
one line in :func:`blr_analysis.sensitivity.subjects.subject_of`, and one class in the tests that
inherits ``SubjectContract``.
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
    """What speaks against each example, before it is ranked; ``[N]`` each, larger is worse.

    Attributes:
        losses: the mean unweighted loss over the run, in nats; of sequences of a token.
        training: the unweighted loss at the end of the run.
        left_out: the unweighted loss without the example.
        contradicted: whether the model, most of its run or without the example, answers otherwise.
        wrong: P(y_i is wrong); None without classes.
        unfamiliarity: how much of the model's freedom the example takes up; None where the kind has
            no such thing.
        proposed: the best other label of the left-out prediction; None without labels.
        targets, predictions: None without them.
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


class Subject(ABC):
    """A posterior and the data that it was learned from.

    Attributes:
        kind: what an error calls it: "a network", "a sum of sites".
        n: N, the number of examples.
        metadata: further columns of the examples, by name.
        likelihood: of the examples; None where the model has no outputs.
        note: how far its scale is to be trusted, in one line; "" where it is.
        progress: whether long work shows a bar; None: on a terminal.
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
            variance: whether the prediction variance is computed; None: where it is affordable.
        """

    @abstractmethod
    def left_out(self, correction: str = "auto", refine: int = 0) -> LeaveOneOut:
        """Every example's prediction without it; the ``refine`` most moved ones by a descent."""

    @abstractmethod
    def influence_on(self, test: Any, measure: Any, normalize: Any, k: int | None) -> Any:
        """The rise of every test loss when each example is left out."""

    @abstractmethod
    def change(self, remove: Any, add: Any, relabel: Any) -> Change:
        """What leaves, what comes and what has new labels, checked.

        Raises:
            InputError: nothing to change, or something that this kind cannot change.
        """

    @abstractmethod
    def answering(self, settings: Settings) -> Callable[[Change], WhatIf]:
        """A function from changes of the data to answers, which share what they have in common."""

    @abstractmethod
    def suspects(self, left_out: LeaveOneOut, share: float) -> Suspects:
        """What speaks against each example."""

    @abstractmethod
    def responses(self, samples: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """How each example's outputs move with the weights, ``[N, D]``, and the distance, relative
        to its size, that rounding leaves between two copies, ``[N]``; None without weights."""

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
        """Columns of that table that need forward passes alone; empty where there are none."""

    @abstractmethod
    def described(self, indices: Tensor, test: Any = None) -> dict[str, Tensor]:
        """Target and prediction of these examples, or of those of ``test``; empty without."""

    @abstractmethod
    def select(self, selection: Any, name: str = "remove") -> Tensor:
        """The indices that a selection means, sorted."""

    def lacks(self, what: str, remedy: str = "") -> InputError:
        """What is raised where this kind of model has no such thing."""
        words = f"{self.kind} has no {what}"
        return InputError(f"{words}; {remedy}" if remedy else words)


def first_by(score: Tensor, share: float) -> Tensor:
    """Which examples are in the first ``share`` of a ranking, largest first, ``[N]``."""
    chosen = torch.zeros(len(score), dtype=torch.bool)
    count = round(share * len(score))
    chosen[score.argsort(descending=True, stable=True)[:count]] = True
    return chosen
