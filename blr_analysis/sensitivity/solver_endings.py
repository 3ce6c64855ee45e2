"""Whether the trainings of a what-if end at the same loss as the model's own training.

An answer by trainings holds for the model only if they train it as it was trained.

* Whole trainings on the changed data should end at the model's losses of the examples that stay.
* Short trainings end above the model's loss. They should end between the model's loss and that of
  the checkpoint where the run had made half of its way, counted in learning rate times steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blr_analysis.posterior.posterior import Posterior
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.training import trained, whole_data
from blr_analysis.sensitivity.training_errors import losses_at
from blr_analysis.snapshots import PARTS, State
from blr_analysis.task import Task

CHECKING = "what if: does the recipe end where the model did?"


def retraining_note(
    task: Task,
    posterior: Posterior,
    stays: Tensor,
    states: Sequence[State],
    *,
    changed: float,
    training: Callable[[int], State],
) -> str:
    """One line if whole trainings end at another loss than the model's; "" if not.

    Args:
        stays: the indices of examples that are in the data before and after the change.
        states: the weights and buffers at the end of each training.
        changed: the share of the data that changed.
        training: seed → the weights and buffers at the end of one more training.
    """
    return ending_note(
        losses_at(task, posterior.mean, stays),
        [losses_at(task, state, stays) for state in states],
        changed=changed,
        another=lambda further: losses_at(task, training(len(states) + further), stays),
    )


class ReplayEndings:
    """Whether short trainings on all data end at a loss that suits the model.

    Args:
        recipe: the whole recipe.
        seeds: the number of short trainings; a check may take no longer than they do together.
    """

    def __init__(self, task: Task, posterior: Posterior, recipe: Recipe, seeds: int) -> None:
        self.task = task
        self.posterior = posterior
        self.recipe = recipe
        self.seeds = seeds
        self.losses: list[Tensor] = []  # training losses at the end of each short training
        self._whole_note: str | None = None

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
            return self._note_of_a_whole_training(model_losses, short)
        halfway = self.posterior.earlier[self.recipe.halfway(PARTS)]
        halfway_losses = losses_at(self.task.holding(halfway.buffers), halfway.mean)
        ends_above_halfway = mean_ending > float(halfway_losses.mean())
        if ends_above_halfway and ending_note(halfway_losses, self.losses):
            return note
        return ""

    def _note_of_a_whole_training(self, model_losses: Tensor, short: Recipe) -> str:
        """The note of one training by the whole recipe, if it takes no longer than the short ones.

        The short trainings are two for each seed, with and without the change.
        """
        epochs_of_short_trainings = 2 * short.epochs * self.seeds
        if self.recipe.epochs > epochs_of_short_trainings:
            return ""

        def ending(seed: int) -> Tensor:
            state = trained(self.task, whole_data(self.task), self.recipe, seed, label=CHECKING)
            return losses_at(self.task, state)

        if self._whole_note is None:
            self._whole_note = ending_note(
                model_losses, [ending(0)], another=lambda further: ending(1 + further)
            )
        return self._whole_note
