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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from blr_analysis.checks import instance, one_of, positive_int, positive_number
from blr_analysis.errors import InputError, told_as
from blr_analysis.likelihoods.reduction import WORDS as REDUCTIONS
from blr_analysis.modes import WORDS as MODES
from blr_analysis.modes import Mode

SCHEDULES: dict[str | None, Callable[[float], float]] = {
    None: lambda part: 1.0,
    "cosine": lambda part: 0.5 + 0.5 * math.cos(math.pi * part),
    "linear": lambda part: 1.0 - part,
}
POINTS = 1000  # at which the mean of a schedule is taken
OPTIMIZERS: dict[str, Callable[..., Any]] = {  # by name; learning_rule.optim adds its own
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
}
SETTINGS = (
    "lr", "epochs", "batch_size", "schedule", "schedule_epochs", "patience", "reduction", "mode",
)  # fmt: skip
Augment = Callable[[Any], Any] | Dataset[Any]
Train = Callable[[Any, int], "nn.Module | Mapping[str, Tensor]"]


class Recipe:
    """The training of a model, told once to its :class:`~blr_analysis.Task`.

    Args:
        optimizer: the name of one of ``torch.optim`` or of the package's own ("ivon", "vogn", …), a
            class, or a function of the parameters that makes one.
        lr: the rate at the start; a function has its own.
        epochs: the epoch whose weights were kept.
        batch_size: examples in a minibatch.
        schedule: of the rate over the epochs: None (constant), "cosine" or "linear", down to 0.
        initial: state dict of the first weights, or of the model that was fine-tuned; None: they
            were drawn, and are drawn anew.
        reduction: of a minibatch's losses, where it was not that of the task's loss (its own
            ``reduction`` of one of ``torch.nn``; else a mean over examples, over the tokens that
            count of sequences): "mean", "sum", "entries" (a mean over all outputs of all examples,
            as of ``nn.MSELoss``) or "weights" (Σ_i w_i ℓ_i / Σ_i w_i of a task with weights).
        mode: of the modules, where they did not train in the mode in which the task's model was
            given: "train", "eval", or a function of the model that is called after
            ``model.train()``. None: of a model given in eval mode as a whole all modules train but
            for norms with frozen parameters.
        augment: what the training drew of its inputs, while the task's data stand still: a function
            of a minibatch's inputs, or a data set (or its loader) of the same examples in the same
            order that draws each of them when it is read. Added examples need the function.
        validation: data as a :class:`~blr_analysis.Task` takes them, or a Task, that the training
            stopped early on: of at most ``epochs`` epochs the weights with the least loss there are
            kept.
        patience: the epochs without a better one after which it stops.
        schedule_epochs: those that the schedule was made for, where the training ended earlier, as
            of a cosine of 100 epochs that was stopped at the 40th.
        train: in place of all these, your own training, ``train(data, seed)`` -> model or state
            dict.
        options: further settings of the optimizer (``weight_decay``, ``momentum``, ``betas``, …);
            the package's own get the number of examples as ``ess``.

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
        epochs: int | None = None,
        batch_size: int | None = None,
        schedule: str | None = None,
        initial: Mapping[str, Tensor] | None = None,
        reduction: str | None = None,
        mode: Mode | None = None,
        augment: Augment | None = None,
        validation: Any = None,
        patience: int | None = None,
        schedule_epochs: int | None = None,
        train: Train | None = None,
        **options: Any,
    ) -> None:
        self.optimizer, self.lr, self.options = optimizer, lr, options
        self.schedule, self.initial, self.train = schedule, initial, train
        self.reduction, self.mode = reduction, mode
        self.augment, self.validation = augment, validation
        self.patience, self.schedule_epochs = patience, schedule_epochs
        self.factor, self.known = 1.0, True  # of the rate; whether somebody told it
        self.epochs = self.batch_size = 0
        if train is not None:
            instance("train", train, Callable, "a function (data, seed) -> model or state dict")
            if augment is not None or validation is not None:
                raise InputError("train= does all of it: leave augment= and validation= out")
            return
        if epochs is None or batch_size is None:
            raise InputError("a recipe needs epochs= and batch_size=, or train=")
        self.epochs = positive_int("epochs", epochs)
        self.batch_size = positive_int("batch_size", batch_size)
        if schedule is not None:
            one_of("schedule", schedule, ("cosine", "linear"))
        if reduction is not None:
            one_of("reduction", reduction, REDUCTIONS)
        if mode is not None and not callable(mode):
            one_of("mode", mode, MODES)
        self._check_ways()
        if lr is not None:
            positive_number("lr", lr)
        elif isinstance(optimizer, str | type):
            raise InputError("a recipe needs lr=, the rate of its optimizer")
        if initial is not None:
            instance("initial", initial, Mapping, "the state dict before training")
        with torch.random.fork_rng(devices=[]):  # what is drawn here is not missed in training
            self.made(nn.Linear(1, 1), n_data=1, steps=1)

    def _check_ways(self) -> None:
        """What the training drew, and where it stopped."""
        if self._drawing is not None and not hasattr(self._drawing, "__getitem__"):
            raise InputError("augment= takes a function of the inputs, or a data set")
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
        """The data set that draws; None where a function does, or nothing is drawn."""
        if self.augment is None or callable(self.augment):
            return None
        return self.augment.dataset if isinstance(self.augment, DataLoader) else self.augment

    def check_examples(self, n_data: int) -> None:
        """Raise :class:`InputError` where ``augment`` has another number of examples."""
        if self._drawing is not None and len(self._drawing) != n_data:
            raise InputError(f"augment= has {len(self._drawing)} examples, the task {n_data}")

    def of_examples(self, chosen: Sequence[int]) -> Recipe:
        """The recipe for some of the examples of its task."""
        if self._drawing is None:
            return self
        made = copy.copy(self)
        made.augment = Subset(self._drawing, chosen)
        return made

    def __repr__(self) -> str:
        rate = self.lr and self.lr * self.factor
        told = self._told if self.train else self._told | {"lr": rate}
        said = [f"{name}={_shown(value)}" for name, value in told.items() if value is not None]
        for name in ("augment", "validation", "initial"):
            if getattr(self, name) is not None:
                said.append(f"{name}=...")
        name = self.train or self.optimizer
        name = _shown(name)
        return f"Recipe({', '.join([name, *said])})"

    @property
    def _told(self) -> dict[str, Any]:
        if self.train is not None:
            return dict(self.options)
        return {name: getattr(self, name) for name in SETTINGS} | self.options

    @property
    def record(self) -> dict[str, Any] | None:
        """What a posterior's file keeps; None of what is no plain text and numbers."""
        needs_data = self.augment is not None or self.validation is not None
        if self.train is None and isinstance(self.optimizer, str) and not needs_data:
            with suppress(TypeError):
                return json.loads(json.dumps({"optimizer": self.optimizer, **self._told}))
        return None

    def made(self, model: nn.Module, *, n_data: int, steps: int) -> torch.optim.Optimizer:
        """The optimizer of a model's trainable parameters, for so many examples and steps."""
        params = [p for p in model.parameters() if p.requires_grad]
        factory, options = self._factory, {}
        if isinstance(self.optimizer, str | type):
            taken = inspect.signature(factory).parameters
            options = {n: v for n, v in {"ess": n_data, "model": model}.items() if n in taken}
            options |= {"lr": self.lr, **self.options}
            options |= {"steps": steps} if "steps" in options else {}
        with told_as(InputError, "the recipe's optimizer cannot be made"):
            optimizer = factory(params, **options)
        instance("what it makes", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        for group in optimizer.param_groups:
            group["peak"] = group["lr"] * self.factor
        return optimizer

    @property
    def _factory(self) -> Callable[..., Any]:
        if not isinstance(self.optimizer, str):
            instance("optimizer", self.optimizer, Callable, "a name or a function")
            return self.optimizer
        name = self.optimizer.lower()
        if name not in OPTIMIZERS:
            import_module("blr_analysis.learning_rule.optim")  # which adds its own
        one_of("optimizer", name, tuple(OPTIMIZERS))
        return OPTIMIZERS[name]

    def set_rate(self, optimizer: torch.optim.Optimizer, part: float) -> None:
        """The rate when this part of the steps is made."""
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * SCHEDULES[self.schedule](part)

    def shortened(self, epochs: int) -> Recipe:
        """The same training in so few epochs: half of the run's rate × steps, as a cosine."""
        if epochs >= self.epochs:
            return self
        made = copy.copy(self)
        made.factor = self.factor * self._mean_rate * self.epochs / epochs
        made.schedule = "cosine"
        made.epochs = epochs
        made.schedule_epochs = None
        made.validation = None
        made.patience = None
        return made

    @property
    def _mean_rate(self) -> float:
        """The mean of the schedule over the epochs that were trained."""
        return self._mean_until(1.0)

    def _mean_until(self, part: float) -> float:
        """The mean of the schedule over this part of the epochs that were trained."""
        end = part * self.epochs / (self.schedule_epochs or self.epochs)
        points = [end * (k + 0.5) / POINTS for k in range(POINTS)]
        return math.fsum(map(SCHEDULES[self.schedule], points)) / POINTS

    def halfway(self, parts: Sequence[float]) -> int:
        """Which of these parts of the steps is nearest to half of the rate × steps."""
        whole = self._mean_until(1.0)
        shares = [part * self._mean_until(part) / whole for part in parts]
        return min(range(len(parts)), key=lambda k: abs(shares[k] - 0.5))


def _shown(value: Any) -> str:
    """A setting in a repr; a function by its name."""
    return getattr(value, "__name__", "function") if callable(value) else repr(value)
