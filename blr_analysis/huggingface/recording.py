"""What the callbacks of any trainer record: checkpoints, the recipe, and a monitor's losses."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
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
from blr_analysis.schedules import schedule_of_factors
from blr_analysis.sensitivity import Monitor

MUCH_MEMORY = 2**30  # bytes; a warning says so if checkpoints in memory take more
PLAIN = (bool, int, float, str, list, tuple)  # types of settings that a recipe repeats
SPEED = {"foreach", "fused", "capturable", "differentiable"}  # settings that change no step
ONE_STEP = 0.999  # less than this is rounding in a fraction of an epoch
LOGGED = ("loo_nll", "loo_accuracy", "test_nll", "test_accuracy")  # of a monitor, for trainers


class RecordedTraining:
    """The base of callbacks that keep a training's checkpoints and its recipe.

    Args:
        checkpoints: made by the user; None: the callback makes them when training begins.
        structure: of the posterior that is recorded meanwhile, as in :class:`Checkpoints`.
    """

    def __init__(
        self, checkpoints: Checkpoints | None = None, *, structure: str | None = None
    ) -> None:
        super().__init__()
        self.structure = structure
        self.checkpoints = checkpoints
        self._user_checkpoints = checkpoints
        self._recipe: Recipe | None = None
        self._rate_factors: dict[int, float] = {}  # by step

    @property
    def recipe(self) -> Recipe | None:
        """The training up to the weights that it ends with.

        None before its end, and for an optimizer that recipes have no name for.
        """
        if self._recipe is None:
            return None
        recipe = copy.copy(self._recipe)
        if self.checkpoints is not None:
            recipe.initial = self.checkpoints.first
        return recipe

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        steps_done: int,
        *,
        steps: int | None,
        folder: Path | None = None,
    ) -> None:
        """Prepare the checkpoints, before the first step or the first after a resumption.

        None are kept of a model whose weights are divided among processes.

        Args:
            steps_done: steps of an earlier run that is resumed; else 0.
            steps: of the whole training; None: their number is unknown.
            folder: where the checkpoints are written; None: they stay in memory.
        """
        self._recipe = None
        self._rate_factors = {}
        self.checkpoints = None
        if any(is_sharded(parameter) for parameter in model.parameters()):
            return
        self.checkpoints = self._user_checkpoints or Checkpoints(
            model,
            steps=steps,
            folder=folder,
            optimizer=unwrap(optimizer),
            structure=self.structure,
        )
        self.checkpoints.begin(steps_done)
        size = self.checkpoints.bytes_in_memory
        if self.checkpoints.folder is None and size > MUCH_MEMORY:
            warnings.warn(
                f"checkpoints stay in memory, up to {size / 2**30:.1f} GiB: save_strategy='steps' "
                "writes them, or Checkpoints(model, folder=...)",
                stacklevel=2,
            )

    def record_rate(self, optimizer: Any, step: int) -> None:
        """Record the learning rate of this step, before it is made."""
        group = unwrap(optimizer).param_groups[0]
        rate = float(group["lr"])
        initial_rate = float(group.get("initial_lr", rate)) or 1.0  # a rate may be 0
        self._rate_factors[step] = rate / initial_rate

    def rate_factors(self, steps: int) -> list[float] | None:
        """The factor of the learning rate at each step; None where a step was not recorded."""
        if any(step not in self._rate_factors for step in range(steps)):
            return None
        return [self._rate_factors[step] for step in range(steps)]

    def end(self, recipe: Recipe | None) -> None:
        """Keep the recipe, after the last step, and drop the checkpoints in excess."""
        self._recipe = recipe
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
    """The recipe of a training, read off its optimizer.

    Args:
        optimizer: its settings that differ from the defaults become the recipe's. Those of its
            further groups become the recipe's ``groups``.
        model: the model that was trained.
        steps, epochs: the length of the training, up to the weights that it ends with.
        batch_size: examples of a step.
        factors: the factor of the learning rate at every step; None: unknown.
        max_grad_norm: the norm to which the gradient of a step was clipped.
        n_data: the number of examples; None: they are a stream.
        missing: further things that the training did and a recipe does not repeat.

    Returns:
        The recipe; None for an optimizer that recipes have no name for.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    >>> factors = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    >>> recipe_of(optimizer, model, steps=6, batch_size=8, factors=factors[2:], n_data=12)
    Recipe('adamw', lr=0.01, epochs=3, batch_size=8, schedule='linear', weight_decay=0.1)
    """
    optimizer = unwrap(optimizer)
    first_group, *further_groups = optimizer.param_groups
    settings = _settings(optimizer, first_group)
    schedule = None
    warmup = 0.0
    if factors is not None:
        schedule, warmup = schedule_of_factors(factors)
    not_repeated = [*missing, *_odd_parameters(optimizer, model)]
    if n_data is not None:
        steps_an_epoch = math.ceil(n_data / batch_size)
        not_repeated += _odd_number_of_steps(steps, epochs, steps_an_epoch)
        epochs = steps / steps_an_epoch
    try:
        recipe = Recipe(
            type(optimizer).__name__.lower(),
            epochs=epochs,
            batch_size=batch_size,
            schedule=schedule,
            warmup=warmup,
            groups=_groups(optimizer, model, settings, further_groups),
            max_grad_norm=max_grad_norm,
            missing=not_repeated,
            **_options(optimizer, settings, n_data),
        )
    except InputError:
        return None
    is_another_of_this_name = recipe.factory is not type(optimizer)
    return None if is_another_of_this_name else recipe


def _settings(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate of a group at the start, and its other settings, by name."""
    settings: dict[str, Any] = {"lr": float(group.get("initial_lr", group["lr"]))}
    for name, parameter in signature(type(optimizer)).parameters.items():
        value = group.get(name, parameter.default)
        if name not in ("params", "lr", *SPEED) and isinstance(value, PLAIN):
            settings[name] = value
    return settings


def _options(optimizer: Any, settings: Mapping[str, Any], n_data: int | None) -> dict[str, Any]:
    """The learning rate, and the settings that differ from the optimizer's defaults."""
    defaults = signature(type(optimizer)).parameters
    derived = _derived_settings(optimizer, n_data)
    options = {
        name: value
        for name, value in settings.items()
        if name not in derived and (name == "lr" or value != defaults[name].default)
    }
    planned_steps = getattr(optimizer, "steps", None)
    if planned_steps:
        options["steps"] = planned_steps
    return options


def _derived_settings(optimizer: Any, n_data: int | None) -> set[str]:
    """The names of settings that follow from the numbers of steps, of examples, and of a step's."""
    names = {"batch_size"}
    if getattr(optimizer, "steps", None):
        names |= {"beta2", "clip_radius"}
    if optimizer.param_groups[0].get("ess") == n_data:
        names.add("ess")
    return names


def _groups(
    optimizer: Any,
    model: nn.Module,
    first_settings: Mapping[str, Any],
    further_groups: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """For each further group: its parameters by name, and the settings that the first lacks."""
    names = {id(p): bare_name(n) for n, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for group in further_groups:
        settings = _settings(optimizer, group)
        changes = {n: value for n, value in settings.items() if value != first_settings.get(n)}
        members = [names[id(p)] for p in group["params"] if id(p) in names]
        if changes and members:
            groups.append({"params": members, **changes})
    return groups


def _odd_parameters(optimizer: Any, model: nn.Module) -> list[str]:
    """What an optimizer does with parameters and a recipe does not repeat, a phrase each."""
    optimized = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    facts = []
    if trained - optimized.keys():
        facts.append("parameters that the optimizer does not have")
    if any(p.requires_grad for key, p in optimized.items() if key not in trained):
        facts.append("parameters outside of the model")
    if any("max_momentum" in group for group in optimizer.param_groups):
        facts.append("a schedule of the momentum")
    if any("prior_decay" in group for group in optimizer.param_groups):
        facts.append("the prior= of the optimizer")
    return facts


def _odd_number_of_steps(steps: int, epochs: float | None, steps_an_epoch: int) -> list[str]:
    """A phrase where the steps are not those of so many epochs: minibatches were dropped."""
    if epochs is None:
        return []
    expected_steps = epochs * steps_an_epoch
    if abs(expected_steps - steps) < ONE_STEP:
        return []
    return [f"minibatches ({steps:,} steps in {epochs:g} epochs of {steps_an_epoch:,})"]


def factors_of(scheduler: Any, steps: int) -> list[float] | None:
    """The factor by which a scheduler multiplies the learning rate at each step.

    None where it is no formula of the step, or differs between groups of parameters.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(scheduler, LambdaLR):
        return None
    factors_by_group = [
        [float(formula(step)) for step in range(steps)] for formula in scheduler.lr_lambdas
    ]
    first = factors_by_group[0]
    return first if all(factors == first for factors in factors_by_group) else None


def length_of(loader: Any) -> int | None:
    """The number of examples of a loader's data; None for a stream."""
    data: Any = getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else None


class MonitoredTraining:
    """The base of callbacks that let a monitor look at the model while it is trained.

    The monitor fits the posterior of the moment itself: its estimate follows the loss on new data.
    With settings of a posterior it looks at the optimizer's, which costs no pass over the data and
    ranks examples; so it does of sequences, for which a fit has no better scale.

    Args:
        posterior_settings: further arguments of :meth:`blr_analysis.Posterior.from_optimizer`.
    """

    def __init__(self, monitor: Monitor, **posterior_settings: Any) -> None:
        super().__init__()
        self.monitor = monitor
        self.posterior_settings = posterior_settings

    def look(self, optimizer: Any, epoch: int) -> dict[str, float]:
        """The monitor's losses and accuracies after this epoch, by name; empty if it is not due."""

        def posterior() -> Posterior:
            return Posterior.from_optimizer(
                optimizer, self.monitor.task.model, **self.posterior_settings
            )

        are_sequences = self.monitor.task.likelihood.is_sequence
        takes_optimizers = bool(self.posterior_settings) or are_sequences
        row = self.monitor(posterior if takes_optimizers else None, epoch)
        if not row:
            return {}
        return {name: row[name] for name in LOGGED if not math.isnan(row[name])}
