"""What users give of a posterior, read once: means, numbers of examples, and the prior. That is its
precision δ, a number for all parameters, or a number or tensor for each, and its mean θ₀, 0 where
nothing else is known.

objective  Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

>>> prior = Prior.read({"w": torch.tensor([1.0, 4.0]), "b": 2.0}, {"w": (2,), "b": ()})
>>> prior.smallest, (prior / 2).of("b"), prior.times({"w": torch.ones(2), "b": torch.ones(())})
(1.0, 1.0, {'w': tensor([1., 4.]), 'b': tensor(2.)})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import some, whole
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.half import Widened, narrow

Given = float | Tensor | Mapping[str, float | Tensor]  # what a user may write
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

    entries: Mapping[str | None, float | Tensor]
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
            PosteriorError: not finite, below 0 (``positive``: not above 0), or of other names or
                shapes.
        """
        prior = cls.of_any(given)
        if None not in prior.entries and set(prior.entries) != set(shapes):
            absent = sorted(set(shapes) - set(prior.entries))
            strange = sorted(map(str, set(prior.entries) - set(shapes)))
            raise PosteriorError(
                "prior_precision must have one entry per parameter: missing "
                f"{absent[:8] or 'none'}, unknown {strange[:8] or 'none'}"
            )
        for name, value in prior.entries.items():
            where = "" if name is None else f" of {name!r}"
            try:
                if isinstance(value, bool):
                    raise TypeError
                delta = torch.as_tensor(value, dtype=torch.float64)
                torch.empty(shapes.get(name, ()), device="meta").copy_(delta.to("meta"))  # type: ignore[call-overload]
            except (TypeError, ValueError, RuntimeError) as error:
                raise PosteriorError(
                    f"prior_precision{where} must be a number, or one number or tensor per "
                    f"parameter name, got {value!r}"
                ) from error
            high = delta > 0 if positive else delta >= 0
            if not bool((torch.isfinite(delta) & high).all()):
                bound = f"finite and {'above' if positive else 'at least'} 0"
                raise PosteriorError(f"prior_precision{where} must be {bound}, got {value!r}")
        return prior

    @property
    def given(self) -> Any:
        """As a user writes it: one number, or a dict."""
        return self.entries[None] if None in self.entries else dict(self.entries)

    def of(self, name: str) -> float | Tensor:
        """δ of one parameter."""
        value = self.entries.get(name, self.entries.get(None))
        if value is None:
            raise InputError(f"prior_precision has no entry for parameter {name!r}")
        return value

    def like(self, name: str, x: Tensor) -> Tensor:
        """δ of one parameter as a tensor, of x's dtype and device."""
        return torch.as_tensor(self.of(name), dtype=x.dtype, device=x.device)

    def times(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """diag(δ) v (leading batch dimensions allowed)."""
        result = {}
        for name, x in v.items():
            delta = self.of(name)
            result[name] = x * (delta.to(x) if isinstance(delta, Tensor) else delta)
        return result

    def placed(self, params: Mapping[str, Tensor]) -> Prior:
        """With tensors of the parameters' dtypes, on their devices."""
        placed = {
            n: v.detach().to(params[n]) if isinstance(v, Tensor) and n is not None else v
            for n, v in self.entries.items()
        }
        mean = None if self.mean is None else {n: m.to(params[n]) for n, m in self.mean.items()}
        return Prior(placed, mean)

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
        held = {n: tuple(t.shape) for n, t in initial.items() if isinstance(t, Tensor)}
        if wrong := [
            f"{n} {held.get(n, 'absent')}, not {tuple(p.shape)}"
            for n, p in params.items()
            if held.get(n) != tuple(p.shape)
        ]:
            raise PosteriorError(f"initial belongs to another model: {some(wrong)}")
        mean = {n: initial[n].detach().to(p, copy=True) for n, p in params.items()}
        places = narrow(params), narrow(initial)
        if params and all(places[0][n].data_ptr() == places[1][n].data_ptr() for n in params):
            raise PosteriorError(
                "initial is the model's own memory, which training changed: "
                "copy.deepcopy(model.state_dict()) before it"
            )
        for name, m in mean.items():
            if not bool(torch.isfinite(m).all()):
                raise PosteriorError(f"initial holds NaN or inf in {name!r}")
        return Prior(self.entries, mean)

    def start(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """θ₀ of these parameters."""
        m = self.mean
        return {n: torch.zeros_like(p) if m is None else m[n] for n, p in params.items()}

    def gap(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """θ − θ₀."""
        m = self.mean
        return {n: p if m is None else p - m[n] for n, p in params.items()}

    def __truediv__(self, divisor: float) -> Prior:
        return Prior({n: v / divisor for n, v in self.entries.items()}, self.mean)

    @property
    def smallest(self) -> float:
        return min(float(torch.as_tensor(v).min()) for v in self.entries.values())

    @property
    def is_zero(self) -> bool:
        return not any(bool(torch.as_tensor(v).any()) for v in self.entries.values())

    def equals(self, other: Prior, shapes: Shapes) -> bool:
        """Whether the two are the same δ for parameters of these shapes."""
        wide = {n: torch.empty(s, dtype=torch.float64) for n, s in shapes.items()}
        return all(
            torch.equal(self.like(n, x).expand_as(x), other.like(n, x).expand_as(x))
            for n, x in wide.items()
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """δ of the entries that have a number per weight."""
        return {
            n: v
            for n, v in self.entries.items()
            if isinstance(v, Tensor) and v.ndim and n is not None
        }

    @property
    def record(self) -> Any:
        """The others, JSON-able: one number, or a dict."""
        per_weight = self.tensors
        plain = {n: float(v) for n, v in self.entries.items() if n not in per_weight}
        return plain.get(None, plain)

    def numbers(self, names: Any) -> dict[str, float]:
        """One number for each of these parameters.

        Raises:
            PosteriorError: an entry has a number per weight.
        """
        if self.tensors:
            raise PosteriorError(
                "prior_precision must be one number, or one per name, not one per weight"
            )
        return {n: float(self.of(n)) for n in names}


def real_tensors(name: str, tree: Any) -> dict[str, Tensor]:
    """Detached floating-point tensors by name, or :class:`PosteriorError`."""
    if isinstance(tree, Widened):
        return tree
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


def differences(mine: Shapes, theirs: Shapes, who: tuple[str, str]) -> str:
    """The names and shapes in which two sets of parameters differ, for messages."""
    lines = [
        f"{n}: {mine.get(n, 'absent')} in the {who[0]}, {theirs.get(n, 'absent')} in the {who[1]}"
        for n in {**mine, **theirs}
        if mine.get(n) != theirs.get(n)
    ]
    more = f"; and {len(lines) - MOST} more" if len(lines) > MOST else ""
    return "; ".join(lines[:MOST]) + more
