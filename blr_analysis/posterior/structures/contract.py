"""Shapes that a precision matrix S can take: diagonal, Kronecker, low rank, full. One contract.

A structure is a symmetric positive matrix over named parameters. Vectors are dicts of tensors by
parameter name, with any number of leading (batch) dimensions. With S = R Rᵀ:

    times S v · solve Σ v · root_solve R⁻ᵀ v (Σ = R⁻ᵀ R⁻¹) · logdet log|S|
    gram    g_iᵀ Σ g_i' for factored gradients (a layer's term, never a P-vector per example)
    add     S + Σ_i g_i g_iᵀ, projected on the structure

Some structures have a basis in which Σ is cheaper to apply to many gradients. ``into_basis`` turns
gradients into it, ``basis_solve`` applies Σ there, and ``backward`` turns the result back. The
basis of all other structures is that of the parameters.

A new structure subclasses :class:`Structure` in a file of its own, which the room's ``__init__``
imports: its ``kind`` is what ``fit_laplace(structure=...)`` and saved files call it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.terms import Term, Tree, slices, total
from blr_analysis.backprop.tree import lead_of
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.fit import Fit
from blr_analysis.posterior.prior import FormPrior, Given, Prior

ROUNDING = 1e-6  # an eigenvalue is below the prior's where it is by more than this share
KINDS: dict[str, type[Structure]] = {}  # every structure by its kind
AT_ONCE = 2**24  # numbers in the unit vectors that a matrix is multiplied with at once, at most


class Structure(ABC):
    """A symmetric positive matrix over named parameters, in some sparse form."""

    kind: str
    shapes: dict[str, tuple[int, ...]]
    of_inputs = False  # whether it is fitted to the inputs of layers, and the loss plays no part
    draws_labels = True  # whether it may be fitted to drawn labels where outputs are many

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    @classmethod
    @abstractmethod
    def fitted(cls, fit: Fit) -> tuple[Self, dict[str, Any]]:
        """Σ_i G_iᵀ G_i in this structure, and what the posterior's record says of the fit."""

    def summed(self, fit: Fit) -> Self:
        """S + Σ_i G_iᵀ G_i over one sweep of this rank's examples."""
        form = self
        for terms in fit.passes(f"{self.kind} {fit.curvature}"):
            form = form.add(terms)
        return form

    @classmethod
    def of_rows(cls, params: Tree, rows: Iterator[tuple[slice, Tensor]]) -> Self:
        """A symmetric matrix, not always positive, from some of its rows ``[n, P]`` at a time.

        Raises:
            InputError: this structure is found in gradients only.
        """
        raise InputError(f"curvature='exact' needs structure='diag' or 'full', not {cls.kind!r}")

    @classmethod
    def check_fit(cls, size: int, rank: int | None) -> None:
        """Raise :class:`InputError` where P parameters cannot be fitted with these choices."""
        if rank is not None:
            raise InputError(f"rank belongs to structure='lowrank', not {cls.kind!r}")

    @classmethod
    @abstractmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> Self:
        """What :meth:`tensors` and :meth:`record` wrote."""

    def record(self) -> dict[str, Any]:
        """What :meth:`read` needs beside the tensors, JSON-able."""
        return {"shapes": {name: list(shape) for name, shape in self.shapes.items()}}

    @property
    def per_weight(self) -> Tree | None:
        """One number per weight, where that is all of S."""
        return None

    @property
    def basis_precision(self) -> Tree | None:
        """One number per entry of a vector in the basis, where that is all of S."""
        return self.per_weight

    @abstractmethod
    def times(self, v: Tree) -> Tree:
        """S v."""

    @abstractmethod
    def solve(self, v: Tree) -> Tree:
        """Σ v = S⁻¹ v."""

    @abstractmethod
    def root_solve(self, v: Tree) -> Tree:
        """R⁻ᵀ v, where Σ = R⁻ᵀ R⁻¹: turns standard normal noise into a draw."""

    @abstractmethod
    def diagonal(self, *, inverse: bool = False) -> Tree:
        """The diagonal entries of S, or of Σ."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |S|, a scalar."""

    @abstractmethod
    def gram(self, terms: Sequence[Term]) -> Tensor:
        """G_i Σ G_iᵀ from the layers' factored gradients, ``[B, K, K]``."""

    def zeros(self) -> Self:
        """The zero matrix in the same basis."""
        return self.plus(self, -1.0)

    @abstractmethod
    def add(self, terms: Sequence[Term]) -> Self:
        """S + Σ_i G_iᵀ G_i, projected on the structure."""

    @abstractmethod
    def plus(self, other: Self, scale: float = 1.0) -> Self:
        """S + scale · S', two matrices in the same basis."""

    def plus_prior(self, prior: Prior | Given) -> Self:
        """S + diag(δ), or S + S₀ of a prior with a structure.

        Raises:
            InputError: S₀ cannot be added to this structure.
        """
        prior = Prior.of_any(prior)
        if not isinstance(prior, FormPrior):
            return self.plus_numbers(prior)
        if prior.form.kind == self.kind:
            return self.plus(prior.form)
        return self.plus_other(prior.form)

    @abstractmethod
    def plus_numbers(self, prior: Prior) -> Self:
        """S + diag(δ) of one δ for each parameter."""

    def plus_other(self, form: Structure) -> Self:
        """S + S₀ of another structure.

        Raises:
            InputError: this structure has no room for it.
        """
        raise InputError(
            f"a prior of structure {form.kind!r} cannot be added to {self.kind!r}: fit with "
            f"structure={form.kind!r}, or 'full'"
        )

    @abstractmethod
    def floored(self, prior: Prior | Given) -> tuple[Self, float]:
        """S with all eigenvalues raised to the prior's at least, and the share that was raised."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is stored on disk, by parameter name and suffix."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same matrix on another device, in another dtype."""

    @abstractmethod
    def check(self) -> None:
        """Raise :class:`PosteriorError` unless finite and positive, naming the parameter."""

    def paired(self, terms: Sequence[Term]) -> list[tuple[Term, Basis | None]]:
        """Each term with the basis into which its layer is turned; None: the parameters' own."""
        return [(term, None) for term in terms]

    def into_basis(self, terms: Sequence[Term]) -> list[Term]:
        """Uᵀ G of every term, named and shaped as in :meth:`basis_shapes`."""
        return [t if basis is None else t.rotated(basis) for t, basis in self.paired(terms)]

    def backward(self, v: Tree) -> Tree:
        """U v, out of the basis, in the parameters' shapes."""
        return v

    def basis_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a vector in the basis."""
        return dict(self.shapes)

    def basis_solve(self, v: Tree) -> Tree:
        """Σ v in the basis, for v with any leading dimensions."""
        return self.solve(v)

    def square_sums(self, terms: Sequence[Term]) -> Tree:
        """diag(Uᵀ Σ_i G_iᵀ G_i U), in the basis."""
        return {n: s for term in self.into_basis(terms) for n, s in term.square_sum().items()}

    def rotation_cost(self) -> tuple[int, int]:
        """How many multiplications turn a gradient into the basis: a factored and a dense one."""
        return 0, 0

    def _check_vector(self, v: Tree) -> None:
        """Raise unless ``v`` has every parameter, in its shape but for leading dimensions."""
        for name, shape in self.shapes.items():
            lead_of(name, v.get(name), shape)


class Spectral(Structure):
    """S = U diag(s) Uᵀ with an orthogonal U that is cheap to apply; s are positive numbers."""

    values: dict[str, Tensor]

    def forward(self, v: Tree) -> Tree:
        """Uᵀ v, in the shapes of ``values``."""
        return v

    def with_values(self, values: dict[str, Tensor]) -> Self:
        """The same basis with other eigenvalues."""
        return replace(self, values=values)  # type: ignore[type-var]

    @abstractmethod
    def prior_values(self, prior: Prior | Given) -> dict[str, float]:
        """δ in this basis."""

    def _power(self, v: Tree, power: float) -> Tree:
        """U diag(s)^power Uᵀ v."""
        self._check_vector(v)
        in_basis = self.forward(v)
        return self.backward({k: in_basis[k] * s**power for k, s in self.values.items()})

    def summed(self, fit: Fit) -> Self:
        """S + Σ_i G_iᵀ G_i over one sweep of all ranks' examples."""
        sums = {n: torch.zeros_like(s) for n, s in self.values.items()}
        # A fit that looks for δ sweeps for values of two kinds; other fits name them just "values".
        file_without_kind = fit.unfinished.get("values")
        unfinished = fit.unfinished.get(f"{self.kind} values", file_without_kind)
        label = f"{self.kind} {fit.curvature}"
        for terms in fit.passes(label, unfinished=unfinished, by_layer=True):
            for term, basis in self.paired(terms):
                term_in_basis = term if basis is None else term.rotated(basis)
                term_in_basis.add_square_sum(sums)
            if unfinished is not None:
                unfinished.follow(fit.with_gradient(sums))
        ranks.total(sums.values())
        return self.with_values(
            {n: sums[n].mul_(fit.scale).add_(s) for n, s in self.values.items()}
        )

    def times(self, v: Tree) -> Tree:
        return self._power(v, 1.0)

    def solve(self, v: Tree) -> Tree:
        return self._power(v, -1.0)

    def root_solve(self, v: Tree) -> Tree:
        return self._power(v, -0.5)

    def basis_shapes(self) -> dict[str, tuple[int, ...]]:
        return {k: tuple(s.shape) for k, s in self.values.items()}

    @property
    def basis_precision(self) -> Tree:
        return self.values

    def basis_solve(self, v: Tree) -> Tree:
        return {k: v[k] / s for k, s in self.values.items()}

    def gram(self, terms: Sequence[Term]) -> Tensor:
        sums: Tensor | None = None
        for term, basis in self.paired(terms):  # 1/S is in memory for one layer at a time
            if basis is None:
                sums = term.gram({n: 1 / self.values[n] for n in term.names}, sums)
            else:
                sums = term.rotated_gram(basis, 1 / self.values[basis.key], sums)
        return total([]) if sums is None else sums

    def logdet(self) -> Tensor:
        parts = [s.double().log().sum() for s in self.values.values()]
        return torch.stack(parts).sum()

    def add(self, terms: Sequence[Term]) -> Self:
        sums = self.square_sums(terms)
        return self.with_values(
            {k: s + sums[k] if k in sums else s for k, s in self.values.items()}
        )

    def plus(self, other: Self, scale: float = 1.0) -> Self:  # type: ignore[override]
        return self.with_values(
            {k: torch.add(s, other.values[k], alpha=scale) for k, s in self.values.items()}
        )

    def plus_numbers(self, prior: Prior) -> Self:
        delta = self.prior_values(prior)
        return self.with_values({k: s + delta[k] for k, s in self.values.items()})

    def floored(self, prior: Prior | Given) -> tuple[Self, float]:
        delta = self.prior_values(prior)
        raised = {k: s.clamp_min(delta[k]) for k, s in self.values.items()}
        n_below = 0
        for key, s in self.values.items():
            is_below = s < delta[key] * (1 - ROUNDING)
            n_below += int(is_below.sum())
        size = sum(s.numel() for s in self.values.values())
        return self.with_values(raised), n_below / size

    def check(self) -> None:
        for name, s in self.values.items():
            if not bool(torch.isfinite(s).all()):
                raise PosteriorError(f"the precision of {name!r} holds NaN or inf")
            if not bool((s > 0).all()):
                fault = f"the precision of {name!r} must be positive, not {float(s.min()):.3g}"
                raise PosteriorError(f"{fault}; give a prior_precision above 0")


def tree_of(flat: Tensor, shapes: Mapping[str, Sequence[int]]) -> Tree:
    """A vector ``[..., P]``, or several, as tensors ``[..., *shape]`` by parameter name."""
    lead = flat.shape[:-1]
    parts = flat.split([torch.Size(shape).numel() for shape in shapes.values()], dim=-1)
    named_parts = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape((*lead, *shape)) for (name, shape), part in named_parts}


def unit_rows(params: Tree, times: Callable[[Tree], Tree]) -> Iterator[tuple[slice, Tensor]]:
    """The rows of a symmetric matrix ``[P, P]``, as its products with unit vectors.

    Yields:
        Which of the P rows these are, and the rows ``[n, P]``.
    """
    size = sum(p.numel() for p in params.values())
    first = next(iter(params.values()))
    shapes = {n: p.shape for n, p in params.items()}
    for rows in slices(size, AT_ONCE // max(1, size)):
        unit_vectors = first.new_zeros(rows.stop - rows.start, size)
        unit_vectors[:, rows].fill_diagonal_(1)
        products = times(tree_of(unit_vectors, shapes))
        yield rows, torch.cat([x.reshape(len(x), -1) for x in products.values()], dim=1)
