"""What users give for a posterior, read once: means, numbers of examples, and the prior.

The prior has a precision δ, one number for all parameters or one for each, and a mean θ₀, which is
0 where nothing else is known.

objective  Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

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
MOST = 8  # names that a message lists


def take_off(total: Tensor, delta: float, stored: torch.dtype, *, roundings: int = 1) -> Tensor:
    """H = S − δ, written into the memory of S; 0 where only rounding is left.

    Args:
        total: S.
        stored: the dtype in which S was stored, and δ in it was rounded.
        roundings: how many roundings of δ may be left: one where S is still in memory and the file
            must lose nothing else, four where S comes from a file, whose maker may have scaled it
            and added to it before.
    """
    data_part = total.sub_(delta)
    rounding = roundings * torch.finfo(stored).eps * delta
    return data_part.masked_fill_(data_part.abs() <= rounding, 0.0)


@dataclass(frozen=True)
class Prior:
    """δ by parameter name; under None, for all of them.

    Attributes:
        mean: θ₀ by parameter name; None: 0.
    """

    entries: Mapping[str | None, float]
    mean: Mapping[str, Tensor] | None = None

    @classmethod
    def of_any(cls, given: Given | Prior) -> Prior:
        """A number, a mapping, or a prior, without a look at what is in it."""
        if isinstance(given, Prior):
            return given
        if isinstance(given, Mapping) and any(_is_by_weight(value) for value in given.values()):
            raise PosteriorError("a δ for every weight is fit_laplace's prior_precision alone")
        if isinstance(given, Mapping):
            return cls(dict(given))  # type: ignore[arg-type]
        return cls({None: given})

    @classmethod
    def read(cls, given: Any, shapes: Shapes, *, positive: bool = False) -> Prior:
        """The prior that a user gave for parameters of these shapes.

        Raises:
            PosteriorError: no finite number, below 0 (``positive``: not above 0), or of other
                names.
        """
        prior = cls.of_any(given)
        if isinstance(prior, FormPrior):
            return prior
        if None not in prior.entries and set(prior.entries) != set(shapes):
            missing = sorted(set(shapes) - set(prior.entries))[:MOST]
            unknown = sorted(map(str, set(prior.entries) - set(shapes)))[:MOST]
            raise PosteriorError(
                "prior_precision must have one entry per parameter: missing "
                f"{missing or 'none'}, unknown {unknown or 'none'}"
            )
        entries = {n: _delta_of(n, value, positive) for n, value in prior.entries.items()}
        return cls(entries, prior.mean)

    @property
    def given(self) -> Any:
        """As a user writes it and a record holds it: one number, or a dict."""
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
        """With its mean beside the parameters, in their dtypes."""
        if self.mean is None:
            return self
        return Prior(self.entries, {n: m.to(params[n]) for n, m in self.mean.items()})

    def around(self, initial: Mapping[str, Tensor] | None, params: Mapping[str, Tensor]) -> Prior:
        """The same precision around the first weights, or the base model, that a user gave.

        Raises:
            PosteriorError: they are another model's, by name or shape, or not finite.
        """
        initial = self.mean if initial is None else initial
        if initial is None:
            return self
        if not isinstance(initial, Mapping):
            got = type(initial).__name__
            raise PosteriorError(f"initial must be the state dict before training, got {got}")
        tensors = {n: t for n, t in initial.items() if n in params and isinstance(t, Tensor)}
        if mismatch := differences(tensors, params, ("initial", "model")):
            raise PosteriorError(f"initial belongs to another model: {mismatch}")
        if _share_memory(params, initial):
            raise PosteriorError(
                "initial is the model's own memory, which training changed: "
                "copy.deepcopy(model.state_dict()) before it"
            )
        mean = {n: initial[n].detach().to(p, copy=True) for n, p in params.items()}
        if not_finite := [n for n, m in mean.items() if not bool(torch.isfinite(m).all())]:
            raise PosteriorError(f"initial holds NaN or inf in {some(not_finite)}")
        return replace(self, mean=mean)

    def penalty(self, params: Mapping[str, Tensor]) -> float:
        """½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀), summed in float64."""
        gap = {name: x.double() for name, x in self.gap(params).items()}
        pull = self.times(gap)
        return 0.5 * sum(float((x * pull[name]).sum()) for name, x in gap.items())

    def gap(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """θ − θ₀."""
        if self.mean is None:
            return dict(params.items())
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
    """A prior with a precision S₀ that is more than a number for each parameter: an earlier
    posterior, or a δ for every weight.

        ½ (θ − θ₀)ᵀ S₀ (θ − θ₀)

    Attributes:
        entries: a bound from below of S₀, by name.
        form: S₀, a structure of :mod:`blr_analysis.posterior.structures`.
    """

    form: Any = None

    def times(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """S₀ v (leading batch dimensions allowed)."""
        some_tensor = next(iter(v.values()))
        return self.form.to(some_tensor.device, some_tensor.dtype).times(dict(v))

    def placed(self, params: Mapping[str, Tensor]) -> Prior:
        """With its mean and its precision beside the parameters, in their dtypes."""
        some_tensor = next(iter(params.values()))
        form = self.form.to(some_tensor.device, some_tensor.dtype)
        mean = None
        if self.mean is not None:
            mean = {n: m.to(params[n]) for n, m in self.mean.items()}
        return replace(self, mean=mean, form=form)


def _is_by_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _delta_of(name: str | None, value: Any, positive: bool) -> float:
    what = "prior_precision" if name is None else f"prior_precision of {name!r}"
    if isinstance(value, bool | str):
        raise PosteriorError(f"{what} must be a number, got {value!r}")
    try:
        delta = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PosteriorError(f"{what} must be a number, got {value!r}") from error
    is_large_enough = delta > 0 or (delta == 0 and not positive)
    if not is_large_enough or delta == math.inf:
        bound = "above 0" if positive else "at least 0"
        raise PosteriorError(f"{what} must be finite and {bound}, got {value!r}")
    return delta


def _share_memory(params: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> bool:
    weights = narrow(params)
    first = narrow(initial)
    return bool(params) and all(weights[n].data_ptr() == first[n].data_ptr() for n in params)


def real_tensors(name: str, tree: Any) -> dict[str, Tensor]:
    """Detached floating-point tensors by name, or :class:`PosteriorError`."""
    if isinstance(tree, Widened):
        return tree  # type: ignore[return-value]  # read like one
    are_tensors = isinstance(tree, Mapping) and all(isinstance(t, Tensor) for t in tree.values())
    if not are_tensors:
        got = type(tree).__name__
        if isinstance(tree, Mapping):
            others = [n for n, value in tree.items() if not isinstance(value, Tensor)]
            got = f"{type(tree[others[0]]).__name__} for {others[0]!r}"
        raise PosteriorError(f"{name} must be a dict of tensors by parameter name, got {got}")
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
    """The names and shapes in which two sets of parameters (or their shapes) differ, for messages;
    "" where they agree.

    Args:
        who: what a message calls the two.
    """
    first = _shapes(mine)
    second = _shapes(theirs)
    different = [n for n in {**first, **second} if first.get(n) != second.get(n)]
    facts = []
    for name in different[:MOST]:
        shapes = first.get(name, "absent"), second.get(name, "absent")
        facts.append(f"{name}: {shapes[0]} in the {who[0]}, {shapes[1]} in the {who[1]}")
    if len(different) > MOST:
        facts.append(f"and {len(different) - MOST} more")
    return "; ".join(facts)


def _shapes(tree: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of tensors or of shapes."""
    return {name: tuple(getattr(entry, "shape", entry)) for name, entry in tree.items()}
