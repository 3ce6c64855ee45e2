"""The leading directions of Σ_i G_iᵀ G_i, found by multiplying it with random vectors.

A block Krylov space (Golub & Underwood, 1977; Musco & Musco, 2015) of the curvature G in the
prior's metric, K = δ^{-1/2} G δ^{-1/2}: Q = orth[K Ω, K² Ω, …] with Ω random, every new block
made orthogonal to all before it, and the eigenvectors of Qᵀ K Q with the largest values θ kept.
G is multiplied through the layers' factored gradients, several vectors in one pass.

How much is missing is known without further products, because tr K = Σ_p diag(G)_p / δ_p takes
one pass: with m = tr K − Σ_kept θ spread over at most n more eigenvalues

    tr(ΛV) = Σ_k λ_k / (1 + λ_k) ≤ Σ_kept θ / (1 + θ) + m / (1 + m / n)      (Jensen)

which is what ``share`` below is measured against: a lower bound on the share of tr(ΛV).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.single import product
from blr_analysis.backprop.terms import Term, products, slices
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures.contract import Tree

WIDEST, NARROWEST = 128, 8  # vectors multiplied in one pass
MUCH = 0.7  # of a unit vector's length left outside of a space: it is made orthogonal once more
OVERSAMPLING = 1.5  # size of the Krylov space over the rank asked for
Passes = Callable[[str], Iterable[list[Term]]]


@dataclass(frozen=True)
class Sketch:
    """An orthonormal basis ``[r, *shape]`` by name, and what it leaves out.

    Attributes:
        basis: B.
        diagonal: diag(G) by name, float64.
        share: of tr(ΛV) that the basis explains, at least.
        multiplied: vectors that were multiplied with G.
    """

    basis: Tree
    diagonal: Tree
    share: float
    multiplied: int


def sketch(
    passes: Passes,
    params: Mapping[str, Tensor],
    prior: Prior,
    *,
    rank: int | None,
    tolerance: float,
    most: int,
    size: int,
) -> Sketch:
    """The leading ``rank`` directions, or as many as explain 1 − ``tolerance`` of tr(ΛV).

    Args:
        passes: label → one sweep over the data: per chunk the terms of the columns G_i.
        params: what the vectors are shaped like.
        rank: how many; None: by ``tolerance``.
        most: never more than these (by ``tolerance`` only).
        size: how many eigenvalues of G can be other than zero.
    """
    curvature = _WhitenedCurvature(passes, params, prior)
    space = _Krylov(curvature, NARROWEST, size)
    wanted = min(rank or size, size)
    space.width = max(NARROWEST, min(WIDEST, wanted // 6))
    full = (
        min(size, most) if rank is None else min(size, int(OVERSAMPLING * rank) + 3 * space.width)
    )
    check = min(full, 2 * space.width)
    while True:
        grown = space.grow()
        if space.rank < check and grown:
            continue
        if rank is None and _share_of_all(space.core, curvature.trace, size) >= 1 - tolerance:
            break
        if not grown or space.rank >= full:
            break
        check = min(full, int(1.2 * space.rank))
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(space.core))
    values = values.clamp_min(0)
    shares = shares_of(values, curvature.trace, size)
    kept = min(most if rank is None else rank, space.rank)
    if rank is None:
        kept = min(kept, int((shares < 1 - tolerance).sum()) + 1)
    kept = min(kept, int((values > space.noise * values[:1]).sum()))
    share = float(shares[kept - 1]) if kept else 1.0
    basis = space.rotated(vectors[:, :kept])
    return Sketch(curvature.unwhitened(basis), curvature.diagonal, share, curvature.multiplied)


def shares_of(values: Tensor, trace: float, size: int) -> Tensor:
    """The least share of tr(ΛV) that the first r directions explain, for every r."""
    explained = (values / (1 + values)).cumsum(0)
    missing = (trace - values.cumsum(0)).clamp_min(0)
    left = size - torch.arange(1, len(values) + 1, device=values.device)
    most = missing / (1 + missing / left.clamp_min(1))
    return torch.where(explained > 0, explained / (explained + most), torch.ones_like(most))


def _share_of_all(core: Tensor, trace: float, size: int) -> float:
    """:func:`shares_of` of all of them, by Σ θ / (1 + θ) = m − tr (1 + Qᵀ K Q)⁻¹."""
    m = len(core)
    root, failed = torch.linalg.cholesky_ex(core + torch.eye(m).to(core))
    if failed:  # negative by rounding
        values = torch.linalg.eigvalsh(core).flip(0).clamp_min(0)
        return float(shares_of(values, trace, size)[-1])
    explained = m - float(torch.cholesky_inverse(root).trace())
    missing = max(0.0, trace - float(core.trace()))
    most = missing / (1 + missing / max(1, size - m))
    return explained / (explained + most) if explained > 0 else 1.0


class _WhitenedCurvature:
    """K = δ^{-1/2} G δ^{-1/2} as products with flat vectors ``[n, P]``."""

    def __init__(self, passes: Passes, params: Mapping[str, Tensor], prior: Prior) -> None:
        self._passes, self._params = passes, params
        self.prior = {n: prior.like(n, p).expand_as(p) for n, p in params.items()}
        self._scale = torch.cat([d.flatten() for d in self.prior.values()]).rsqrt()
        self.diagonal: Tree = {}
        self.trace = 0.0
        self.multiplied = 0

    @property
    def like(self) -> Tensor:
        return self._scale

    def tree(self, flat: Tensor) -> Tree:
        parts = flat.split([p.numel() for p in self._params.values()], dim=1)
        return {
            n: part.reshape(len(flat), *p.shape)
            for (n, p), part in zip(self._params.items(), parts, strict=True)
        }

    def times(self, v: Tensor, label: str) -> Tensor:
        """K v, and on the first pass also diag(G)."""
        stack = self.tree(v * self._scale)
        into = {n: torch.zeros_like(u) for n, u in stack.items()}
        first = not self.multiplied
        if first:
            self.diagonal = {
                n: torch.zeros_like(p, dtype=torch.float64) for n, p in self._params.items()
            }
        for terms in self._passes(label):
            weights = products(terms, stack, dtype=v.dtype)
            for term in terms:
                term.combined(weights, into)
                if first:
                    term.add_square_sum(self.diagonal)
        ranks.total([*into.values(), *(self.diagonal.values() if first else ())])
        self.multiplied += len(v)
        if first:
            self.trace = sum(
                float((d / self.prior[n].double()).sum()) for n, d in self.diagonal.items()
            )
        return torch.cat([u.reshape(len(v), -1) for u in into.values()], dim=1) * self._scale

    def unwhitened(self, q: Tensor) -> Tree:
        """An orthonormal basis of δ^{1/2} q, rows by name."""
        if bool((self._scale != self._scale[0]).any()):
            q = q / self._scale
            for _ in range(2):  # Cholesky QR, twice
                factor = torch.linalg.cholesky(product(q, q.mT).double())
                q = torch.linalg.solve_triangular(factor.to(q), q, upper=False)
        return self.tree(q)


class _Krylov:
    """Orthonormal blocks ``[b, P]`` and the core Qᵀ K Q of those that were multiplied."""

    def __init__(self, curvature: _WhitenedCurvature, width: int, size: int) -> None:
        self._curvature, self.width, self._size = curvature, width, size
        self._generator = torch.Generator().manual_seed(0)  # the same data, the same posterior
        self._blocks: list[Tensor] = []
        self._next: Tensor | None = None
        self._largest = 0.0
        like = curvature.like
        self._sides: list[Tensor] = []  # Qᵀ K of each block, for the one before and itself
        self.noise = 1e-13 if like.dtype == torch.float64 else 4 * torch.finfo(like.dtype).eps

    @property
    def rank(self) -> int:
        return sum(map(len, self._blocks))

    @property
    def core(self) -> Tensor:
        """Qᵀ K Q, ``[m, m]``."""
        upper = self._curvature.like.new_zeros(self.rank, self.rank, dtype=torch.float64)
        m = 0
        for side in self._sides:
            m += side.shape[1]
            upper[m - len(side) : m, m - side.shape[1] : m] = side
        return upper.triu() + upper.triu(1).mT

    def grow(self) -> bool:
        """One more block; False: nothing is left outside of the space."""
        if self._next is None:
            self._next = self._fresh()
        if not len(self._next):
            return False
        block = self._next
        label = f"low-rank directions, {self.rank} so far"
        image = self._curvature.times(block, label)
        self._blocks.append(block)
        # K maps every older block into the space of those up to the one before this: by symmetry
        # nothing of the image lies there.
        near = self._blocks[-2:]
        within = [product(b, image.mT) for b in near]
        for other, share in zip(near, within, strict=True):
            image -= product(share.mT, other)
        self._sides.append(torch.cat(within).double())
        room = self._size - self.rank
        self._next = self._orthonormal(image)[:room]
        if room and not len(self._next) and self._missing():
            self._next = self._fresh()[:room]
        return room > 0 and len(self._next) > 0

    def _missing(self) -> bool:
        trace = self._curvature.trace
        return trace - float(self.core.trace()) > 1e3 * self.noise * trace

    def _fresh(self) -> Tensor:
        """Directions of K Ω for new random vectors Ω."""
        like = self._curvature.like
        noise = torch.randn(self.width, len(like), generator=self._generator, dtype=torch.float64)
        noise = self._without(noise.to(like) / len(like) ** 0.5)
        image = self._curvature.times(noise, "low-rank directions")
        self._largest = max(self._largest, float(image.norm(dim=1).max()))
        return self._orthonormal(self._without(image))

    def _without(self, v: Tensor) -> Tensor:
        """v outside of the space, in its place."""
        for block in self._blocks:
            v -= product(product(v, block.mT), block)
        return v

    def _orthonormal(self, v: Tensor) -> Tensor:
        """An orthonormal basis of v, which is outside of the space but for rounding, without what
        is rounding alone: once more made orthogonal to the space, of unit length by then, and
        again those of which that took much."""
        q, r = torch.linalg.qr(v.mT)
        left, values, _ = torch.linalg.svd(r)
        self._largest = max(self._largest, float(values[0]) if len(values) else 0.0)
        kept = values > self.noise * self._largest
        q = self._without((q @ left[:, kept]).mT.contiguous())
        for _ in range(2):
            lengths = q.norm(dim=1, keepdim=True)
            lost = (lengths < MUCH).squeeze(1)
            if bool(lost.any()):
                q[lost] = self._without(q[lost] / lengths[lost])
        q = q[q.norm(dim=1) >= MUCH]
        return torch.linalg.qr(q.mT)[0].mT.contiguous() if len(q) else q

    def rotated(self, vectors: Tensor) -> Tensor:
        """Vᵀ Q, ``[r, P]``; the blocks are given up."""
        like = self._curvature.like
        turned = like.new_zeros(vectors.shape[1], len(like))
        start = 0
        for i, block in enumerate(self._blocks):
            part = vectors[start : start + len(block)].to(like)
            for rows in slices(len(turned), WIDEST):
                turned[rows] += product(part[:, rows].mT, block)
            start += len(block)
            self._blocks[i] = block[:0]
        return turned
