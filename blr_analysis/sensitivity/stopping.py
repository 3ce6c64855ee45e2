"""Early stopping of a training by a recipe, and the states that it passes on its way.

The training returns the weights of the epoch that is best on validation data, and the states at
about 1/8, 1/4 and 1/2 of the steps up to there.
"""

from __future__ import annotations

import math

from torch import nn

from blr_analysis.backprop.loss import evaluated
from blr_analysis.errors import InputError
from blr_analysis.recipe import Recipe
from blr_analysis.snapshots import PARTS, State, state_of, thinned
from blr_analysis.task import Task


def copied(model: nn.Module) -> State:
    """A copy of a model's weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in state_of(model).items()}


class Trail:
    """The states of a training at about 1/8, 1/4 and 1/2 of its steps.

    Args:
        steps: the number of steps of the training; None: it is not known before the end.
    """

    def __init__(self, steps: int | None) -> None:
        self._due = None if steps is None else {max(1, round(part * steps)) for part in PARTS}
        self._states: dict[int, State] = {}

    def look(self, step: int, model: nn.Module) -> None:
        """Store the model's state after this step, if it is one of those wanted.

        Where the number of steps is not known, those are the powers of two.
        """
        is_power_of_two = step & (step - 1) == 0
        is_due = is_power_of_two if self._due is None else step in self._due
        if is_due:
            self._states[step] = copied(model)

    def until(self, end: int) -> list[State]:
        """The stored states up to step ``end``, whose weights the training returns."""
        if self._due is not None:
            return list(self._states.values())
        return [self._states[step] for step in thinned(list(self._states), end)]


class Best:
    """The weights of the epoch with the smallest mean loss on a recipe's validation data.

    Args:
        trained: the task whose model is trained.
        recipe: has ``validation``, and perhaps ``patience``.
    """

    def __init__(self, trained: Task, recipe: Recipe) -> None:
        validation = recipe.validation
        if not isinstance(validation, Task):
            validation = Task(
                trained.model,
                validation,
                likelihood=trained.likelihood.plain,
                forward=trained.forward,
            )
        self.task = validation.with_model(trained)
        self.patience = recipe.patience or math.inf
        self.nll = math.inf
        self.state: State = {}
        self.step = 0
        self.epochs_since = 0

    def look(self, step: int) -> None:
        """Evaluate the model after the epoch that ended with this step; leave it in eval mode.

        Raises:
            InputError: no validation example counts, or some loss is not finite.
        """
        model = self.task.model.eval()
        nll = evaluated(self.task.quiet, self.task.parameters())[0].nll
        if not math.isfinite(nll):
            raise InputError(
                f"the mean loss of the recipe's validation= is {nll}: are all its labels ignored?"
            )
        self.epochs_since += 1
        if nll < self.nll:
            self.nll = nll
            self.state = copied(model)
            self.step = step
            self.epochs_since = 0

    @property
    def gave_up(self) -> bool:
        """Whether the last ``patience`` epochs were no better than the best."""
        return self.epochs_since >= self.patience
