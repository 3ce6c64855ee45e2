"""The contract of every likelihood: e, Λ, loss, mean, samples, and checks of the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from functools import partial
from inspect import signature
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError

MIN_TO_TELL_LOGITS = 10  # examples; the outputs of fewer do not tell whether they are logits

FOUND = {"estimated", "has_curvature"}  # attributes that data showed


class Likelihood(ABC):
    """One exponential-family likelihood: its error e, Hessian Λ, loss, mean and samples.

    A likelihood of your own subclasses this and is passed as ``Task(..., likelihood=obj)``.

    Attributes:
        name: the word for it in messages and records.
        is_classification: whether a target is a class, or several.
        integer_targets: whether targets are whole numbers.
        is_sequence: whether an example has outputs ``[T, C]``, one row per token.
        estimated: whether settings were estimated from the data; test data then take those of the
            training data.
    """

    name: str
    is_classification: bool
    integer_targets: bool = False
    is_sequence: bool = False
    estimated: bool = False

    @abstractmethod
    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Prediction error e = ∂ℓ/∂f, ``[B, C]``."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A root L of the output Hessian, Λ = L Lᵀ, ``[B, C, K]`` with K ≤ C."""

    @abstractmethod
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each example, in nats, ``[B]``."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """E[y | f]: probabilities, means or rates, ``[B, C]``."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from the model's own predictive distribution (the Fisher's labels)."""

    @abstractmethod
    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Raise :class:`DataError` where a target lies outside the likelihood's support."""

    def at(self, indices: Tensor) -> Likelihood:
        """The likelihood of the examples at these indices; only weights of examples change it."""
        return self

    @property
    def plain(self) -> Likelihood:
        """This likelihood without weights of examples."""
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, as a record may hold them."""
        return {name: value for name, value in vars(self).items() if name not in FOUND}

    def taking(self, settings: Mapping[str, Any]) -> Likelihood:
        """This likelihood with the :attr:`settings` that a record holds."""
        likelihood = copy(self)
        for name, value in settings.items():
            setting = tuple(value) if isinstance(value, list) else value
            setattr(likelihood, name, setting)
        return likelihood

    @property
    def kind(self) -> Likelihood:
        """The likelihood that defines targets and predictions; a function of the user's may name
        another one."""
        return self

    def same(self, likelihood: Likelihood) -> bool:
        """Whether both have the same type and settings, whatever the weights of examples."""
        return alike(self.plain, likelihood.plain)

    def judged_by(self, test: Likelihood) -> bool:
        """Whether a test set has this likelihood, or this one without settings."""
        is_without_settings = test.plain.recorded == self.plain.name
        return self.same(test) or is_without_settings

    def drawn_error(self, outputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        """ẽ ``[B, C]`` with E[ẽ ẽᵀ] = Λ over labels ``drawn`` by :meth:`resample`."""
        return self.error(outputs, drawn)

    def moved(self, outputs: Tensor, step: Tensor) -> Tensor:
        """The outputs after a linearised step ``[B, C]``, kept in the range of possible outputs."""
        return outputs + step

    def check_moved(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise :class:`InputError` where the loss fails on outputs that :meth:`moved` gave."""
        return None

    def looks_normalised(self, outputs: Tensor) -> bool:
        """Whether these outputs look like probabilities, where the likelihood takes logits."""
        return False

    def are_one_hot(self, targets: Tensor) -> bool:
        """Whether these targets are shares of classes, each of which is all of one class."""
        return False

    def noise(self, outputs: Tensor) -> Tensor | None:
        """σ², the variance of y around its mean, ``[B, C]``; None unless y is normal."""
        return None

    def by_token(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets with one row per token; torch's own loss may take another layout."""
        return outputs, targets

    def join(self, outputs: Any) -> Any:
        """A model's outputs as one tensor; some likelihoods take several."""
        return outputs

    def prepare(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs that are scored, and their targets, checked; see :meth:`prepare_targets`."""
        return outputs, self.prepare_targets(targets, outputs)

    def counted(self, targets: Tensor) -> Tensor | None:
        """Which tokens of a sequence count, ``[B, T]`` bool; None where examples are no sequences.

        ``targets`` are those that :meth:`prepare` returned.
        """
        return None

    def mass(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The part of each example in the divisor of a minibatch's mean loss, ``[B]``.

        It is 1, or the weight of its class; of a sequence the sum over its tokens; and 0 for
        ignored targets.
        """
        return torch.ones_like(outputs.flatten(1)[:, 0])

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        """The number of losses that torch's own loss returns with ``reduction="none"``."""
        return len(outputs)

    def as_module_takes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets in the layout of the loss module that this was read from."""
        return outputs, targets

    def resample(
        self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """:meth:`sample` in the shape of ``targets``; ignored targets stay ignored."""
        return self.sample(outputs, generator)

    def hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Output Hessian Λ = ∂²ℓ/∂f², ``[B, C, C]``."""
        root = self.hessian_root(outputs, targets)
        return root @ root.mT

    def hessian_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """s and v with Λ = diag(s) − v vᵀ, ``[B, C]`` each; None if Λ has another form."""
        return None

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """Λ u for vectors u ``[..., B, C]`` in the space of the outputs."""
        return (self.hessian(outputs, targets) @ vectors.unsqueeze(-1)).squeeze(-1)

    def prediction(self, outputs: Tensor) -> Tensor:
        """The model's answer: the class ``[B]``, or the mean, ``[B]`` (``[B, C]`` if C > 1)."""
        mean = self.mean(outputs)
        return mean.squeeze(-1) if mean.shape[-1] == 1 else mean

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Whether each prediction is right, ``[B]`` bool; None for regression."""
        return None

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        """How far a prediction moved between two outputs, ``[B]``.

        Classification: ‖E[y|f'] − E[y|f]‖₁ in probability. Regression: ‖f' − f‖₂.
        """
        if self.is_classification:
            return (self.mean(after) - self.mean(before)).abs().sum(-1)
        return torch.linalg.vector_norm(after - before, dim=-1)

    def __repr__(self) -> str:
        """The class, and the settings that differ from its defaults."""
        attributes = vars(self)
        settings = []
        for name, parameter in signature(type(self)).parameters.items():
            if name not in attributes or alike(attributes[name], parameter.default):
                continue
            value = attributes[name]
            shown = list(value) if isinstance(value, tuple) else value
            settings.append(f"{name}={shown!r}")
        return f"{type(self).__name__}({', '.join(settings)})"

    @property
    def recorded(self) -> str:
        """Its text in a record: the name, or the repr if it has settings."""
        has_settings = repr(self) != f"{type(self).__name__}()"
        return repr(self) if has_settings else self.name

    def check_outputs(self, outputs: Tensor) -> None:
        """Raise :class:`DataError` unless the outputs are ``[B, C]`` with a possible C ≥ 1."""
        if outputs.ndim != 2 or outputs.shape[-1] == 0:
            raise DataError(
                f"the {self.name} likelihood needs outputs of shape [batch, C], got "
                f"{tuple(outputs.shape)}; reshape them in Task(..., forward=...)"
            )

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the shape and dtype that :meth:`error` and :meth:`nll` take, checked."""
        lacks_last_axis = outputs.shape[-1] == 1 and targets.shape == outputs.shape[:-1]
        if lacks_last_axis:
            targets = targets.unsqueeze(-1)
        if targets.shape != outputs.shape:
            raise DataError(
                f"targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}; give one target per output"
            )
        if targets.is_complex():
            raise DataError(f"{self.name} targets must be real numbers, got {targets.dtype}")
        targets = targets.to(outputs.dtype)
        if not bool(torch.isfinite(targets).all()):
            raise DataError(f"{self.name} targets contain NaN or inf; drop or mend those examples")
        self.check_values(targets, outputs)
        return targets


def alike(a: Any, b: Any) -> bool:
    """Whether two losses, or settings of losses, are the same.

    They are if they are one object, or objects of one class with the same values inside. Two
    functions are the same only if they are one object.
    """
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    is_function_or_class = isinstance(a, type | FunctionType | MethodType | partial)
    if type(a) is not type(b) or is_function_or_class:
        return False
    if isinstance(a, Likelihood):
        return alike(a.settings, b.settings)
    if hasattr(a, "__dict__"):
        return alike(vars(a), vars(b))
    return bool(np.array_equal(cast(Any, a), cast(Any, b)))


def numbers(name: str, setting: Any, *, positive: bool = False) -> tuple[float, ...] | None:
    """A setting of a loss as numbers: one for all outputs or one for each; None stays None.

    Raises:
        InputError: something else, or numbers below 0 (with ``positive``: 0 or below).
    """
    if setting is None:
        return None
    try:
        values = torch.as_tensor(setting, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    is_too_low = values <= 0 if positive else values < 0
    are_usable = bool((~is_too_low & values.isfinite()).all())
    is_one_row = values.ndim <= 1 and values.numel() > 0
    if not (is_one_row and are_usable):
        bound = "positive" if positive else "0 or more"
        raise InputError(f"{name} must be finite and {bound}, one per output, got {setting!r}")
    return tuple(values.reshape(-1).tolist())


def per_output(name: str, values: tuple[float, ...] | None, outputs: Tensor) -> Tensor:
    """A setting of a loss as a tensor beside outputs, ``[C]`` or ``[1]``; None is 1.

    Raises:
        DataError: neither one value nor one for each output.
    """
    values = values or (1.0,)
    n_outputs = outputs.shape[-1]
    if len(values) not in (1, n_outputs):
        raise DataError(
            f"{name} has {len(values)} entries for {n_outputs} outputs; give one per output"
        )
    return outputs.new_tensor(values)
