"""The leading directions of Σ_i G_iᵀ G_i, found by multiplying it with random vectors.

A block Krylov space (Musco & Musco, 2015) of the curvature G in the prior's metric,
K = δ^{-1/2} G δ^{-1/2}: Q = orth[K Ω, K² Ω, …] with Ω random, and of Qᵀ K Q the eigenvectors with
the largest values θ. G is multiplied through the layers' factored gradients.

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
from blr_analysis.backprop.terms import Term, Tree, products
from blr_analysis.posterior.prior import Prior

WIDEST, NARROWEST = 128, 8  # vectors multiplied in one pass
OVERSAMPLING = 1.5  # size of the Krylov space over the rank asked for
TOLERANCE = 0.05  # of tr(ΛV), that a rank which is grown may leave
STEP = 1.2  # times the size of the space, from one look at its share to the next
MUCH = 0.7  # of a unit vector's length: what is left of one that is outside of the space
Passes = Callable[[str], Iterable[list[Term]]]


@dataclass(frozen=True)
class Sketch:
    """An orthonormal basis ``[r, *shape]`` by name, and what it leaves out.

    Attributes:
        basis: B.
        diagonal: diag(G) by name, float64.
        share: of tr(ΛV) that the basis explains, at least.
    """

    basis: Tree
    diagonal: Tree
    share: float


def sketch(
    passes: Passes,
    params: Mapping[str, Tensor],
    prior: Prior,
    *,
    rank: int | None,
    most: int,
    size: int,
) -> Sketch:
    """The leading ``rank`` directions, or as many as explain 0.95 of tr(ΛV).

    Args:
        passes: label → one sweep over the data: per chunk the terms of the columns G_i.
        params: what the vectors are shaped like.
        rank: how many; None: enough, but never more than ``most``.
        size: how many eigenvalues of G can be other than zero.
    """
    curvature = _WhitenedCurvature(passes, params, prior)
    width = max(NARROWEST, min(WIDEST, min(rank or size, size) // 6))
    space = _Krylov(curvature, width, size)
    full = min(size, most if rank is None else int(OVERSAMPLING * rank) + 3 * width)
    look = 2 * width
    while space.grow() and len(space.core) < full:
        if rank is None and len(space.core) >= look:
            look = int(STEP * len(space.core))
            values = torch.linalg.eigvalsh(space.core).flip(0).clamp_min(0)
            if shares_of(values, curvature.trace, size)[-1] >= 1 - TOLERANCE:
                break
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(space.core))
    shares = shares_of(values.clamp_min(0), curvature.trace, size)
    kept = int((values > space.noise * values[:1]).sum())
    kept = min(kept, most if rank is None else rank)
    if rank is None:
        kept = min(kept, int((shares < 1 - TOLERANCE).sum()) + 1)
    basis = curvature.unwhitened(space.rotated(vectors[:, :kept]))
    return Sketch(basis, curvature.diagonal, float(shares[kept - 1]) if kept else 1.0)


def shares_of(values: Tensor, trace: float, size: int) -> Tensor:
    """The least share of tr(ΛV) that the first r directions explain, for every r."""
    explained = (values / (1 + values)).cumsum(0)
    missing = (trace - values.cumsum(0)).clamp_min(0)
    left = size - torch.arange(1, len(values) + 1, device=values.device)
    most = missing / (1 + missing / left.clamp_min(1))
    return torch.where(explained > 0, explained / (explained + most), torch.ones_like(most))


class _WhitenedCurvature:
    """K = δ^{-1/2} G δ^{-1/2} as products with flat vectors ``[n, P]``."""

    def __init__(self, passes: Passes, params: Mapping[str, Tensor], prior: Prior) -> None:
        self._passes, self._params = passes, params
        self._prior = prior.numbers(params)
        each = [torch.full_like(p, prior.of(n) ** -0.5).flatten() for n, p in params.items()]
        self.scale = torch.cat(each)
        self.diagonal: Tree = {}
        self.trace = 0.0

    def tree(self, flat: Tensor) -> Tree:
        parts = flat.split([p.numel() for p in self._params.values()], dim=1)
        return {
            n: part.reshape(len(flat), *p.shape)
            for (n, p), part in zip(self._params.items(), parts, strict=True)
        }

    def times(self, v: Tensor, label: str) -> Tensor:
        """K v, and on the first pass also diag(G)."""
        stack = self.tree(v * self.scale)
        into = {n: torch.zeros_like(u) for n, u in stack.items()}
        first, squares = not self.diagonal, dict[str, Tensor]()
        if first:
            squares = {n: torch.zeros_like(p, dtype=torch.double) for n, p in self._params.items()}
        for terms in self._passes(label):
            weights = products(terms, stack, dtype=v.dtype)
            for term in terms:
                term.combined(weights, into)
                if first:
                    term.add_square_sum(squares)
        ranks.total([*into.values(), *squares.values()])
        if first:
            self.diagonal = squares
            self.trace = sum(float(d.sum()) / self._prior[n] for n, d in squares.items())
        return torch.cat([u.reshape(len(v), -1) for u in into.values()], dim=1) * self.scale

    def unwhitened(self, q: Tensor) -> Tree:
        """An orthonormal basis of δ^{1/2} q, rows by name."""
        if bool((self.scale != self.scale[0]).any()):
            q = torch.linalg.qr((q / self.scale).mT)[0].mT
        return self.tree(q)


class _Krylov:
    """Orthonormal blocks ``[b, P]`` of a space, and the core Qᵀ K Q."""

    def __init__(self, curvature: _WhitenedCurvature, width: int, size: int) -> None:
        self._curvature, self._width, self._size = curvature, width, size
        self._generator = torch.Generator().manual_seed(0)  # the same data, the same posterior
        like = curvature.scale
        self.noise = 1e-13 if like.dtype == torch.float64 else 4 * torch.finfo(like.dtype).eps
        self.core = like.new_zeros(0, 0, dtype=torch.float64)
        self._blocks: list[Tensor] = []
        self._largest = 0.0
        self._next = self._fresh()

    def grow(self) -> bool:
        """Take in one more block; False: nothing is left outside of the space."""
        block, before = self._next, len(self.core)
        if not len(block):
            return False
        image = self._curvature.times(block, f"low-rank directions, {before} so far")
        self._blocks.append(block)
        side = torch.cat([product(b, image.mT) for b in self._blocks]).double()
        core = side.new_zeros(len(side), len(side))
        core[:before, :before], core[:, before:], core[before:] = self.core, side, side.mT
        self.core = core
        room, trace = self._size - len(core), self._curvature.trace
        self._next = self._outside(image)[:room]
        if room and not len(self._next) and trace - float(core.trace()) > 1e3 * self.noise * trace:
            self._next = self._fresh()[:room]
        return len(self._next) > 0

    def _fresh(self) -> Tensor:
        """Directions of K Ω for new random vectors Ω."""
        like = self._curvature.scale
        noise = torch.randn(self._width, len(like), generator=self._generator, dtype=torch.float64)
        noise = self._without(noise.to(like) / len(like) ** 0.5)
        return self._outside(self._curvature.times(noise, "low-rank directions"))

    def _without(self, v: Tensor) -> Tensor:
        for block in self._blocks:
            v = v - product(product(v, block.mT), block)
        return v

    def _outside(self, v: Tensor) -> Tensor:
        """An orthonormal basis of what v has outside of the space, less what is rounding."""
        self._largest = max(self._largest, float(v.norm(dim=1).max()))
        for least in (self.noise * self._largest, MUCH):
            q, r = torch.linalg.qr(self._without(v).mT)
            left, values, _ = torch.linalg.svd(r)
            v = (q @ left[:, values > least]).mT.contiguous()
        return v

    def rotated(self, vectors: Tensor) -> Tensor:
        """Vᵀ Q, ``[r, P]``."""
        like = self._curvature.scale
        turned = like.new_zeros(vectors.shape[1], len(like))
        parts = vectors.to(like).split([len(block) for block in self._blocks])
        for part, block in zip(parts, self._blocks, strict=True):
            turned += product(part.mT.contiguous(), block)
        return turned
