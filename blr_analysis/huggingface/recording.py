"""What a training run knows and its optimizer's state does not: names, sizes, a recipe.

Callbacks take it down while a run goes on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.checks import bare_name
from blr_analysis.errors import InputError
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.capture import unwrap
from blr_analysis.ranks import is_sharded
from blr_analysis.recipe import Recipe
from blr_analysis.schedules import described
from blr_analysis.sensitivity import Monitor

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
        self._factors: dict[int, float] = {}  # of the rate, by step

    @property
    def recipe(self) -> Recipe | None:
        """The training up to the weights that were kept; None of an optimizer without a name."""
        recipe = copy.copy(self._told)
        if recipe is not None and self.checkpoints is not None:
            recipe.initial = self.checkpoints.first
        return recipe

    def begin(self, model: nn.Module, optimizer: Any, done: int, **how: Any) -> None:
        """Before the first step, or the first that is resumed; of divided weights none are kept."""
        self._told, self.checkpoints, self._factors = None, None, {}
        if not any(map(is_sharded, model.parameters())):
            self.checkpoints = self._given or Checkpoints(model, optimizer=unwrap(optimizer), **how)
            self.checkpoints.begin(done)

    def look_at_rate(self, optimizer: Any, step: int) -> None:
        """Before a step, of which so many were made."""
        group = unwrap(optimizer).param_groups[0]
        initial = float(group.get("initial_lr", group["lr"])) or 1.0  # of a rate that is 0
        self._factors[step] = float(group["lr"]) / initial

    def factors(self, steps: int) -> list[float] | None:
        """Of the rate, at each of so many steps; None where some were not seen."""
        is_whole = all(step in self._factors for step in range(steps))
        return [self._factors[step] for step in range(steps)] if is_whole else None

    def end(self, recipe: Recipe | None) -> None:
        """After the last step."""
        self._told = recipe
        if self.checkpoints is not None:
            self.checkpoints.settle()


def recipe_of(
    optimizer: Any,
    model: nn.Module,
    *,
    steps: int,
    batch_size: int,
    factors: Sequence[float] | None,
    epochs: float | None = None,
    max_grad_norm: float | None = None,
    n_data: int | None = None,
    missing: Sequence[str] = (),
) -> Recipe | None:
    """The recipe of a training, read off its optimizer; None of one that recipes have no name for.

    Args:
        optimizer, model: by what, and what was trained. Settings that are not the optimizer's
            defaults become the recipe's, those of further groups the recipe's ``groups``.
        steps, epochs: of the training up to the weights that were kept.
        batch_size: examples of a step.
        factors: of the rate, at every step; None: they are not known.
        max_grad_norm: to which the gradients of a step were clipped.
        n_data: how many examples; None of a stream.
        missing: what else the training did.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    >>> factors = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    >>> recipe_of(optimizer, model, steps=6, batch_size=8, factors=factors[2:], n_data=12)
    Recipe('adamw', lr=0.01, epochs=3, batch_size=8, schedule='linear', weight_decay=0.1)
    """
    own = unwrap(optimizer)
    base, *further = [_settings(own, group) for group in own.param_groups]
    ignored = _set_by_others(own, n_data)
    defaults = signature(type(own)).parameters
    options = {
        name: value
        for name, value in base.items()
        if name not in ignored and (name == "lr" or value != defaults[name].default)
    }
    if planned_steps := getattr(own, "steps", None):
        options["steps"] = planned_steps
    schedule, warmup = (None, 0.0) if factors is None else described(factors)
    steps_an_epoch = None if n_data is None else math.ceil(n_data / batch_size)
    try:
        recipe = Recipe(
            type(own).__name__.lower(),
            epochs=epochs if steps_an_epoch is None else steps / steps_an_epoch,
            batch_size=batch_size,
            schedule=schedule,
            warmup=warmup,
            groups=_groups(own, model, base, further),
            max_grad_norm=max_grad_norm,
            missing=[*missing, *_untold(own, model), *_unlike(steps, epochs, steps_an_epoch)],
            **options,
        )
    except InputError:
        return None
    is_its_namesake = recipe.factory is not type(own)
    return None if is_its_namesake else recipe


def _settings(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The rate of a group at the start, and its other settings."""
    settings: dict[str, Any] = {"lr": float(group.get("initial_lr", group["lr"]))}
    for name, parameter in signature(type(optimizer)).parameters.items():
        value = group.get(name, parameter.default)
        if name not in ("params", "lr", *SPEED) and isinstance(value, PLAIN):
            settings[name] = value
    return settings


def _set_by_others(optimizer: Any, n_data: int | None) -> set[str]:
    """Settings that follow from the number of steps and of examples."""
    names = {"beta2", "clip_radius"} if getattr(optimizer, "steps", None) else set()
    if optimizer.param_groups[0].get("ess") == n_data:
        names.add("ess")
    return names


def _groups(
    optimizer: Any, model: nn.Module, base: Mapping[str, Any], further: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The parameters of the groups behind the first, by name, and in what they differ from it."""
    names = {id(p): bare_name(n) for n, p in model.named_parameters() if p.requires_grad}
    found: list[dict[str, Any]] = []
    for group, settings in zip(optimizer.param_groups[1:], further, strict=True):
        other = {name: value for name, value in settings.items() if value != base.get(name)}
        members = [names[id(p)] for p in group["params"] if id(p) in names]
        if other and members:
            found.append({"params": members, **other})
    return found


def _untold(optimizer: Any, model: nn.Module) -> list[str]:
    """What a recipe does not repeat of how an optimizer treats a model's parameters."""
    by_optimizer = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    found = []
    if trained - by_optimizer.keys():
        found.append("parameters that the optimizer does not have")
    if any(p.requires_grad for key, p in by_optimizer.items() if key not in trained):
        found.append("parameters outside of the model")
    if any("max_momentum" in group for group in optimizer.param_groups):
        found.append("a schedule of the momentum")
    return found


def _unlike(steps: int, epochs: float | None, steps_an_epoch: int | None) -> list[str]:
    """A number of steps that is not that of so many epochs: minibatches that were dropped."""
    if epochs is None or steps_an_epoch is None or abs(epochs * steps_an_epoch - steps) < 0.999:
        return []
    return [f"minibatches ({steps:,} steps in {epochs:g} epochs of {steps_an_epoch:,})"]


def factors_of(scheduler: Any, steps: int) -> list[float] | None:
    """The factor of the rate at each of so many steps; None of a schedule that is no formula of
    the step, or not one for all parameters."""
    own = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(own, LambdaLR):
        return None
    each = [[float(formula(k)) for k in range(steps)] for formula in own.lr_lambdas]
    return each[0] if all(factors == each[0] for factors in each) else None


def length_of(loader: Any) -> int | None:
    """How many examples a loader goes through; None of a stream."""
    data: Any = getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else None


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
