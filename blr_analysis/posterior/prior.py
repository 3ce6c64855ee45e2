"""The prior, and checks of what users pass to a posterior: means, and numbers of examples.

The prior has a precision δ, one number for all parameters or one for each, and a mean θ₀, which is
0 unless a user gives one. It adds the last term to the objective that training minimises:

    Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

>>> prior = Prior.read({"w": 1, "b": 2.0}, {"w": (2,), "b": ()})
>>> prior.smallest, prior.of("b"), prior.times({"w": torch.ones(2), "b": torch.ones(())})
(1.0, 2.0, {'w': tensor([1., 1.]), 'b': tensor(2.)})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import some, whole
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.half import Widened, narrow

Given = float | Mapping[str, float]  # what a user may write
Shapes = Mapping[str, tuple[int, ...]]
NAMES_LISTED = 8  # in a message


def take_off(total: Tensor, delta: float, stored: torch.dtype, *, roundings: int = 1) -> Tensor:
    """H = S − δ, the data's part of a precision; 0 where the difference is only rounding.

    Args:
        total: S; H is written into its memory.
        stored: the dtype in which S was stored, and in which δ was rounded with it.
        roundings: the largest difference that is taken for rounding, in roundings of δ: one for an
            S in memory, four for one from a file, which may have been scaled and added to before.
    """
    data_part = total.sub_(delta)
    rounding = roundings * torch.finfo(stored).eps * delta
    return data_part.masked_fill_(data_part.abs() <= rounding, 0.0)


@dataclass(frozen=True)
class Prior:
    """A Gaussian prior N(θ₀, diag(δ)⁻¹).

    Attributes:
        entries: δ by parameter name; one δ for all parameters stands under the name None.
        mean: θ₀ by parameter name; None: 0.
    """

    entries: Mapping[str | None, float]
    mean: Mapping[str, Tensor] | None = None

    @classmethod
    def of_any(cls, given: Given | Prior) -> Prior:
        """A number, a mapping by parameter name, or a prior, as a prior; values are not checked."""
        if isinstance(given, Prior):
            return given
        if not isinstance(given, Mapping):
            return cls({None: given})
        if any(has_one_for_each_weight(value) for value in given.values()):
            raise PosteriorError("only fit_laplace takes a prior_precision for every weight")
        return cls(dict(given))  # type: ignore[arg-type]

    @classmethod
    def read(cls, given: Any, shapes: Shapes, *, positive: bool = False) -> Prior:
        """The prior that a user gave for parameters of these shapes.

        Args:
            positive: whether δ = 0 is refused, too.

        Raises:
            PosteriorError: δ is not a finite number of at least 0, or its names are not the
                parameters'.
        """
        prior = cls.of_any(given)
        if isinstance(prior, FormPrior):
            return prior
        is_by_name = None not in prior.entries
        if is_by_name and set(prior.entries) != set(shapes):
            missing = sorted(set(shapes) - set(prior.entries))[:NAMES_LISTED]
            unknown = sorted(map(str, set(prior.entries) - set(shapes)))[:NAMES_LISTED]
            raise PosteriorError(
                "prior_precision must have one entry per parameter: missing "
                f"{missing or 'none'}, unknown {unknown or 'none'}"
            )
        entries = {n: _delta_of(n, value, positive) for n, value in prior.entries.items()}
        return cls(entries, prior.mean)

    @property
    def given(self) -> Any:
        """δ as users and records write it: one number, or a dict by parameter name."""
        return self.entries[None] if None in self.entries else dict(self.entries)

    def of(self, name: str) -> float:
        """δ of one parameter."""
        value = self.entries.get(name, self.entries.get(None))
        if value is None:
            raise InputError(f"prior_precision has no entry for parameter {name!r}")
        return value

    def times(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """diag(δ) v (leading batch dimensions allowed)."""
        return {name: x * self.of(name) for name, x in v.items()}

    def placed(self, params: Mapping[str, Tensor]) -> Prior:
        """The prior with its mean on the parameters' devices and in their dtypes."""
        if self.mean is None:
            return self
        return Prior(self.entries, {n: m.to(params[n]) for n, m in self.mean.items()})

    def around(self, initial: Mapping[str, Tensor] | None, params: Mapping[str, Tensor]) -> Prior:
        """The same precision around another mean.

        Args:
            initial: θ₀ as a user gave it: the state dict before training, or of the base model;
                None: the mean stays.
            params: the trained weights, which say the names, shapes, devices and dtypes.

        Raises:
            PosteriorError: θ₀ is another model's, by name or shape, or not finite.
        """
        initial = self.mean if initial is None else initial
        if initial is None:
            return self
        _check_initial(initial, params)
        mean = {n: initial[n].detach().to(p, copy=True) for n, p in params.items()}
        if not_finite := [n for n, m in mean.items() if not bool(torch.isfinite(m).all())]:
            raise PosteriorError(f"initial holds NaN or inf in {some(not_finite)}")
        return replace(self, mean=mean)

    def penalty(self, params: Mapping[str, Tensor]) -> float:
        """½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀), summed in float64."""
        gap = {name: x.double() for name, x in self.gap(params).items()}
        pull = self.times(gap)
        products = [float((x * pull[name]).sum()) for name, x in gap.items()]
        return 0.5 * sum(products)

    def gap(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """θ − θ₀."""
        if self.mean is None:
            return dict(params)
        return {n: p - self.mean[n] for n, p in params.items()}

    @property
    def smallest(self) -> float:
        """The least δ."""
        return min(self.entries.values())

    def numbers(self, names: Any) -> dict[str, float]:
        """One number for each of these parameters."""
        return {n: self.of(n) for n in names}


@dataclass(frozen=True)
class FormPrior(Prior):
    """A prior whose precision S₀ is a matrix: an earlier posterior's, or a δ for every weight.

        ½ (θ − θ₀)ᵀ S₀ (θ − θ₀)

    Attributes:
        entries: a lower bound of S₀, one number by parameter name.
        form: S₀, a structure of :mod:`blr_analysis.posterior.structures`.
    """

    form: Any = None

    def times(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """S₀ v (leading batch dimensions allowed)."""
        some_tensor = next(iter(v.values()))
        return self.form.to(some_tensor.device, some_tensor.dtype).times(dict(v))

    def placed(self, params: Mapping[str, Tensor]) -> Prior:
        """The prior with its mean and S₀ on the parameters' devices and in their dtypes."""
        some_tensor = next(iter(params.values()))
        form = self.form.to(some_tensor.device, some_tensor.dtype)
        mean = None
        if self.mean is not None:
            mean = {n: m.to(params[n]) for n, m in self.mean.items()}
        return replace(self, mean=mean, form=form)


def has_one_for_each_weight(delta: Any) -> bool:
    """Whether a δ is a tensor with one number for each weight of a parameter."""
    return isinstance(delta, Tensor) and delta.ndim > 0


def _delta_of(name: str | None, value: Any, positive: bool) -> float:
    """δ as a number; ``name`` is the parameter's, None of a δ for all."""
    subject = "prior_precision" if name is None else f"prior_precision of {name!r}"
    if isinstance(value, bool | str):
        raise PosteriorError(f"{subject} must be a number, got {value!r}")
    try:
        delta = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PosteriorError(f"{subject} must be a number, got {value!r}") from error
    is_large_enough = delta > 0 or (delta == 0 and not positive)
    if not is_large_enough or delta == math.inf:
        bound = "above 0" if positive else "at least 0"
        raise PosteriorError(f"{subject} must be finite and {bound}, got {value!r}")
    return delta


def _check_initial(initial: Any, params: Mapping[str, Tensor]) -> None:
    """Raise :class:`PosteriorError` unless these are weights of the model before its training."""
    if not isinstance(initial, Mapping):
        kind = type(initial).__name__
        raise PosteriorError(f"initial must be the state dict before training, got {kind}")
    tensors = {n: t for n, t in initial.items() if n in params and isinstance(t, Tensor)}
    if mismatch := differences(tensors, params, ("initial", "model")):
        raise PosteriorError(f"initial belongs to another model: {mismatch}")
    if _share_memory(params, initial):
        raise PosteriorError(
            "initial shares the model's memory, which the training changed: before it, take "
            "copy.deepcopy(model.state_dict())"
        )


def _share_memory(params: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> bool:
    """Whether all tensors of both are in the same places of memory."""
    weights = narrow(params)
    initial_weights = narrow(initial)
    addresses = [(weights[n].data_ptr(), initial_weights[n].data_ptr()) for n in params]
    return bool(addresses) and all(trained == first for trained, first in addresses)


def real_tensors(name: str, tree: Any) -> dict[str, Tensor]:
    """Detached floating-point tensors by name, or :class:`PosteriorError`."""
    if isinstance(tree, Widened):
        return tree  # type: ignore[return-value]  # a mapping that is read like a dict
    must_be = f"{name} must be a dict of tensors by parameter name"
    if not isinstance(tree, Mapping):
        raise PosteriorError(f"{must_be}, got {type(tree).__name__}")
    for key, value in tree.items():
        if not isinstance(value, Tensor):
            raise PosteriorError(f"{must_be}, got {type(value).__name__} for {key!r}")
    for key, tensor in tree.items():
        if not tensor.is_floating_point():
            raise PosteriorError(f"the {name} of {key!r} must hold real numbers, is {tensor.dtype}")
    return {n: t.detach() for n, t in tree.items()}


def n_data_of(n_data: Any, *, least: int = 1) -> int:
    """N, the number of examples, or :class:`PosteriorError`."""
    n = whole(n_data)
    if n is None or n < least:
        raise PosteriorError(f"n_data must be a positive whole number of examples, got {n_data!r}")
    return n


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], who: tuple[str, str]) -> str:
    """The names and shapes in which two sets of parameters differ, for messages; "" if in none.

    Args:
        mine: tensors or shapes by parameter name.
        theirs: the same.
        who: what a message calls the two.
    """
    my_shapes = _shapes(mine)
    their_shapes = _shapes(theirs)
    names = [*my_shapes, *(n for n in their_shapes if n not in my_shapes)]
    different = [n for n in names if my_shapes.get(n) != their_shapes.get(n)]
    facts = []
    for name in different[:NAMES_LISTED]:
        my_shape = my_shapes.get(name, "absent")
        their_shape = their_shapes.get(name, "absent")
        facts.append(f"{name}: {my_shape} in the {who[0]}, {their_shape} in the {who[1]}")
    if len(different) > NAMES_LISTED:
        facts.append(f"and {len(different) - NAMES_LISTED} more")
    return "; ".join(facts)


def _shapes(tree: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of tensors or of shapes."""
    return {name: tuple(getattr(entry, "shape", entry)) for name, entry in tree.items()}
