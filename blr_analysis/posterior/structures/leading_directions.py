"""Finds the directions in which the data say most, for a low-rank posterior.

The curvature G = Σ_i G_iᵀ G_i is never formed. It is multiplied with random vectors Ω, through the
layers' factored gradients, in the prior's metric: K = δ^{-1/2} G δ^{-1/2}. The products span a
block Krylov space (Musco & Musco, 2015),

    Q = orth[K Ω, K² Ω, …],

and the leading directions are the eigenvectors of Qᵀ K Q with the largest eigenvalues θ.

How much they leave out is known without further products, because tr K = Σ_p diag(G)_p / δ_p takes
one pass. The trace that is missing, m = tr K − Σ_r θ, spreads over at most n more eigenvalues, so
that by Jensen's inequality

    tr(ΛV) = Σ_k λ_k / (1 + λ_k) ≤ Σ_r θ / (1 + θ) + m / (1 + m / n)

The share of tr(ΛV) that r directions explain is thus at least Σ_r θ / (1 + θ) over this bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.matmul import product
from blr_analysis.backprop.terms import products
from blr_analysis.posterior.fit import Fit
from blr_analysis.posterior.structures.contract import Tree, tree_of

WIDEST_BLOCK = 128  # vectors that are multiplied in one pass, at most
NARROWEST_BLOCK = 8  # the same, at least
BLOCKS = 6  # so many blocks make up the rank that is asked for: powers of K up to the sixth
OVERSAMPLING = 1.5  # size of the Krylov space over the rank that is asked for
EXTRA_BLOCKS = 3  # blocks beyond that size
EXPLAINED_WHEN_GROWN = 0.95  # share of tr(ΛV) at which a rank that nobody chose stops growing
LEFT_OUTSIDE = 0.7  # length of a unit vector outside of a space that it is orthogonal to, at least
ROUNDINGS_OF_TRACE = 1e3  # a trace that is missing by less is taken for rounding


def leading(
    curvature: WhitenedCurvature, rank: int | None, rank_limit: int, n_eigenvalues: int
) -> tuple[Tensor, float]:
    """The leading directions of K, ``[r, P]``, and the least share of tr(ΛV) that they explain.

    Args:
        rank: r; None: as many as explain 0.95 of tr(ΛV).
        rank_limit: the largest r where ``rank`` is None.
        n_eigenvalues: an upper bound of how many eigenvalues of K differ from 0.
    """
    space, core = _krylov(curvature, rank, rank_limit, n_eigenvalues)
    if not len(space):
        return space, 1.0
    ascending, ascending_vectors = torch.linalg.eigh(core)
    eigenvalues = ascending.flip(-1)
    eigenvectors = ascending_vectors.flip(-1)
    shares = _explained_shares(core, curvature.trace, n_eigenvalues)
    n_above_noise = int((eigenvalues > curvature.noise * eigenvalues[:1]).sum())
    r = min(n_above_noise, rank or rank_limit)
    if rank is None:
        n_needed = int((shares < EXPLAINED_WHEN_GROWN).sum()) + 1
        r = min(r, n_needed)
    directions = product(eigenvectors[:, :r].mT.to(space), space)
    return directions, float(shares[r - 1])


def _krylov(
    curvature: WhitenedCurvature, rank: int | None, rank_limit: int, n_eigenvalues: int
) -> tuple[Tensor, Tensor]:
    """A block Krylov space Q ``[q, P]`` of K, large enough for :func:`leading`, and Q K Qᵀ."""
    n_directions = n_eigenvalues if rank is None else min(rank, n_eigenvalues)
    width = max(NARROWEST_BLOCK, min(WIDEST_BLOCK, n_directions // BLOCKS))
    size_wanted = rank_limit
    if rank is not None:
        size_wanted = int(OVERSAMPLING * rank) + EXTRA_BLOCKS * width
    size_at_end = min(n_eigenvalues, size_wanted)
    space = curvature.scale.new_zeros(0, len(curvature.scale))
    core = torch.empty(0, 0)
    block = curvature.random_block(width, space)
    while len(block):
        image = curvature.times(block, f"low-rank directions, {len(space)} so far")
        space = torch.cat([space, block])
        core = _bordered(core, product(space, image.mT).double())
        if len(space) >= size_at_end:
            break
        if rank is None and _explains_enough(core, curvature.trace, n_eigenvalues):
            break
        room = n_eigenvalues - len(space)
        block = curvature.orthonormal_outside(image, space)[:room]
        if not len(block) and _trace_is_missing(curvature, core):
            block = curvature.random_block(width, space)[:room]
    return space, core


def _explains_enough(core: Tensor, trace: float, n_eigenvalues: int) -> bool:
    """Whether all directions of a space explain so much that it need not grow."""
    shares = _explained_shares(core, trace, n_eigenvalues)
    return bool(shares[-1] >= EXPLAINED_WHEN_GROWN)


def _trace_is_missing(curvature: WhitenedCurvature, core: Tensor) -> bool:
    """Whether K has more trace than the space explains, beyond rounding."""
    missing = curvature.trace - float(core.trace())
    return missing > ROUNDINGS_OF_TRACE * curvature.noise * curvature.trace


def _bordered(core: Tensor, columns: Tensor) -> Tensor:
    """A symmetric matrix ``[q, q]`` with b further columns ``[q + b, b]``, and their mirror."""
    size = len(core)
    larger_size = len(columns)
    larger = columns.new_zeros(larger_size, larger_size)
    larger[:size, :size] = core
    larger[:, size:] = columns
    larger[size:] = columns.mT
    return larger


def _explained_shares(core: Tensor, trace: float, n_eigenvalues: int) -> Tensor:
    """The least share of tr(ΛV) that the first r directions explain, for every r, ``[q]``."""
    eigenvalues = torch.linalg.eigvalsh(core).flip(0).clamp_min(0)
    explained = (eigenvalues / (1 + eigenvalues)).cumsum(0)
    missing_trace = (trace - eigenvalues.cumsum(0)).clamp_min(0)
    ranks_so_far = torch.arange(1, len(eigenvalues) + 1, device=eigenvalues.device)
    n_missing = (n_eigenvalues - ranks_so_far).clamp_min(1)
    missing_at_most = missing_trace / (1 + missing_trace / n_missing)
    shares = explained / (explained + missing_at_most)
    return torch.where(explained > 0, shares, torch.ones_like(shares))


class WhitenedCurvature:
    """K = δ^{-1/2} G δ^{-1/2}, multiplied with flat vectors ``[n, P]``.

    Attributes:
        scale: δ^{-1/2} of every weight, ``[P]``.
        noise: the relative rounding of a product.
        diagonal: diag(G) by parameter name, in float64; empty before the first product.
        trace: tr K; 0 before the first product.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._shapes = {n: p.shape for n, p in fit.params.items()}
        scales = [torch.full_like(p, fit.prior.of(n) ** -0.5) for n, p in fit.params.items()]
        self.scale = torch.cat([x.flatten() for x in scales])
        is_double = self.scale.dtype == torch.float64
        self.noise = 1e-13 if is_double else 4 * torch.finfo(self.scale.dtype).eps
        self.diagonal: Tree = {}
        self.trace = 0.0
        self._largest_length = 0.0
        self._generator = torch.Generator().manual_seed(0)  # the same data, the same posterior

    def times(self, v: Tensor, label: str) -> Tensor:
        """K v, ``[n, P]``, by one sweep over the data; ``label`` is the progress bar's."""
        vectors = tree_of(v * self.scale, self._shapes)
        image = {n: torch.zeros_like(u) for n, u in vectors.items()}
        squares: Tree = {}  # Σ_i G_i² of each weight, summed by the first sweep alone
        if not self.diagonal:
            squares = {n: torch.zeros_like(u[0], dtype=torch.double) for n, u in vectors.items()}
        for terms in self._fit.passes(label):
            weights = products(terms, vectors, dtype=v.dtype)
            for term in terms:
                term.combined(weights, image)
                if squares:
                    term.add_square_sum(squares)
        ranks.total([*image.values(), *squares.values()])
        if squares:
            self._set_diagonal(squares)
        rows = [u.reshape(len(v), -1) for u in image.values()]
        return torch.cat(rows, dim=1) * self.scale

    def _set_diagonal(self, diagonal: Tree) -> None:
        """diag(G), and from it tr K."""
        self.diagonal = diagonal
        traces = [float(d.sum()) / self._fit.prior.of(n) for n, d in diagonal.items()]
        self.trace = sum(traces)

    def random_block(self, width: int, space: Tensor) -> Tensor:
        """Orthonormal directions of K Ω outside of the space, for new random vectors Ω."""
        size = len(self.scale)
        normal = torch.randn(width, size, generator=self._generator, dtype=torch.float64)
        omega = _outside(normal.to(self.scale) / size**0.5, space)
        image = self.times(omega, "low-rank directions")
        return self.orthonormal_outside(image, space)

    def orthonormal_outside(self, v: Tensor, space: Tensor) -> Tensor:
        """An orthonormal basis of the part of v outside of the space; parts of the size of rounding
        are left out."""
        self._largest_length = max(self._largest_length, float(v.norm(dim=1).max()))
        basis = v
        # Rounding leaves a little of the space in the first basis; the second one has none of it.
        for threshold in (self.noise * self._largest_length, LEFT_OUTSIDE):
            q, r = torch.linalg.qr(_outside(basis, space).mT)
            left_vectors, lengths, _ = torch.linalg.svd(r)
            basis = (q @ left_vectors[:, lengths > threshold]).mT.contiguous()
        return basis

    def unwhitened(self, directions: Tensor) -> Tree:
        """An orthonormal basis of δ^{1/2} times the directions, its rows by parameter name."""
        has_one_delta = bool((self.scale == self.scale[0]).all())
        if not has_one_delta:
            directions = torch.linalg.qr((directions / self.scale).mT)[0].mT
        return tree_of(directions, self._shapes)


def _outside(v: Tensor, space: Tensor) -> Tensor:
    """The part of v that is orthogonal to the rows of the space, which are orthonormal."""
    if not len(space):
        return v
    inside = product(product(v, space.mT), space)
    return v - inside
