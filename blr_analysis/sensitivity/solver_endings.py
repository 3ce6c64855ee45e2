"""Whether the trainings of a what-if end at the same loss as the model's own training.

An answer by trainings holds for the model only if they train it as it was trained.

* Whole trainings on the changed data should end at the model's losses of the examples that stay.
  If they do not, whole trainings on the unchanged data should end at the model's losses.
* Short trainings end above the model's loss. They should end between the model's loss and that of
  the checkpoint where the run had made half of its way, counted in learning rate times steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import announce
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.training import trained, whole_data
from blr_analysis.sensitivity.training_errors import losses_at
from blr_analysis.snapshots import PARTS, State
from blr_analysis.task import Task

CHECKING = "what if: training on the unchanged data: does the recipe end where the model did?"


class WholeTrainings:
    """Whether whole trainings on the unchanged data end at the model's training loss.

    They are made once, when an answer first asks for them.
    """

    def __init__(self, task: Task, posterior: Posterior, recipe: Recipe) -> None:
        self.task = task
        self.posterior = posterior
        self.recipe = recipe

    @cached_property
    def note(self) -> str:
        """One line if they end at another loss than the model's; "" if not."""
        has_no_bar = self.recipe.train is not None
        if has_no_bar and self.task.progress is not False:
            announce(CHECKING)
        model_losses = losses_at(self.task, self.posterior.mean)
        return ending_note(
            model_losses, [self._losses(0)], another=lambda further: self._losses(1 + further)
        )

    def _losses(self, seed: int) -> Tensor:
        """The losses of all examples at the end of one training."""
        state = trained(self.task, whole_data(self.task), self.recipe, seed, label=CHECKING)
        return losses_at(self.task, state)


def retraining_note(
    whole_trainings: WholeTrainings, stays: Tensor, states: Sequence[State], *, changed: float
) -> str:
    """One line if the recipe is of another training than the model's; "" if not.

    Trainings on the changed data may end at another loss because the change helps or harms: without
    wrong labels the other examples are fitted better. Only then the unchanged data are trained on.

    Args:
        stays: the indices of examples that are in the data before and after the change.
        states: the weights and buffers at the end of each training on the changed data.
        changed: the share of the data that changed.
    """
    task = whole_trainings.task
    model_losses = losses_at(task, whole_trainings.posterior.mean, stays)
    losses = [losses_at(task, state, stays) for state in states]
    if not ending_note(model_losses, losses, changed=changed):
        return ""
    return whole_trainings.note


class ReplayEndings:
    """Whether short trainings on all data end at a loss that suits the model.

    Args:
        whole_trainings: trainings by the whole recipe.
        seeds: the number of short trainings; a check may take no longer than they do together.
    """

    def __init__(self, whole_trainings: WholeTrainings, seeds: int) -> None:
        self.whole_trainings = whole_trainings
        self.task = whole_trainings.task
        self.posterior = whole_trainings.posterior
        self.recipe = whole_trainings.recipe
        self.seeds = seeds
        self.losses: list[Tensor] = []  # training losses at the end of each short training

    def add(self, state: State) -> None:
        """Add the end of one more short training."""
        self.losses.append(losses_at(self.task, state))

    def note(self, short: Recipe) -> str:
        """One line if short trainings, by the recipe ``short``, end at an unsuitable loss; else "".

        It is a loss below the model's, or above that of the checkpoint halfway. Without
        checkpoints, a whole training is compared with the model instead.
        """
        if self.posterior.ending:
            return self.posterior.ending
        model_losses = losses_at(self.task, self.posterior.mean)
        note = ending_note(model_losses, self.losses)
        mean_ending = float(torch.stack(self.losses).double().mean())
        was_shortened = short is not self.recipe
        ends_below = mean_ending < float(model_losses.mean())
        if not note or not was_shortened or ends_below:
            return note
        if len(self.posterior.earlier) < len(PARTS):
            return self._note_of_whole_trainings(short)
        halfway = self.posterior.earlier[self.recipe.halfway(PARTS)]
        halfway_losses = losses_at(self.task.holding(halfway.buffers), halfway.mean)
        ends_above_halfway = mean_ending > float(halfway_losses.mean())
        if ends_above_halfway and ending_note(halfway_losses, self.losses):
            return note
        return ""

    def _note_of_whole_trainings(self, short: Recipe) -> str:
        """The note of whole trainings, if one takes no longer than the short ones.

        The short trainings are two for each seed, with and without the change.
        """
        epochs_of_short_trainings = 2 * short.epochs * self.seeds
        if self.recipe.epochs > epochs_of_short_trainings:
            return ""
        return self.whole_trainings.note
