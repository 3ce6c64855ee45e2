"""What a training run knows and its optimizer's state does not: names, sizes, a recipe.

Callbacks take it down while a run goes on.
"""

from __future__ import annotations

import copy
import os
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.errors import InputError
from blr_analysis.files import Folder
from blr_analysis.files.headers import read_record
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.capture import unwrap
from blr_analysis.ranks import is_sharded
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity import Monitor

RUN = "_run"  # in the output folder, what callbacks keep; not pushed to a hub, by its first letter
TOLD = "recipe.json"
PLAIN = (bool, int, float, str, list, tuple)
SPEED = {"foreach", "fused", "capturable", "differentiable"}  # settings that change no step
LOGGED = ("loo_nll", "loo_accuracy", "test_nll", "test_accuracy")  # of a monitor, for trainers


class Kept:
    """What callbacks keep of a training: its checkpoints, and the recipe of the weights it ends
    with."""

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        super().__init__()
        self.checkpoints = self._given = checkpoints
        self._told: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The training up to the weights that were kept; None of an optimizer without a name."""
        recipe = copy.copy(self._told)
        if recipe is not None and self.checkpoints is not None:
            recipe.initial = self.checkpoints.first
        return recipe

    def begin(self, model: nn.Module, optimizer: Any, done: int, **how: Any) -> None:
        """Before the first step, or the first that is resumed; of divided weights none are kept."""
        self._told, self.checkpoints = None, None
        if not any(map(is_sharded, model.parameters())):
            self.checkpoints = self._given or Checkpoints(model, optimizer=unwrap(optimizer), **how)
            self.checkpoints.begin(done)

    def end(self, recipe: Recipe | None) -> None:
        """After the last step."""
        self._told = recipe
        if self.checkpoints is not None:
            self.checkpoints.settle()


def recipe_of(
    optimizer: Any,
    *,
    epochs: float,
    batch_size: int,
    schedule: str | None = None,
    n_data: int | None = None,
) -> Recipe | None:
    """The recipe of a training, its settings read off its optimizer, which they are a further
    argument of where they are not its default; None of an optimizer that recipes have no name for.

    >>> import torch
    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.01, weight_decay=0.1)
    >>> recipe_of(optimizer, epochs=3, batch_size=8, schedule="linear")
    Recipe('adamw', lr=0.01, epochs=3, batch_size=8, schedule='linear', weight_decay=0.1)
    """
    own = unwrap(optimizer)
    group = own.param_groups[0]
    left_out, more = {"params", "lr", *SPEED}, {}
    if steps := getattr(own, "steps", None):  # by which these are set
        left_out, more = left_out | {"beta2", "clip_radius"}, {"steps": steps}
    if n_data == group.get("ess"):
        left_out |= {"ess"}
    for name, parameter in signature(type(own)).parameters.items():
        value = group.get(name, parameter.default)
        if name not in left_out and value != parameter.default and isinstance(value, PLAIN):
            more[name] = value
    told = {"lr": float(group.get("initial_lr", group["lr"])), "schedule": schedule}
    told |= {"epochs": max(1, round(epochs)), "batch_size": batch_size}
    try:
        return Recipe(type(own).__name__.lower(), **told, **more)
    except InputError:
        return None


def length_of(loader: Any) -> int | None:
    """How many examples a loader goes through; None of a stream."""
    data: Any = getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else None


def training_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``checkpoints`` and ``recipe`` for the Task of a model that a trainer left in this folder:
    its output, or one of the ``checkpoint-*`` there. Nothing that is pickled is read.

    The recipe is that of :class:`~blr_analysis.huggingface.CheckpointsCallback`, with the first
    weights where these are beside it.
    """
    place = Path(folder).absolute()
    home = place.parent if place.name.startswith("checkpoint-") else place
    beside = [*home.glob("checkpoint-*")]
    found: dict[str, Any] = {}
    if [*(home / RUN).glob("step-*.safetensors")]:
        found["checkpoints"] = home / RUN
    elif beside and all([*one.glob("*.safetensors")] for one in beside):
        found["checkpoints"] = home
    told = next((p for p in (place / TOLD, home / RUN / TOLD) if p.is_file()), None)
    if told is not None:
        first = home / RUN / "step-00000000.safetensors"
        initial = Folder.open(first).tensors() if first.is_file() else None
        found["recipe"] = Recipe(**read_record(told), initial=initial)
    return found


class Watching:
    """A monitor that looks at the model while a trainer trains it."""

    def __init__(self, monitor: Monitor, **known: Any) -> None:
        super().__init__()
        self.monitor, self.known = monitor, known

    def look(self, optimizer: Any, epoch: int) -> dict[str, float]:
        """Losses and accuracies after this epoch; nothing where it is not due."""
        model = self.monitor.task.model
        row = self.monitor(lambda: Posterior.from_optimizer(optimizer, model, **self.known), epoch)
        return {k: row[k] for k in LOGGED if row[k] == row[k]} if row else {}
