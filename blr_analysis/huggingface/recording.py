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

MUCH_MEMORY = 2**30  # bytes; the user is warned if checkpoints in memory take more
REPEATED_TYPES = (bool, int, float, str, list, tuple)  # types of settings that a recipe repeats
SPEED_SETTINGS = {"foreach", "fused", "capturable", "differentiable"}  # they change no step
ALMOST_A_STEP = 0.999  # steps; smaller differences are rounding in a fraction of an epoch
LOGGED = ("loo_nll", "loo_accuracy", "test_nll", "test_accuracy")  # a monitor's, for trainers


class RecordedTraining:
    """The base of callbacks that keep a training's checkpoints and its recipe.

    Args:
        checkpoints: those that the user made; None: the callback makes them when training begins.
        structure: the structure of the posterior that is recorded during training, as in
            :class:`Checkpoints`.
    """

    def __init__(
        self, checkpoints: Checkpoints | None = None, *, structure: str | None = None
    ) -> None:
        super().__init__()
        self.structure = structure
        self.checkpoints = checkpoints
        self._user_checkpoints = checkpoints
        self._recipe: Recipe | None = None
        self._rate_factors: dict[int, float] = {}  # learning rate over the initial one, by step

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the training, up to the weights that it ends with.

        None before the end, and if a recipe cannot name the optimizer.
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
        """Prepare the checkpoints, before the first step of a new or a resumed training.

        A model whose weights are divided among processes gets no checkpoints.

        Args:
            steps_done: the steps that an earlier run made, if it is resumed; else 0.
            steps: the steps of the whole training; None: their number is unknown.
            folder: where the checkpoints are written; None: they stay in memory.
        """
        self._recipe = None
        self._rate_factors = {}
        self._forget_earlier_training()
        is_divided = any(is_sharded(parameter) for parameter in model.parameters())
        if is_divided:
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

    def _forget_earlier_training(self) -> None:
        """Let go of the checkpoints that this callback made for an earlier training."""
        earlier = self.checkpoints
        self.checkpoints = None
        if earlier is None or earlier is self._user_checkpoints:
            return
        if earlier.recordings is not None:
            earlier.recordings.recorder.remove()

    def record_rate(self, optimizer: Any, step: int) -> None:
        """Record the learning rate of this step, before it is made."""
        group = unwrap(optimizer).param_groups[0]
        rate = float(group["lr"])
        initial_rate = float(group.get("initial_lr", rate)) or 1.0  # a rate may be 0
        self._rate_factors[step] = rate / initial_rate

    def rate_factors(self, steps: int) -> list[float] | None:
        """The factor of the learning rate at each step; None if a step was not recorded."""
        has_gaps = any(step not in self._rate_factors for step in range(steps))
        if has_gaps:
            return None
        return [self._rate_factors[step] for step in range(steps)]

    def end(self, recipe: Recipe | None) -> None:
        """After the last step, store the recipe and drop the checkpoints that are too many."""
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
    """The recipe of a training, from its optimizer.

    Args:
        optimizer: the recipe gets the settings of its first group that differ from the defaults.
            Settings of further groups become the recipe's ``groups``.
        model: the model that was trained.
        steps, epochs: the length of the training, up to the weights that it ends with.
        batch_size: the number of examples in a step.
        factors: the factor of the learning rate at every step; None: unknown.
        max_grad_norm: the norm to which the gradient of a step was clipped.
        n_data: the number of examples; None: the data are a stream.
        missing: further things that the training did and that a recipe does not repeat.

    Returns:
        The recipe; None if a recipe cannot name the optimizer.

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
    names_another_class = recipe.factory is not type(optimizer)
    return None if names_another_class else recipe


def _settings(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that a recipe repeats, by name; ``lr`` is the initial one."""
    settings: dict[str, Any] = {"lr": float(group.get("initial_lr", group["lr"]))}
    skipped = {"params", "lr"} | SPEED_SETTINGS
    for name, parameter in signature(type(optimizer)).parameters.items():
        value = group.get(name, parameter.default)
        if name not in skipped and isinstance(value, REPEATED_TYPES):
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
    """The names of settings that follow from the batch size, from ``steps=``, or from N."""
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
    """For each further group, its parameters and the settings that differ from the first group's.

    A group without such settings, or without parameters of the model, is left out.
    """
    names = {id(p): bare_name(n) for n, p in model.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = []
    for group in further_groups:
        settings = _settings(optimizer, group)
        changes = {
            name: value for name, value in settings.items() if value != first_settings.get(name)
        }
        members = [names[id(p)] for p in group["params"] if id(p) in names]
        if changes and members:
            groups.append({"params": members, **changes})
    return groups


def _odd_parameters(optimizer: Any, model: nn.Module) -> list[str]:
    """Phrases for what the optimizer does with parameters and a recipe does not repeat."""
    optimized = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    facts = []
    others = [p for identity, p in optimized.items() if identity not in trained]
    if trained - optimized.keys():
        facts.append("parameters that the optimizer does not have")
    if any(p.requires_grad for p in others):
        facts.append("parameters outside of the model")
    if any("max_momentum" in group for group in optimizer.param_groups):
        facts.append("a schedule of the momentum")
    if any("prior_decay" in group for group in optimizer.param_groups):
        facts.append("the prior= of the optimizer")
    return facts


def _odd_number_of_steps(steps: int, epochs: float | None, steps_an_epoch: int) -> list[str]:
    """A phrase if so many epochs have another number of steps, as when batches were dropped."""
    if epochs is None:
        return []
    expected_steps = epochs * steps_an_epoch
    if abs(expected_steps - steps) < ALMOST_A_STEP:
        return []
    return [f"minibatches ({steps:,} steps in {epochs:g} epochs of {steps_an_epoch:,})"]


def factors_of(scheduler: Any, steps: int) -> list[float] | None:
    """The factor by which a scheduler multiplies the learning rate at each step.

    None if the factor is no formula of the step, or differs between groups of parameters.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # a wrapper's own scheduler
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
    """The base of callbacks that let a monitor record a model while it is trained.

    By default the monitor fits a posterior to the present weights; its left-out loss then follows
    the loss on new data. With ``posterior_settings``, the monitor takes the optimizer's posterior,
    which costs no pass over the data and is good enough to rank examples. For sequences it always
    takes the optimizer's posterior, because a fit has no better scale.

    Args:
        monitor: the monitor, whose task has the model that is trained.
        posterior_settings: further arguments of :meth:`blr_analysis.Posterior.from_optimizer`.
    """

    def __init__(self, monitor: Monitor, **posterior_settings: Any) -> None:
        super().__init__()
        self.monitor = monitor
        self.posterior_settings = posterior_settings

    def look(self, optimizer: Any, epoch: int) -> dict[str, float]:
        """Let the monitor record this epoch.

        Returns:
            The losses and accuracies that are not NaN, by name; empty if the epoch is not recorded.
        """

        def optimizers_posterior() -> Posterior:
            return Posterior.from_optimizer(
                optimizer, self.monitor.task.model, **self.posterior_settings
            )

        are_sequences = self.monitor.task.likelihood.is_sequence
        takes_optimizers = bool(self.posterior_settings) or are_sequences
        row = self.monitor(optimizers_posterior if takes_optimizers else None, epoch)
        if not row:
            return {}
        return {name: row[name] for name in LOGGED if not math.isnan(row[name])}
