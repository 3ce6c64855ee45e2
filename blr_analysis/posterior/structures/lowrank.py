"""Low rank plus diagonal: the leading directions of the curvature exactly, the rest per weight.

:mod:`~blr_analysis.posterior.structures.leading_directions` finds the directions, and says which
share of tr(ΛV) they explain at least (``explained`` in the posterior's record).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.matmul import product
from blr_analysis.backprop.terms import Term, pieces, products, total
from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError, PosteriorError, warn_user
from blr_analysis.posterior.fit import Fit
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures.contract import Structure, Tree
from blr_analysis.posterior.structures.diagonal import Diagonal
from blr_analysis.posterior.structures.leading_directions import WhitenedCurvature, leading

NUMBERS_AT_ONCE = 2**22  # of an intermediate result
RANK_LIMIT = 4_000  # for a rank that is grown: its r × r problems take a minute
BASIS_LIMIT = 2**30  # numbers in the basis of a rank that is grown: 4 GB of float32
ENOUGH_EXPLAINED = 0.9  # of tr(ΛV): influence depends on what a lower rank leaves out
SLACK = 1e-6  # a number is below the prior where it is by more than this share


class LowRank(Structure):
    """S = D + B C Bᵀ: D diagonal, B P×r with orthonormal columns, C symmetric r×r.

    A group G of examples adds C_G = Bᵀ S_G B to C, its projection on the span of B. Taking a group
    out and putting it back in thus stay within the same B, and cost r×r arithmetic. D, which a fit
    fills with the prior δ and with what B leaves of the curvature's diagonal, stays as it is.
    So a group's share is exact where B spans the whole curvature, and elsewhere too small, never
    too large.

    With L Lᵀ = BᵀD⁻¹B, c the eigenvalues of Lᵀ C L and H = L⁻ᵀ times its eigenvectors,

        Σ = D⁻¹ − D⁻¹ B H diag(c / (1 + c)) Hᵀ Bᵀ D⁻¹        (Woodbury)
        log|S| = log|D| + Σ log(1 + c)

    A root of Σ has 1/√(1 + c) − 1 in place of −c / (1 + c). Small matrices and all sums that cancel
    are in float64, whatever the dtype of B: gᵀΣg can be a millionth of |g|²/δ.

    Args:
        base: D, by parameter name.
        basis: B, ``[r, *shape]`` by parameter name.
        core: C, ``[r, r]``.
    """

    kind = "lowrank"

    def __init__(self, base: Tree, basis: Tree, core: Tensor) -> None:
        self.base = base
        self.basis = basis
        self.core = core.double()
        self.shapes = {n: tuple(d.shape) for n, d in base.items()}

    @classmethod
    def check_fit(cls, size: int, rank: int | None) -> None:
        if rank is not None and positive_int("rank", rank) >= size:
            raise InputError(
                f"rank must be below the number of parameters, {size:,}, got {rank:,}; use "
                "structure='full'"
            )

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[LowRank, dict[str, Any]]:
        """The leading directions, what the data have in them, and the rest's diagonal."""
        curvature = WhitenedCurvature(fit)
        size = sum(p.numel() for p in fit.params.values())
        rank_limit = max(1, min(RANK_LIMIT, BASIS_LIMIT // size))
        n_eigenvalues = min(size, fit.task.n_data * fit.columns())
        directions, explained = leading(curvature, fit.rank, rank_limit, n_eigenvalues)
        rank = len(directions)
        if explained < ENOUGH_EXPLAINED:
            warn_user(
                f"rank {rank:,} explains {explained:.0%} of tr(ΛV): too low for influence; take "
                "structure='kron'"
            )
        some_weights = next(iter(fit.params.values()))
        zero_base = {n: torch.zeros_like(p) for n, p in fit.params.items()}
        zero_core = some_weights.new_zeros(rank, rank)
        form = cls(zero_base, curvature.unwhitened(directions), zero_core).summed(fit)
        ranks.total([form.core])
        base = _diagonal_left(curvature.diagonal, form.diagonal(), some_weights.dtype)
        return cls(base, form.basis, form.core), {"rank": rank, "explained": explained}

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> LowRank:
        basis = {n: tensors[f"{n}.basis"] for n in names}
        return cls({n: tensors[n] for n in names}, basis, tensors["lowrank.core"])

    @property
    def rank(self) -> int:
        """r."""
        return len(self.core)

    @cached_property
    def metric(self) -> Tensor:
        """BᵀD⁻¹B in float64."""
        metric = torch.zeros_like(self.core)
        for name, weights, basis in self._basis_parts():
            base = self.base[name].flatten()[weights].double()
            metric += (basis / base) @ basis.mT
        return metric

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """H and c, ascending."""
        factor = torch.linalg.cholesky(self.metric)
        c, eigenvectors = torch.linalg.eigh(factor.mT @ self.core @ factor)
        h = torch.linalg.solve_triangular(factor.mT, eigenvectors, upper=True)
        return h, c

    @cached_property
    def _shrinkage(self) -> Tensor:
        """−H diag(c / (1 + c)) Hᵀ, ``[r, r]``."""
        h, c = self._spectrum
        shrinkage = -c / (1 + c)
        return (h * shrinkage) @ h.mT

    def _basis_parts(self) -> Iterator[tuple[str, slice, Tensor]]:
        """Bᵀ in float64, some weights of a parameter at a time.

        Yields:
            The parameter's name, a slice of its flattened weights, and Bᵀ there ``[r, weights]``.
        """
        size = max(1, NUMBERS_AT_ONCE // max(1, self.rank))
        for name, basis in self.basis.items():
            n_weights = torch.Size(self.shapes[name]).numel()
            rows = basis.reshape(self.rank, n_weights)
            for start in range(0, n_weights, size):
                weights = slice(start, start + size)
                yield name, weights, rows[:, weights].double()

    def _times_matrix(
        self, v: Tree, *, power: float, core: Tensor, left_power: float, right_power: float
    ) -> Tree:
        """D^power v + D^left_power B core Bᵀ D^right_power v."""
        self._check_vector(v)
        base = self._flat_base()
        rows = self._rows(v)
        n_vectors = len(next(iter(rows.values())))
        projections = self.core.new_zeros(n_vectors, self.rank)
        for name, weights, basis in self._basis_parts():
            scaled = rows[name][:, weights] * base[name][weights] ** right_power
            projections += scaled @ basis.mT
        coefficients = projections @ core
        images = {name: x * base[name] ** power for name, x in rows.items()}
        for name, weights, basis in self._basis_parts():
            low_rank = coefficients @ basis
            images[name][:, weights] += low_rank * base[name][weights] ** left_power
        return {n: images[n].reshape(v[n].shape).to(v[n].dtype) for n in self.shapes}

    def _rows(self, v: Tree) -> Tree:
        """Vectors in float64, ``[vectors, weights]`` by parameter name."""
        rows = {}
        for name, shape in self.shapes.items():
            n_weights = torch.Size(shape).numel()
            rows[name] = v[name].double().reshape(-1, n_weights)
        return rows

    def _flat_base(self) -> Tree:
        """D in float64, ``[weights]`` by parameter name."""
        return {name: d.double().flatten() for name, d in self.base.items()}

    def times(self, v: Tree) -> Tree:
        return self._times_matrix(v, power=1.0, core=self.core, left_power=0.0, right_power=0.0)

    def solve(self, v: Tree) -> Tree:
        core = self._shrinkage
        return self._times_matrix(v, power=-1.0, core=core, left_power=-1.0, right_power=-1.0)

    def root_solve(self, v: Tree) -> Tree:
        h, c = self._spectrum
        shrinkage = (1 + c).rsqrt() - 1
        core = (h * shrinkage) @ h.mT
        return self._times_matrix(v, power=-0.5, core=core, left_power=-1.0, right_power=-0.5)

    def diagonal(self, *, inverse: bool = False) -> Tree:
        base = self._flat_base()
        diagonal = {n: 1 / d if inverse else d.clone() for n, d in base.items()}
        core = self._shrinkage if inverse else self.core
        for name, weights, basis in self._basis_parts():
            low_rank = (core @ basis).mul_(basis).sum(0)
            if inverse:
                low_rank /= base[name][weights] ** 2
            diagonal[name][weights] += low_rank
        return {n: d.reshape(self.shapes[n]).to(self.base[n].dtype) for n, d in diagonal.items()}

    def logdet(self) -> Tensor:
        _, c = self._spectrum
        parts = [d.double().log().sum() for d in self.base.values()]
        return torch.stack([*parts, c.log1p().sum()]).sum()

    def gram(self, terms: Sequence[Term]) -> Tensor:
        """J_i Σ J_iᵀ = J_i D⁻¹ J_iᵀ − T_i H diag(c / (1 + c)) Hᵀ T_iᵀ with T_i = J_i D⁻¹ B."""
        if not terms:
            return total([])
        base_variance = {n: 1 / d.double() for n, d in self.base.items()}
        dtype = next(iter(self.base.values())).dtype
        grams = []
        for piece in pieces(terms, self._examples_at_once(terms)):
            in_double = [term.cast(torch.float64) for term in piece]
            t = products(in_double, self.basis, dtype=torch.float64, scale=base_variance)
            gram = (t @ self._shrinkage) @ t.mT
            for term in in_double:
                gram = term.gram(base_variance, gram)
            grams.append(gram.to(dtype))
        return torch.cat(grams)

    def _examples_at_once(self, terms: Sequence[Term]) -> int:
        """How many examples are multiplied with B at once, so that the product stays small."""
        numbers_of_example = terms[0].n_columns * self.rank
        return max(1, NUMBERS_AT_ONCE // max(1, numbers_of_example))

    def add(self, terms: Sequence[Term]) -> LowRank:
        if not terms:
            return self
        core = self.core.clone()
        dtype = next(iter(self.basis.values())).dtype
        for piece in pieces(terms, self._examples_at_once(terms)):
            t = products(piece, self.basis, dtype=dtype).flatten(0, 1)  # J_i B of all columns
            core += product(t.mT, t)  # in the dtype of B: t is small where C is
        return self._with_core(core)

    def _with_core(self, core: Tensor) -> LowRank:
        """The same matrix with another C; BᵀD⁻¹B is taken over where it is known already."""
        changed = LowRank(self.base, self.basis, core)
        metric_is_known = "metric" in vars(self)
        if metric_is_known:
            changed.metric = self.metric
        return changed

    def plus(self, other: LowRank, scale: float = 1.0) -> LowRank:  # type: ignore[override]
        core = torch.add(self.core, other.core, alpha=scale)
        other_has_no_base = not any(bool(d.any()) for d in other.base.values())
        if other_has_no_base:
            return self._with_core(core)
        base = {n: torch.add(d, other.base[n], alpha=scale) for n, d in self.base.items()}
        return LowRank(base, self.basis, core)

    def plus_numbers(self, prior: Prior) -> LowRank:
        base = {n: d + prior.of(n) for n, d in self.base.items()}
        return LowRank(base, self.basis, self.core)

    def floored(self, prior: Prior | Given) -> tuple[LowRank, float]:
        """D raised to δ, and C to its positive part, where they are below."""
        delta = Prior.of_any(prior)
        base = {n: d.clamp_min(delta.of(n)) for n, d in self.base.items()}
        n_raised = 0
        for name, d in self.base.items():
            was_below = base[name] * (1 - SLACK) > d
            n_raised += int(was_below.sum())
        eigenvalues, eigenvectors = torch.linalg.eigh(self.core)
        n_negative = int((eigenvalues < -SLACK * delta.smallest).sum())
        if n_raised == 0 and n_negative == 0:
            return self, 0.0
        core = (eigenvectors * eigenvalues.clamp_min(0)) @ eigenvectors.mT
        floored = LowRank(base, self.basis, core) if n_raised else self._with_core(core)
        size = sum(d.numel() for d in base.values()) + self.rank
        return floored, (n_raised + n_negative) / size

    def tensors(self) -> dict[str, Tensor]:
        basis = {f"{n}.basis": b for n, b in self.basis.items()}
        core = self.core.to(next(iter(self.base.values())).dtype)
        return {**self.base, **basis, "lowrank.core": core}

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        base = {n: d.to(device, dtype) for n, d in self.base.items()}
        basis = {n: b.to(device, dtype) for n, b in self.basis.items()}
        return LowRank(base, basis, self.core.to(device))

    def check(self) -> None:
        Diagonal(self.base).check()
        tensors = (*self.basis.values(), self.core)
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            raise PosteriorError("the low-rank precision holds NaN or inf")
        if not self.rank:
            return
        _, c = self._spectrum
        if not bool((c > -1).all()):
            raise PosteriorError("the precision is not positive definite; raise prior_precision")


def _diagonal_left(curvature: Tree, spanned: Tree, dtype: torch.dtype) -> Tree:
    """The curvature's diagonal less that of B C Bᵀ, nowhere below 0, by parameter name."""
    return {n: (d - spanned[n]).clamp_min(0).to(dtype) for n, d in curvature.items()}
