"""What users give of a posterior, read once: means, numbers of examples, and the prior. That is its
precision δ, one number for all parameters or one for each, and its mean θ₀, 0 where nothing else is
known.

objective  Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

>>> prior = Prior.read({"w": 1, "b": 2.0}, {"w": (2,), "b": ()})
>>> prior.smallest, prior.of("b"), prior.times({"w": torch.ones(2), "b": torch.ones(())})
(1.0, 2.0, {'w': tensor([1., 1.]), 'b': tensor(2.)})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    """H = S − δ, in place of S; 0 where no more is left than some roundings of δ in S as it was
    ``stored``: one where S is still in memory and the file must lose nothing else, four where it
    comes from a file, whose maker may have scaled and added it before."""
    left = total.sub_(delta)
    return left.masked_fill_(left.abs() <= roundings * torch.finfo(stored).eps * delta, 0.0)


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
        return cls(dict(given) if isinstance(given, Mapping) else {None: given})  # type: ignore[arg-type]

    @classmethod
    def read(cls, given: Any, shapes: Shapes, *, positive: bool = False) -> Prior:
        """The prior that a user gave for parameters of these shapes.

        Raises:
            PosteriorError: no finite number, below 0 (``positive``: not above 0), or of other
                names.
        """
        prior, entries = cls.of_any(given), dict[str | None, float]()
        if None not in prior.entries and set(prior.entries) != set(shapes):
            absent = sorted(set(shapes) - set(prior.entries))[:MOST]
            strange = sorted(map(str, set(prior.entries) - set(shapes)))[:MOST]
            said = f"missing {absent or 'none'}, unknown {strange or 'none'}"
            raise PosteriorError(f"prior_precision must have one entry per parameter: {said}")
        for name, value in prior.entries.items():
            what = "prior_precision" + ("" if name is None else f" of {name!r}")
            try:
                delta = float("" if isinstance(value, bool | str) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise PosteriorError(f"{what} must be a number, got {value!r}") from error
            if not (0 < delta < math.inf or (delta == 0 and not positive)):
                bound = f"finite and {'above' if positive else 'at least'} 0"
                raise PosteriorError(f"{what} must be {bound}, got {value!r}")
            entries[name] = delta
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
        return Prior(self.entries, self.mean and {n: m.to(params[n]) for n, m in self.mean.items()})

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
        held = {n: t for n, t in initial.items() if n in params and isinstance(t, Tensor)}
        if wrong := differences(held, params, ("initial", "model")):
            raise PosteriorError(f"initial belongs to another model: {wrong}")
        mean = {n: initial[n].detach().to(p, copy=True) for n, p in params.items()}
        places = narrow(params), narrow(initial)
        if params and all(places[0][n].data_ptr() == places[1][n].data_ptr() for n in params):
            said = "initial is the model's own memory, which training changed"
            raise PosteriorError(f"{said}: copy.deepcopy(model.state_dict()) before it")
        if bad := [n for n, m in mean.items() if not bool(torch.isfinite(m).all())]:
            raise PosteriorError(f"initial holds NaN or inf in {some(bad)}")
        return Prior(self.entries, mean)

    def gap(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """θ − θ₀."""
        m = self.mean
        return {n: p if m is None else p - m[n] for n, p in params.items()}

    @property
    def smallest(self) -> float:
        return min(self.entries.values())

    def numbers(self, names: Any) -> dict[str, float]:
        """One number for each of these parameters."""
        return {n: self.of(n) for n in names}


def real_tensors(name: str, tree: Any) -> dict[str, Tensor]:
    """Detached floating-point tensors by name, or :class:`PosteriorError`."""
    if isinstance(tree, Widened):
        return tree  # type: ignore[return-value]  # read like one
    if not isinstance(tree, Mapping) or not all(isinstance(t, Tensor) for t in tree.values()):
        got = type(tree).__name__
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
    "" in none."""
    a, b = ({n: tuple(getattr(x, "shape", x)) for n, x in tree.items()} for tree in (mine, theirs))
    odd = [n for n in {**a, **b} if a.get(n) != b.get(n)]
    lines = [
        f"{n}: {a.get(n, 'absent')} in the {who[0]}, {b.get(n, 'absent')} in the {who[1]}"
        for n in odd[:MOST]
    ]
    return "; ".join(lines + [f"and {len(odd) - MOST} more"] * (len(odd) > MOST))
