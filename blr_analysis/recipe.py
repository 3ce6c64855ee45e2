"""How a model was trained: optimizer, rate, epochs, minibatches, and where it began.

    rate(k) = lr · schedule(k / steps)

A run of K₀ epochs is shortened to K with the same optimizer and half of its rate × steps: a cosine
that falls from lr · (mean of the run's schedule) · K₀ / K.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from blr_analysis.checks import bare_name, instance, one_of, positive_int, positive_number
from blr_analysis.errors import InputError, told_as
from blr_analysis.likelihoods.reduction import WORDS as REDUCTIONS
from blr_analysis.modes import WORDS as MODES
from blr_analysis.modes import Mode
from blr_analysis.schedules import Schedule, checked_schedule, factor_at

POINTS = 1000  # a schedule's mean is over so many points
OPTIMIZERS: dict[str, Callable[..., Any]] = {  # by name; learning_rule.optim adds its own
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
}
SETTINGS = (
    "lr",
    "epochs",
    "batch_size",
    "schedule",
    "schedule_epochs",
    "warmup",
    "groups",
    "max_grad_norm",
    "patience",
    "reduction",
    "mode",
    "missing",
)
UNSET: tuple[Any, ...] = (None, 0.0, [])  # values of settings that were left at their default
Augment = Callable[[Any], Any] | Dataset[Any]
Train = Callable[[Any, int], "nn.Module | Mapping[str, Tensor]"]
UNKNOWN = "the recipe of the training is unknown, and a default one gives rough answers"
MOST_SHOWN = 3  # entries of a list in a repr


class Recipe:
    """How a model was trained, for its :class:`~blr_analysis.Task`.

    Args:
        optimizer: the name of an optimizer of ``torch.optim`` or of this package ("ivon", "vogn",
            …), a class, or a function of the parameters that makes one.
        lr: the learning rate at the start; a function of the parameters sets its own.
        epochs: the epoch whose weights were kept; 2.5 is the middle of the third.
        batch_size: examples in a step of the optimizer.
        schedule: how the learning rate changes: None (constant), "cosine" or "linear" down to 0,
            or points (part of the steps, factor of ``lr``) with straight lines between them.
        warmup: the share of the steps in which the rate first rises from 0 to ``lr``.
        groups: parameters with separate settings, as torch's optimizers take them, by name or by
            pattern: ``[{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}]``.
        max_grad_norm: the norm to which all gradients of a step, taken together, are clipped.
        initial: the state dict of the first weights, or of the model that was fine-tuned; None:
            first weights are drawn anew for each training.
        reduction: how the losses of a minibatch were reduced, if not as in the task's loss: "mean",
            "sum", "entries" (a mean over all outputs of all examples, as of ``nn.MSELoss``) or
            "weights" (Σ_i w_i ℓ_i / Σ_i w_i of a task with weights). None: a loss of ``torch.nn``
            has its own ``reduction``; any other loss is averaged over examples, or over the tokens
            of sequences that count.
        mode: the mode of the modules in training, if it was not that of the task's model: "train",
            "eval", or a function of the model that is called after ``model.train()``. None: in a
            model that was given in eval mode as a whole, all modules train except norms with frozen
            parameters.
        augment: how training changed its inputs at random; the task's data stay unchanged. A
            function of a minibatch's inputs, or a data set (or its loader) of the same examples in
            the same order, which changes an example whenever it is read. A task with more examples
            needs the function.
        validation: the data by which the training stopped early, as a :class:`~blr_analysis.Task`
            takes data, or a Task. The weights with the least loss on these data are kept, of at
            most ``epochs`` epochs.
        patience: the number of epochs without a smaller loss after which the training stops.
        schedule_epochs: the epochs that the schedule was made for, if the training ended earlier:
            100 for a cosine of 100 epochs that was stopped at the 40th.
        train: your own training, ``train(data, seed)`` -> model or state dict, in place of all the
            arguments above. ``data`` is a data set of examples as the task's data give them, with
            the changes of the question: it has a length and an index, and no other attributes.
            What the training changes at random, and its validation data, belong into the function.
        missing: what else the training did, in words. Answers that use the recipe are then rough.
        options: further settings of the optimizer (``weight_decay``, ``momentum``, ``betas``, …);
            this package's optimizers get the number of examples as ``ess``.

    Raises:
        InputError: an unknown optimizer, settings that it does not take, numbers out of range.

    Example:
        >>> recipe = Recipe("sgd", lr=0.1, momentum=0.9, epochs=20, batch_size=32)
        >>> recipe, recipe.shortened(8)
        (Recipe('sgd', lr=0.1, epochs=20, batch_size=32, momentum=0.9), Recipe('sgd', lr=0.25, \
epochs=8, batch_size=32, schedule='cosine', momentum=0.9))
    """

    def __init__(
        self,
        optimizer: str | Callable[..., Any] = "adamw",
        *,
        lr: float | None = None,
        epochs: float | None = None,
        batch_size: int | None = None,
        schedule: Schedule = None,
        warmup: float = 0.0,
        groups: Iterable[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        initial: Mapping[str, Tensor] | None = None,
        reduction: str | None = None,
        mode: Mode | None = None,
        augment: Augment | None = None,
        validation: Any = None,
        patience: int | None = None,
        schedule_epochs: int | None = None,
        train: Train | None = None,
        missing: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.optimizer = optimizer
        self.lr = lr
        self.options = options
        self.epochs: float = 0
        self.batch_size = 0
        self.schedule = checked_schedule(schedule, warmup)
        self.schedule_epochs = schedule_epochs
        self.warmup = float(warmup)
        self.factor = 1.0  # that all rates are multiplied by
        self.groups = _checked_groups(groups)
        self.max_grad_norm = max_grad_norm
        self.initial = initial
        self.reduction = reduction
        self.mode = mode
        self.augment = augment
        self.validation = validation
        self.patience = patience
        self.train = train
        self.missing = [missing] if isinstance(missing, str) else list(missing)
        self.known = not self.missing  # whether the recipe describes the whole training
        if train is not None:
            self._check_own_training()
        else:
            self._set_sizes(epochs, batch_size)
            self._check()

    def _check_own_training(self) -> None:
        """Raise unless ``train`` is a function, and nothing else is set."""
        instance("train", self.train, Callable, "a function (data, seed) -> model or state dict")
        if self.augment is not None or self.validation is not None:
            raise InputError("train= is the whole training: leave augment= and validation= out")

    def _set_sizes(self, epochs: float | None, batch_size: int | None) -> None:
        """Check and set the number of epochs and the batch size."""
        if epochs is None or batch_size is None:
            raise InputError("a recipe needs epochs= and batch_size=, or train=")
        number = positive_number("epochs", epochs)
        self.epochs = int(number) if number.is_integer() else number
        self.batch_size = positive_int("batch_size", batch_size)

    def _check(self) -> None:
        """Raise :class:`InputError` for settings that are impossible."""
        if self.reduction is not None:
            one_of("reduction", self.reduction, REDUCTIONS)
        if self.mode is not None and not callable(self.mode):
            one_of("mode", self.mode, MODES)
        self._check_augment()
        self._check_stopping()
        if self.max_grad_norm is not None:
            self.max_grad_norm = positive_number("max_grad_norm", self.max_grad_norm)
        if self.lr is not None:
            positive_number("lr", self.lr)
        elif isinstance(self.optimizer, str | type):
            raise InputError("a recipe needs lr=, the rate of its optimizer")
        if self.initial is not None:
            instance("initial", self.initial, Mapping, "the state dict before training")
        if "prior" in self.options:
            raise InputError("a recipe has no prior=: pass train=, your own function that trains")
        self._check_settings()
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Make the optimizer once, for some model, so that a wrong setting is refused here."""
        with torch.random.fork_rng(devices=[]):  # the user's generator stays where it is
            any_model = nn.Linear(1, 1)
            params = list(any_model.parameters())
            self._optimizer(params, any_model, n_data=1, steps=1)

    def _check_augment(self) -> None:
        """Raise unless ``augment`` is a function or a data set."""
        if self._drawing is not None and not hasattr(self._drawing, "__getitem__"):
            raise InputError("augment= takes a function of the inputs, or a data set")

    def _check_stopping(self) -> None:
        """Raise for patience without validation data, or a schedule shorter than the training."""
        if self.patience is not None:
            positive_int("patience", self.patience)
            if self.validation is None:
                raise InputError("patience= needs validation=, the data that it was counted on")
        if self.schedule_epochs is not None:
            planned = positive_int("schedule_epochs", self.schedule_epochs)
            if planned < self.epochs:
                raise InputError(f"schedule_epochs={planned} is less than epochs={self.epochs}")

    @property
    def _drawing(self) -> Any:
        """The data set that draws the inputs; None where a function does, or nothing is drawn."""
        if self.augment is None or callable(self.augment):
            return None
        if isinstance(self.augment, DataLoader):
            return self.augment.dataset
        return self.augment

    def check_examples(self, n_data: int) -> None:
        """Raise :class:`InputError` if ``augment`` is a data set of another number of examples."""
        if self._drawing is not None and len(self._drawing) != n_data:
            raise InputError(
                f"augment= is a data set of {len(self._drawing)} examples, but the "
                f"task has {n_data}"
            )

    def of_examples(self, chosen: Sequence[int]) -> Recipe:
        """The recipe for some of the examples of its task."""
        if self._drawing is None:
            return self
        recipe = copy.copy(self)
        recipe.augment = Subset(self._drawing, chosen)
        return recipe

    def __repr__(self) -> str:
        settings = self._settings
        if not self.train:
            settings["lr"] = self.lr and self.lr * self.factor
        arguments = [_shown(self.train or self.optimizer)]
        for name, value in settings.items():
            if value is not None:
                arguments.append(f"{name}={_shown(value)}")
        for name in ("augment", "validation", "initial"):
            if getattr(self, name) is not None:
                arguments.append(f"{name}=...")
        return f"Recipe({', '.join(arguments)})"

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults, and the optimizer's options."""
        if self.train is not None:
            return dict(self.options)
        settings = {name: getattr(self, name) for name in SETTINGS}
        changed = {name: value for name, value in settings.items() if value not in UNSET}
        return changed | self.options

    @property
    def record(self) -> dict[str, Any] | None:
        """The recipe for the record of a posterior; None unless it is all text and numbers."""
        needs_data = self.augment is not None or self.validation is not None
        has_name = self.train is None and isinstance(self.optimizer, str)
        if needs_data or not has_name:
            return None
        with suppress(TypeError):
            return json.loads(json.dumps({"optimizer": self.optimizer, **self._settings}))
        return None

    @property
    def note(self) -> str:
        """Why answers by this recipe are rough, in one line; "" if they are not."""
        if self.missing:
            return f"the recipe lacks {', '.join(self.missing)} of the training: answers are rough"
        return "" if self.known else UNKNOWN

    def steps(self, n_data: int) -> int:
        """The number of the optimizer's steps on ``n_data`` examples."""
        steps_per_epoch = math.ceil(n_data / self.batch_size)
        return max(1, round(self.epochs * steps_per_epoch))

    def made(self, model: nn.Module, *, n_data: int, steps: int) -> torch.optim.Optimizer:
        """The optimizer of a model's trainable parameters, for these examples and steps.

        Raises:
            InputError: settings that the optimizer does not take; groups without a parameter.
        """
        return self._optimizer(self._grouped(model), model, n_data=n_data, steps=steps)

    def _grouped(self, model: nn.Module) -> list[Any]:
        """The trainable parameters, in groups if the recipe has some.

        The first group has the parameters without separate settings.
        """
        ungrouped = {bare_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        if not self.groups:
            return list(ungrouped.values())
        groups = []
        for group in self.groups:
            patterns = [bare_name(name) for name in group["params"]]
            names = [name for name in ungrouped if _matches(name, patterns)]
            if not names:
                raise InputError(f"a group of the recipe has no parameter of the model: {patterns}")
            params = [ungrouped.pop(name) for name in names]
            groups.append({**group, "params": params})
        if not ungrouped:
            return groups
        return [{"params": list(ungrouped.values())}, *groups]

    def _optimizer(
        self, params: list[Any], model: nn.Module, *, n_data: int, steps: int
    ) -> torch.optim.Optimizer:
        """The optimizer of these parameters or groups of parameters.

        Each group has its highest rate as ``group["peak"]``.
        """
        factory = self.factory
        options: dict[str, Any] = {}
        if isinstance(self.optimizer, str | type):
            parameters = inspect.signature(factory).parameters
            if "ess" in parameters:
                options["ess"] = n_data
            if "batch_size" in parameters:
                options["batch_size"] = self.batch_size
            if "model" in parameters:
                options["model"] = model
            options |= {"lr": self.lr, **self.options}
            if "steps" in options:
                options["steps"] = steps
        with told_as(InputError, "the recipe's optimizer cannot be made"):
            optimizer = factory(params, **options)
        instance("what it makes", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        for group in optimizer.param_groups:
            group["peak"] = group["lr"] * self.factor
        return optimizer

    def _check_settings(self) -> None:
        """Raise if a group has a setting that the optimizer lacks: torch would ignore it."""
        if not self.groups or not isinstance(self.optimizer, str | type):
            return
        parameters = inspect.signature(self.factory).parameters
        names = {name for group in self.groups for name in group}
        unknown = names - {"params", *parameters}
        if unknown:
            raise InputError(f"groups: the optimizer has no setting {', '.join(sorted(unknown))}")

    @property
    def factory(self) -> Callable[..., Any]:
        """The class of the optimizer, or the user's function that makes it."""
        if not isinstance(self.optimizer, str):
            instance("optimizer", self.optimizer, Callable, "a name or a function")
            return self.optimizer
        name = self.optimizer.lower()
        if name not in OPTIMIZERS:
            import_module("blr_analysis.learning_rule.optim")  # it adds its optimizers
        one_of("optimizer", name, tuple(OPTIMIZERS))
        return OPTIMIZERS[name]

    def set_rate(self, optimizer: torch.optim.Optimizer, part: float) -> None:
        """Set the schedule's rate after this part of the steps."""
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor_at(self.schedule, self.warmup, part)

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients of a step, if the training did."""
        if self.max_grad_norm is not None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, self.max_grad_norm)

    def shortened(self, epochs: int) -> Recipe:
        """The training in fewer epochs: half of the run's rate × steps, by a cosine schedule."""
        if epochs >= self.epochs:
            return self
        recipe = copy.copy(self)
        recipe.factor = self.factor * self._mean_rate * self.epochs / epochs
        recipe.schedule = "cosine"
        recipe.schedule_epochs = None
        recipe.warmup = 0.0
        recipe.epochs = epochs
        recipe.validation = None
        recipe.patience = None
        return recipe

    @property
    def _mean_rate(self) -> float:
        """The mean of the schedule over the epochs that were trained."""
        return self._mean_until(1.0)

    def _mean_until(self, part: float) -> float:
        """The mean of the schedule over this part of the epochs that were trained."""
        end = part * self.epochs / (self.schedule_epochs or self.epochs)
        points = [end * (k + 0.5) / POINTS for k in range(POINTS)]
        factors = [factor_at(self.schedule, self.warmup, point) for point in points]
        return math.fsum(factors) / POINTS

    def halfway(self, parts: Sequence[float]) -> int:
        """The place of the part at whose end half of the rate × steps is made, or nearly."""
        shares = [part * self._mean_until(part) / self._mean_rate for part in parts]
        return min(range(len(parts)), key=lambda place: abs(shares[place] - 0.5))


def _checked_groups(groups: Any) -> list[dict[str, Any]]:
    """The groups, each with a list of names or patterns as ``params``, and its settings.

    Raises:
        InputError: something else.
    """
    example = 'dicts such as {"params": ["*.bias"], "weight_decay": 0.0}'
    instance("groups", groups, Iterable, f"a list of {example}")
    checked_groups = []
    for group in groups:
        patterns: Any = group.get("params") if isinstance(group, Mapping) else None
        if isinstance(patterns, str):
            patterns = [patterns]
        if not _are_texts(patterns):
            raise InputError(f"groups must be {example}, got {group!r}")
        checked_groups.append({**group, "params": list(patterns)})
    return checked_groups


def _are_texts(values: Any) -> bool:
    """Whether this is a list or tuple of texts."""
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name equals one of the patterns, or fits it."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _shown(value: Any) -> str:
    """A setting as a repr shows it: the name of a function, the length of a long list."""
    if callable(value):
        return getattr(value, "__name__", "function")
    is_long = isinstance(value, list) and len(value) > MOST_SHOWN
    return f"[{len(value)} entries]" if is_long else repr(value)
