"""Where a training stops, and what it leaves on the way: the epoch that does best on validation
data, and states at about 1/8, 1/4 and 1/2 of the steps up to there."""

from __future__ import annotations

import math

from torch import nn

from blr_analysis.backprop.loss import evaluated
from blr_analysis.errors import InputError
from blr_analysis.recipe import Recipe
from blr_analysis.snapshots import PARTS, State, state_of, thinned
from blr_analysis.task import Task


def copied(model: nn.Module) -> State:
    """A model's weights and buffers, as they are now."""
    return {name: tensor.detach().clone() for name, tensor in state_of(model).items()}


class Trail:
    """The states of a training at about 1/8, 1/4 and 1/2 of its steps.

    Args:
        steps: how many it makes; None: that is not known before it ends.
    """

    def __init__(self, steps: int | None) -> None:
        self._due = None if steps is None else {max(1, round(part * steps)) for part in PARTS}
        self._states: dict[int, State] = {}

    def look(self, done: int, model: nn.Module) -> None:
        """After this many steps."""
        is_power_of_two = done & (done - 1) == 0
        is_due = is_power_of_two if self._due is None else done in self._due
        if is_due:
            self._states[done] = copied(model)

    def until(self, end: int) -> list[State]:
        """The states up to the step whose weights the training returns."""
        if self._due is not None:
            return list(self._states.values())
        return [self._states[step] for step in thinned(list(self._states), end)]


class Best:
    """The weights of the epoch with the least mean loss on a recipe's validation data."""

    def __init__(self, under: Task, recipe: Recipe) -> None:
        validation = recipe.validation
        if not isinstance(validation, Task):
            likelihood = under.likelihood.plain
            validation = Task(under.model, validation, likelihood=likelihood, forward=under.forward)
        self.task = validation.with_model(under)
        self.patience = recipe.patience or math.inf
        self.nll = math.inf
        self.state: State = {}
        self.step = self.epochs_since = 0

    def look(self, done: int) -> None:
        """After an epoch, at this step; the model is left in eval mode.

        Raises:
            InputError: no validation example counts, or some loss is not finite.
        """
        model = self.task.model.eval()
        nll = evaluated(self.task.quiet, self.task.parameters())[0].nll
        if not math.isfinite(nll):
            raise InputError(f"the mean loss of the recipe's validation= is {nll}: none counts?")
        self.epochs_since += 1
        if nll < self.nll:
            self.nll = nll
            self.state = copied(model)
            self.step = done
            self.epochs_since = 0

    @property
    def gave_up(self) -> bool:
        """Whether ``patience`` epochs brought nothing better."""
        return self.epochs_since >= self.patience
