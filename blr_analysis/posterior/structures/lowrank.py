"""Low rank plus diagonal: the leading directions of the curvature exactly, the rest per weight.

The directions are found by multiplying the curvature G = Σ_i G_iᵀ G_i with random vectors, through
the layers' factored gradients: a block Krylov space (Musco & Musco, 2015) of G in the prior's
metric, K = δ^{-1/2} G δ^{-1/2}, Q = orth[K Ω, K² Ω, …], and of Qᵀ K Q the eigenvectors with the
largest values θ. How much is missing is known without further products, because
tr K = Σ_p diag(G)_p / δ_p takes one pass. With m = tr K − Σ_kept θ, spread over at most n more
eigenvalues,

    tr(ΛV) = Σ_k λ_k / (1 + λ_k) ≤ Σ_kept θ / (1 + θ) + m / (1 + m / n)      (Jensen)

and the record's ``explained`` is Σ_kept θ / (1 + θ) over this bound: at least so much of tr(ΛV) is
explained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.matmul import product
from blr_analysis.backprop.terms import Term, pieces, products, total
from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.fit import Fit
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures.contract import Structure, Tree, tree_of
from blr_analysis.posterior.structures.diagonal import Diagonal

HELD = 2**22  # numbers of an intermediate result
RANK_LIMIT = 4_000  # for a rank that is grown: its r × r problems take a minute
BASIS_LIMIT = 2**30  # numbers in the basis of a rank that is grown: 4 GB of float32
ENOUGH = 0.9  # of tr(ΛV): what a lower rank leaves out decides in influence
WIDEST = 128  # vectors multiplied in one pass
NARROWEST = 8
OVERSAMPLING = 1.5  # size of the Krylov space over the rank asked for
GROWN = 0.95  # of tr(ΛV): a rank is grown until it explains so much
MUCH = 0.7  # of a unit vector's length: what a vector outside of the space has left there
NEGLIGIBLE = 1e3  # times the rounding of the trace


class LowRank(Structure):
    """S = D + B C Bᵀ: D diagonal, B P×r with orthonormal columns, C symmetric r×r.

    A group's share is its projection on the span of B, C_G = Bᵀ S_G B. Taking a group out and
    putting it in thus stay within the same B and cost r×r arithmetic. What a group has outside of
    the span stays in the D that the fit left behind, so that its share is too small, never too
    large: S − S_G keeps D at least, and is exact where B spans the whole curvature. A fit puts into
    D, beside the prior δ, what B leaves of the curvature's diagonal.

    With L Lᵀ = BᵀD⁻¹B, c the eigenvalues of Lᵀ C L and H = L⁻ᵀ times its eigenvectors,

        Σ = D⁻¹ − D⁻¹ B H diag(c / (1 + c)) Hᵀ Bᵀ D⁻¹        (Woodbury)
        log|S| = log|D| + Σ log(1 + c)

    and a root of Σ has 1/√(1 + c) − 1 in the same place. Small matrices and all sums that cancel
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
        directions, share = leading(curvature, fit.rank, rank_limit, n_eigenvalues)
        rank = len(directions)
        if share < ENOUGH:
            warnings.warn(
                f"rank {rank:,} explains {share:.0%} of tr(ΛV): too low for influence; take "
                "structure='kron'",
                stacklevel=7,  # who calls fit_laplace
            )
        first = next(iter(fit.params.values()))
        nothing = {n: torch.zeros_like(p) for n, p in fit.params.items()}
        basis = curvature.unwhitened(directions)
        form = cls(nothing, basis, first.new_zeros(rank, rank)).summed(fit)
        ranks.total([form.core])
        spanned = form.diagonal()
        rest = {
            n: (d - spanned[n]).clamp_min(0).to(first.dtype) for n, d in curvature.diagonal.items()
        }
        return cls(rest, form.basis, form.core), {"rank": rank, "explained": share}

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
        for name, columns, part in self._columns():
            metric += (part / self.base[name].flatten()[columns].double()) @ part.mT
        return metric

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """H and c, ascending."""
        factor = torch.linalg.cholesky(self.metric)
        c, vectors = torch.linalg.eigh(factor.mT @ self.core @ factor)
        return torch.linalg.solve_triangular(factor.mT, vectors, upper=True), c

    @cached_property
    def _shrinkage(self) -> Tensor:
        """−H diag(c / (1 + c)) Hᵀ."""
        h, c = self._spectrum
        return (h * (-c / (1 + c))) @ h.mT

    def _columns(self) -> Iterator[tuple[str, slice, Tensor]]:
        """B in float64, some weights at a time: name, which weights, ``[r, weights]``."""
        size = max(1, HELD // max(1, self.rank))
        for name, b in self.basis.items():
            flat = b.reshape(self.rank, torch.Size(self.shapes[name]).numel())
            for start in range(0, flat.shape[1], size):
                columns = slice(start, start + size)
                yield name, columns, flat[:, columns].double()

    def _apply(self, v: Tree, before: float, small: Tensor, after: float, power: float) -> Tree:
        """D^power v + D^after B small Bᵀ D^before v."""
        self._take(v)
        flat = {n: v[n].double().reshape(-1, torch.Size(s).numel()) for n, s in self.shapes.items()}
        d = {n: x.double().flatten() for n, x in self.base.items()}
        n_vectors = len(next(iter(flat.values())))
        projected = self.core.new_zeros(n_vectors, self.rank)
        for name, columns, part in self._columns():
            projected += (flat[name][:, columns] * d[name][columns] ** before) @ part.mT
        moved = projected @ small
        result = {n: x * d[n] ** power for n, x in flat.items()}
        for name, columns, part in self._columns():
            result[name][:, columns] += (moved @ part) * d[name][columns] ** after
        return {n: result[n].reshape(v[n].shape).to(v[n].dtype) for n in self.shapes}

    def times(self, v: Tree) -> Tree:
        return self._apply(v, 0.0, self.core, 0.0, 1.0)

    def solve(self, v: Tree) -> Tree:
        return self._apply(v, -1.0, self._shrinkage, -1.0, -1.0)

    def root_solve(self, v: Tree) -> Tree:
        h, c = self._spectrum
        small = (h * ((1 + c).rsqrt() - 1)) @ h.mT
        return self._apply(v, -0.5, small, -1.0, -0.5)

    def diagonal(self, *, inverse: bool = False) -> Tree:
        base = {n: d.double().flatten() for n, d in self.base.items()}
        diagonal = {n: 1 / d if inverse else d.clone() for n, d in base.items()}
        small = self._shrinkage if inverse else self.core
        for name, columns, part in self._columns():
            low_rank = (small @ part).mul_(part).sum(0)
            if inverse:
                low_rank /= base[name][columns] ** 2
            diagonal[name][columns] += low_rank
        return {n: d.reshape(self.shapes[n]).to(self.base[n].dtype) for n, d in diagonal.items()}

    def logdet(self) -> Tensor:
        _, c = self._spectrum
        parts = [d.double().log().sum() for d in self.base.values()]
        return torch.stack([*parts, c.log1p().sum()]).sum()

    def gram(self, terms: Sequence[Term]) -> Tensor:
        """J_i Σ J_iᵀ = J_i D⁻¹ J_iᵀ − T_i H diag(c / (1 + c)) Hᵀ T_iᵀ with T_i = J_i D⁻¹ B."""
        if not terms:
            return total([])
        variance = {n: 1 / d.double() for n, d in self.base.items()}
        dtype = next(iter(self.base.values())).dtype
        grams = []
        for piece in pieces(terms, self._examples_at_once(terms)):
            in_double = [term.cast(torch.float64) for term in piece]
            t = products(in_double, self.basis, dtype=torch.float64, scale=variance)
            gram = (t @ self._shrinkage) @ t.mT
            for term in in_double:
                gram = term.gram(variance, gram)
            grams.append(gram.to(dtype))
        return torch.cat(grams)

    def _examples_at_once(self, terms: Sequence[Term]) -> int:
        """So many examples that the products of all their columns with B are no large matrix."""
        return max(1, HELD // max(1, terms[0].n_columns * self.rank))

    def add(self, terms: Sequence[Term]) -> LowRank:
        if not terms:
            return self
        core = self.core.clone()
        dtype = next(iter(self.basis.values())).dtype
        for piece in pieces(terms, self._examples_at_once(terms)):
            t = products(piece, self.basis, dtype=dtype).flatten(0, 1)
            core += product(t.mT, t)  # rounded like t itself, which is small where C is
        return self._with(core)

    def _with(self, core: Tensor) -> LowRank:
        """The same with another C."""
        changed = LowRank(self.base, self.basis, core)
        if "metric" in vars(self):  # D stays, and with it BᵀD⁻¹B
            changed.metric = self.metric
        return changed

    def plus(self, other: LowRank, scale: float = 1.0) -> LowRank:  # type: ignore[override]
        core = torch.add(self.core, other.core, alpha=scale)
        if not any(bool(d.any()) for d in other.base.values()):
            return self._with(core)
        base = {n: torch.add(d, other.base[n], alpha=scale) for n, d in self.base.items()}
        return LowRank(base, self.basis, core)

    def plus_numbers(self, prior: Prior) -> LowRank:
        base = {n: d + prior.of(n) for n, d in self.base.items()}
        return LowRank(base, self.basis, self.core)

    def floored(self, prior: Prior | Given) -> tuple[LowRank, float]:
        """D raised to δ and C to its positive part, where they are below."""
        delta = Prior.of_any(prior)
        base = {n: d.clamp_min(delta.of(n)) for n, d in self.base.items()}
        below = sum(int((base[n] * (1 - 1e-6) > d).sum()) for n, d in self.base.items())
        values, vectors = torch.linalg.eigh(self.core)
        negative = int((values < -1e-6 * delta.smallest).sum())
        if not below and not negative:
            return self, 0.0
        core = (vectors * values.clamp_min(0)) @ vectors.mT
        raised = LowRank(base, self.basis, core) if below else self._with(core)
        size = sum(d.numel() for d in base.values()) + self.rank
        return raised, (below + negative) / size

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
        if not all(bool(torch.isfinite(t).all()) for t in (*self.basis.values(), self.core)):
            raise PosteriorError("the low-rank precision holds NaN or inf")
        if not self.rank:
            return
        _, c = self._spectrum
        if not bool((c > -1).all()):
            raise PosteriorError("the precision is not positive definite; raise prior_precision")


def leading(
    curvature: WhitenedCurvature, rank: int | None, rank_limit: int, n_eigenvalues: int
) -> tuple[Tensor, float]:
    """The leading directions of K, ``[r, P]``, and the share of tr(ΛV) that they explain at least.

    Args:
        rank: r; None: as many as explain 0.95 of tr(ΛV).
        rank_limit: of a rank that is grown.
        n_eigenvalues: how many of K differ from 0 at most.
    """
    space, core = _krylov(curvature, rank, rank_limit, n_eigenvalues)
    if not len(space):
        return space, 1.0
    ascending, vectors = torch.linalg.eigh(core)
    values = ascending.flip(-1)
    vectors = vectors.flip(-1)
    shares = _shares(core, curvature, n_eigenvalues)
    n_above_noise = int((values > curvature.noise * values[:1]).sum())
    r = min(n_above_noise, rank or rank_limit)
    if rank is None:
        n_needed = int((shares < GROWN).sum()) + 1
        r = min(r, n_needed)
    return product(vectors[:, :r].mT.to(space), space), float(shares[r - 1])


def _krylov(
    curvature: WhitenedCurvature, rank: int | None, rank_limit: int, n_eigenvalues: int
) -> tuple[Tensor, Tensor]:
    """A block Krylov space Q ``[q, P]`` of K, large enough for :func:`leading`, and Q K Qᵀ."""
    width = max(NARROWEST, min(WIDEST, min(rank or n_eigenvalues, n_eigenvalues) // 6))
    enough = rank_limit if rank is None else int(OVERSAMPLING * rank) + 3 * width
    full = min(n_eigenvalues, enough)
    space = curvature.scale.new_zeros(0, len(curvature.scale))
    core = torch.empty(0, 0)
    block = curvature.started(width, space)
    while len(block):
        image = curvature.times(block, f"low-rank directions, {len(space)} so far")
        space = torch.cat([space, block])
        core = _bordered(core, product(space, image.mT).double())
        if len(space) >= full:
            break
        if rank is None and _shares(core, curvature, n_eigenvalues)[-1] >= GROWN:
            break
        room = n_eigenvalues - len(space)
        block = curvature.outside(image, space)[:room]
        missing = curvature.trace - float(core.trace())
        if not len(block) and missing > NEGLIGIBLE * curvature.noise * curvature.trace:
            block = curvature.started(width, space)[:room]
    return space, core


def _bordered(core: Tensor, side: Tensor) -> Tensor:
    """A symmetric matrix with further columns ``side``, which reach down to its new corner."""
    size = len(core)
    larger = side.new_zeros(len(side), len(side))
    larger[:size, :size] = core
    larger[:, size:] = side
    larger[size:] = side.mT
    return larger


def _shares(core: Tensor, curvature: WhitenedCurvature, n_eigenvalues: int) -> Tensor:
    """The least share of tr(ΛV) that the first r directions explain, for every r."""
    values = torch.linalg.eigvalsh(core).flip(0).clamp_min(0)
    explained = (values / (1 + values)).cumsum(0)
    missing = (curvature.trace - values.cumsum(0)).clamp_min(0)
    n_missing = n_eigenvalues - torch.arange(1, len(values) + 1, device=values.device)
    at_most = missing / (1 + missing / n_missing.clamp_min(1))
    shares = explained / (explained + at_most)
    return torch.where(explained > 0, shares, torch.ones_like(shares))


class WhitenedCurvature:
    """K = δ^{-1/2} G δ^{-1/2} as products with flat vectors ``[n, P]``.

    Attributes:
        scale: δ^{-1/2} of every weight, ``[P]``.
        noise: the relative rounding of a product.
        diagonal: diag(G) by name, in float64, from the first product on.
        trace: tr K, from the first product on.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self.diagonal: Tree = {}
        self.trace = 0.0
        scales = [torch.full_like(p, fit.prior.of(n) ** -0.5) for n, p in fit.params.items()]
        self.scale = torch.cat([x.flatten() for x in scales])
        self._shapes = {n: p.shape for n, p in fit.params.items()}
        is_double = self.scale.dtype == torch.float64
        self.noise = 1e-13 if is_double else 4 * torch.finfo(self.scale.dtype).eps
        self._largest = 0.0
        self._generator = torch.Generator().manual_seed(0)  # the same data, the same posterior

    def times(self, v: Tensor, label: str) -> Tensor:
        """K v."""
        stack = tree_of(v * self.scale, self._shapes)
        result = {n: torch.zeros_like(u) for n, u in stack.items()}
        squares: Tree = {}
        if not self.diagonal:
            squares = {n: torch.zeros_like(u[0], dtype=torch.double) for n, u in stack.items()}
        for terms in self._fit.passes(label):
            weights = products(terms, stack, dtype=v.dtype)
            for term in terms:
                term.combined(weights, result)
                if squares:
                    term.add_square_sum(squares)
        ranks.total([*result.values(), *squares.values()])
        if squares:
            self.diagonal = squares
            self.trace = sum(float(d.sum()) / self._fit.prior.of(n) for n, d in squares.items())
        return torch.cat([u.reshape(len(v), -1) for u in result.values()], dim=1) * self.scale

    def started(self, width: int, space: Tensor) -> Tensor:
        """Directions of K Ω outside of the space, for new random vectors Ω."""
        size = len(self.scale)
        normal = torch.randn(width, size, generator=self._generator, dtype=torch.float64)
        omega = without(normal.to(self.scale) / size**0.5, space)
        return self.outside(self.times(omega, "low-rank directions"), space)

    def outside(self, v: Tensor, space: Tensor) -> Tensor:
        """An orthonormal basis of what v has outside of the space, without what is rounding."""
        self._largest = max(self._largest, float(v.norm(dim=1).max()))
        basis = v
        for threshold in (self.noise * self._largest, MUCH):  # twice is enough
            q, r = torch.linalg.qr(without(basis, space).mT)
            left, values, _ = torch.linalg.svd(r)
            basis = (q @ left[:, values > threshold]).mT.contiguous()
        return basis

    def unwhitened(self, q: Tensor) -> Tree:
        """An orthonormal basis of δ^{1/2} q, rows by name."""
        is_one_number = bool((self.scale == self.scale[0]).all())
        if not is_one_number:
            q = torch.linalg.qr((q / self.scale).mT)[0].mT
        return tree_of(q, self._shapes)


def without(v: Tensor, space: Tensor) -> Tensor:
    """What v has outside of orthonormal rows."""
    return v - product(product(v, space.mT), space) if len(space) else v
