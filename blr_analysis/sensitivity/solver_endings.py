"""Whether the trainings of a what-if end where the model's own training ended.

An answer by trainings holds for the model as far as they are its training. Of whole trainings on
the changed data the examples that stay are compared; of short ones, which end above the model's
loss, the checkpoint where the run had made half of its rate × steps.
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
    """One line where whole trainings ended elsewhere than the model; "" elsewhere.

    Args:
        stays: the examples that are in both data.
        states: where the trainings ended.
        changed: the share of the data that is not the same.
        training: one more of them, by its seed.
    """
    return ending_note(
        losses_at(task, posterior.mean, stays),
        [losses_at(task, state, stays) for state in states],
        changed=changed,
        another=lambda: losses_at(task, training(len(states)), stays),
    )


class ReplayEndings:
    """The same of short trainings on all data.

    Args:
        recipe: the whole one.
        seeds: of the short trainings, whose cost bounds that of a whole one.
    """

    def __init__(self, task: Task, posterior: Posterior, recipe: Recipe, seeds: int) -> None:
        self.task = task
        self.posterior = posterior
        self.recipe = recipe
        self.seeds = seeds
        self.losses: list[Tensor] = []  # training losses where short trainings ended
        self._whole_note: str | None = None

    def add(self, state: State) -> None:
        """One more short training ended here."""
        self.losses.append(losses_at(self.task, state))

    def note(self, short: Recipe) -> str:
        """None may end below the model's own loss, nor above that of the checkpoint where the run
        had made half of its rate × steps."""
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
        ends_above = mean_ending > float(halfway_losses.mean())
        return note if ends_above and ending_note(halfway_losses, self.losses) else ""

    def _note_of_a_whole_training(self, model_losses: Tensor, short: Recipe) -> str:
        """That of the whole recipe, where it costs no more than the short trainings did."""
        if self.recipe.epochs > 2 * short.epochs * self.seeds:
            return ""

        def ending(seed: int) -> Tensor:
            state = trained(self.task, whole_data(self.task), self.recipe, seed, label=CHECKING)
            return losses_at(self.task, state)

        if self._whole_note is None:
            self._whole_note = ending_note(model_losses, [ending(0)], another=lambda: ending(1))
        return self._whole_note
