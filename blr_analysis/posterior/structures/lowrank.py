"""Low rank plus diagonal: the leading directions of the curvature exactly, the rest per weight.

The directions are found by multiplying the curvature G = Σ_i G_iᵀ G_i with random vectors, through
the layers' factored gradients: a block Krylov space (Musco & Musco, 2015) of G in the prior's
metric, K = δ^{-1/2} G δ^{-1/2}, Q = orth[K Ω, K² Ω, …], and of Qᵀ K Q the eigenvectors with the
largest values θ. How much is missing is known without further products, because
tr K = Σ_p diag(G)_p / δ_p takes one pass: with m = tr K − Σ_kept θ spread over at most n more
eigenvalues

    tr(ΛV) = Σ_k λ_k / (1 + λ_k) ≤ Σ_kept θ / (1 + θ) + m / (1 + m / n)      (Jensen)

which is what the record's ``explained`` is measured against: a lower bound on the share of tr(ΛV).
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
WIDEST, NARROWEST = 128, 8  # vectors multiplied in one pass
OVERSAMPLING = 1.5  # size of the Krylov space over the rank asked for
GROWN = 0.95  # of tr(ΛV), that a rank is grown to
MUCH = 0.7  # of a unit vector's length: what is left of one that is outside of the space


class LowRank(Structure):
    """S = D + B C Bᵀ: D diagonal, B P×r with orthonormal columns, C symmetric r×r.

    A group's share is kept as its projection on the span of B, C_G = Bᵀ S_G B, so that taking a
    group out and putting it in stay within the same B and cost r×r arithmetic. What a group has
    outside of the span is not part of its share; it stays in the D that the fit left behind.
    The share of a group is thus too small, never too large: S − S_G keeps D at least, and is
    exact where B spans the whole curvature. A fit puts into D, beside the prior δ, what B leaves
    of the curvature's diagonal.

    With L Lᵀ = BᵀD⁻¹B, c the eigenvalues of Lᵀ C L and H = L⁻ᵀ times its eigenvectors,

        Σ = D⁻¹ − D⁻¹ B H diag(c / (1 + c)) Hᵀ Bᵀ D⁻¹        (Woodbury)
        log|S| = log|D| + Σ log(1 + c)

    and a root of Σ has 1/√(1 + c) − 1 in the same place. Small matrices and all sums that cancel
    are float64, whatever the dtype of B: what is left of |g|²/δ in gᵀΣg can be a millionth of it.

    Args:
        base: D, by parameter name.
        basis: B, ``[r, *shape]`` by parameter name.
        core: C, ``[r, r]``.
    """

    kind = "lowrank"

    def __init__(self, base: Tree, basis: Tree, core: Tensor) -> None:
        self.base, self.basis, self.core = base, basis, core.double()
        self.shapes = {n: tuple(d.shape) for n, d in base.items()}

    @classmethod
    def check_fit(cls, size: int, rank: int | None) -> None:
        if rank is not None and positive_int("rank", rank) >= size:
            said = f"rank must be below the number of parameters, {size:,}, got {rank:,}"
            raise InputError(f"{said}; use structure='full'")

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[LowRank, dict[str, Any]]:
        """The leading directions, what the data have in them, and the rest's diagonal."""
        curvature = WhitenedCurvature(fit)
        size = sum(p.numel() for p in fit.params.values())
        most = max(1, min(RANK_LIMIT, BASIS_LIMIT // size))
        found, share = leading(
            curvature, fit.rank, most, min(size, fit.task.n_data * fit.columns())
        )
        basis, kept = curvature.unwhitened(found), len(found)
        if share < ENOUGH:
            said = f"rank {kept:,} explains {share:.0%} of tr(ΛV): too low for influence"
            warnings.warn(f"{said}; take structure='kron'", stacklevel=5)
        base = {n: torch.zeros_like(p) for n, p in fit.params.items()}
        like = next(iter(fit.params.values()))
        form = cls(base, basis, like.new_zeros(kept, kept)).summed(fit)
        ranks.total([form.core])
        own = form.diagonal()
        rest = {n: (d - own[n]).clamp_min(0).to(like.dtype) for n, d in curvature.diagonal.items()}
        return cls(rest, form.basis, form.core), {"rank": kept, "explained": share}

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
        low = torch.linalg.cholesky(self.metric)
        values, turn = torch.linalg.eigh(low.mT @ self.core @ low)
        return torch.linalg.solve_triangular(low.mT, turn, upper=True), values

    @cached_property
    def _shrinkage(self) -> Tensor:
        """−H diag(c / (1 + c)) Hᵀ."""
        turn, c = self._spectrum
        return (turn * (-c / (1 + c))) @ turn.mT

    def _columns(self) -> Iterator[tuple[str, slice, Tensor]]:
        """B in float64, some weights at a time: name, which, ``[r, weights]``."""
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
        inner = self.core.new_zeros(len(next(iter(flat.values()))), self.rank)
        for name, columns, part in self._columns():
            inner += (flat[name][:, columns] * d[name][columns] ** before) @ part.mT
        result = {n: x * d[n] ** power for n, x in flat.items()}
        inner = inner @ small
        for name, columns, part in self._columns():
            result[name][:, columns] += (inner @ part) * d[name][columns] ** after
        return {n: result[n].reshape(v[n].shape).to(v[n].dtype) for n in self.shapes}

    def times(self, v: Tree) -> Tree:
        return self._apply(v, 0.0, self.core, 0.0, 1.0)

    def solve(self, v: Tree) -> Tree:
        return self._apply(v, -1.0, self._shrinkage, -1.0, -1.0)

    def root_solve(self, v: Tree) -> Tree:
        turn, c = self._spectrum
        return self._apply(v, -0.5, (turn * ((1 + c).rsqrt() - 1)) @ turn.mT, -1.0, -0.5)

    def diagonal(self, *, inverse: bool = False) -> Tree:
        base = {n: d.double().flatten() for n, d in self.base.items()}
        diagonal = {n: 1 / d if inverse else d.clone() for n, d in base.items()}
        small = self._shrinkage if inverse else self.core
        for name, columns, part in self._columns():
            share = (small @ part).mul_(part).sum(0)
            diagonal[name][columns] += share / base[name][columns] ** 2 if inverse else share
        return {n: d.reshape(self.shapes[n]).to(self.base[n].dtype) for n, d in diagonal.items()}

    def logdet(self) -> Tensor:
        parts = [d.double().log().sum() for d in self.base.values()]
        return torch.stack([*parts, self._spectrum[1].log1p().sum()]).sum()

    def gram(self, terms: Sequence[Term]) -> Tensor:
        """J_i Σ J_iᵀ = J_i D⁻¹ J_iᵀ − T_i H diag(c / (1 + c)) Hᵀ T_iᵀ with T_i = J_i D⁻¹ B."""
        if not terms:
            return total([])
        variance = {n: 1 / d.double() for n, d in self.base.items()}
        like = next(iter(self.base.values())).dtype
        grams = []
        for part in pieces(terms, self._examples_at_once(terms)):
            exact = [t.cast(torch.float64) for t in part]
            t = products(exact, self.basis, dtype=torch.float64, scale=variance)
            whole = (t @ self._shrinkage) @ t.mT
            for term in exact:
                whole = term.gram(variance, whole)
            grams.append(whole.to(like))
        return torch.cat(grams)

    def _examples_at_once(self, terms: Sequence[Term]) -> int:
        """So many that the products of all their columns with B are no large matrix."""
        return max(1, HELD // max(1, terms[0].n_columns * self.rank))

    def add(self, terms: Sequence[Term]) -> LowRank:
        core = self.core.clone()
        for part in pieces(terms, self._examples_at_once(terms)) if terms else ():
            t = products(part, self.basis, dtype=next(iter(self.basis.values())).dtype)
            t = t.flatten(0, 1)
            core += product(t.mT, t)  # rounded like t itself, which is small where C is
        return self._with(core)

    def _with(self, core: Tensor) -> LowRank:
        made = LowRank(self.base, self.basis, core)
        if "metric" in vars(self):  # D stays, and with it BᵀD⁻¹B
            made.metric = self.metric
        return made

    def plus(self, other: LowRank, scale: float = 1.0) -> LowRank:  # type: ignore[override]
        core = torch.add(self.core, other.core, alpha=scale)
        if not any(bool(d.any()) for d in other.base.values()):
            return self._with(core)
        base = {n: torch.add(d, other.base[n], alpha=scale) for n, d in self.base.items()}
        return LowRank(base, self.basis, core)

    def plus_prior(self, prior: Prior | Given) -> LowRank:
        delta = Prior.of_any(prior)
        base = {n: d + delta.of(n) for n, d in self.base.items()}
        return LowRank(base, self.basis, self.core)

    def floored(self, prior: Prior | Given) -> tuple[LowRank, float]:
        """D raised to δ and C to its positive part, where they are below."""
        delta = Prior.of_any(prior)
        base = {n: d.clamp_min(delta.of(n)) for n, d in self.base.items()}
        below = sum(int((base[n] * (1 - 1e-6) > d).sum()) for n, d in self.base.items())
        values, turn = torch.linalg.eigh(self.core)
        negative = int((values < -1e-6 * delta.smallest).sum())
        if not below and not negative:
            return self, 0.0
        core = (turn * values.clamp_min(0)) @ turn.mT
        share = (below + negative) / (sum(d.numel() for d in base.values()) + self.rank)
        return LowRank(base, self.basis, core) if below else self._with(core), share

    def tensors(self) -> dict[str, Tensor]:
        basis = {f"{n}.basis": b for n, b in self.basis.items()}
        core = self.core.to(next(iter(self.base.values())).dtype)
        return {**self.base, **basis, "lowrank.core": core}

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        base, basis = (
            {n: t.to(device, dtype) for n, t in tree.items()} for tree in (self.base, self.basis)
        )
        return LowRank(base, basis, self.core.to(device))

    def check(self) -> None:
        Diagonal(self.base).check()
        if not all(bool(torch.isfinite(t).all()) for t in (*self.basis.values(), self.core)):
            raise PosteriorError("the low-rank precision holds NaN or inf")
        if self.rank and not bool((self._spectrum[1] > -1).all()):
            raise PosteriorError("the precision is not positive definite; raise prior_precision")


def leading(
    curvature: WhitenedCurvature, rank: int | None, most: int, size: int
) -> tuple[Tensor, float]:
    """The leading ``rank`` directions of K, ``[r, P]``, or as many as explain 0.95 of tr(ΛV), but
    never more than ``most``, and the share that they explain; of ``size`` eigenvalues at most."""
    width = max(NARROWEST, min(WIDEST, min(rank or size, size) // 6))
    full = min(size, most if rank is None else int(OVERSAMPLING * rank) + 3 * width)
    space, core = curvature.scale.new_zeros(0, len(curvature.scale)), torch.empty(0, 0)
    block = curvature.started(width, space)
    while len(block):
        image = curvature.times(block, f"low-rank directions, {len(space)} so far")
        before, space = len(space), torch.cat([space, block])
        side = product(space, image.mT).double()
        whole = side.new_zeros(len(side), len(side))
        whole[:before, :before], whole[:, before:], whole[before:] = core, side, side.mT
        core, room = whole, size - len(space)
        if len(space) >= full or (rank is None and _shares(core, curvature, size)[-1] >= GROWN):
            break
        block = curvature.outside(image, space)[:room]
        left = curvature.trace - float(core.trace())
        if not len(block) and left > 1e3 * curvature.noise * curvature.trace:
            block = curvature.started(width, space)[:room]
    if not len(space):
        return space, 1.0
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(core))
    shares = _shares(core, curvature, size)
    kept = min(int((values > curvature.noise * values[:1]).sum()), rank or most)
    if rank is None:
        kept = min(kept, int((shares < GROWN).sum()) + 1)
    return product(vectors[:, :kept].mT.to(space), space), float(shares[kept - 1])


def _shares(core: Tensor, curvature: WhitenedCurvature, size: int) -> Tensor:
    """The least share of tr(ΛV) that the first r directions explain, for every r."""
    values, trace = torch.linalg.eigvalsh(core).flip(0).clamp_min(0), curvature.trace
    explained = (values / (1 + values)).cumsum(0)
    missing = (trace - values.cumsum(0)).clamp_min(0)
    left = size - torch.arange(1, len(values) + 1, device=values.device)
    most = missing / (1 + missing / left.clamp_min(1))
    return torch.where(explained > 0, explained / (explained + most), torch.ones_like(most))


class WhitenedCurvature:
    """K = δ^{-1/2} G δ^{-1/2} as products with flat vectors ``[n, P]``; diag(G) and tr K from the
    first of them."""

    def __init__(self, fit: Fit) -> None:
        self._fit, self.diagonal, self.trace = fit, dict[str, Tensor](), 0.0
        each = [torch.full_like(p, fit.prior.of(n) ** -0.5) for n, p in fit.params.items()]
        self.scale = torch.cat([x.flatten() for x in each])
        self._shapes = {n: p.shape for n, p in fit.params.items()}
        exact = self.scale.dtype == torch.float64
        self.noise = 1e-13 if exact else 4 * torch.finfo(self.scale.dtype).eps
        self._largest = 0.0
        self._generator = torch.Generator().manual_seed(0)  # the same data, the same posterior

    def times(self, v: Tensor, label: str) -> Tensor:
        """K v."""
        stack, squares = tree_of(v * self.scale, self._shapes), dict[str, Tensor]()
        into = {n: torch.zeros_like(u) for n, u in stack.items()}
        if not self.diagonal:
            squares = {n: torch.zeros_like(u[0], dtype=torch.double) for n, u in stack.items()}
        for terms in self._fit.passes(label):
            weights = products(terms, stack, dtype=v.dtype)
            for term in terms:
                term.combined(weights, into)
                if squares:
                    term.add_square_sum(squares)
        ranks.total([*into.values(), *squares.values()])
        if squares:
            self.diagonal = squares
            self.trace = sum(float(d.sum()) / self._fit.prior.of(n) for n, d in squares.items())
        return torch.cat([u.reshape(len(v), -1) for u in into.values()], dim=1) * self.scale

    def started(self, width: int, space: Tensor) -> Tensor:
        """Directions of K Ω outside of the space, for new random vectors Ω."""
        size = len(self.scale)
        noise = torch.randn(width, size, generator=self._generator, dtype=torch.float64)
        noise = without(noise.to(self.scale) / size**0.5, space)
        return self.outside(self.times(noise, "low-rank directions"), space)

    def outside(self, v: Tensor, space: Tensor) -> Tensor:
        """An orthonormal basis of what v has outside of the space, less what is rounding."""
        self._largest = max(self._largest, float(v.norm(dim=1).max()))
        for least in (self.noise * self._largest, MUCH):
            q, r = torch.linalg.qr(without(v, space).mT)
            left, values, _ = torch.linalg.svd(r)
            v = (q @ left[:, values > least]).mT.contiguous()
        return v

    def unwhitened(self, q: Tensor) -> Tree:
        """An orthonormal basis of δ^{1/2} q, rows by name."""
        if bool((self.scale != self.scale[0]).any()):
            q = torch.linalg.qr((q / self.scale).mT)[0].mT
        return tree_of(q, self._shapes)


def without(v: Tensor, space: Tensor) -> Tensor:
    """What v has outside of orthonormal rows."""
    return v - product(product(v, space.mT), space) if len(space) else v
