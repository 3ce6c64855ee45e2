"""The merge of one layer whose precisions have structure: a matrix equation, solved.

With W the layer's joint matrix ``[g, O, I']`` (the bias a last column), and symmetric H on it,

    H̄ (W − W_r) = Σ_t α_t (H_0 + H_t)(W_t − W_r),        H̄ = H_0 + Σ_t α_t H_t

the formula of :mod:`blr_analysis.merging.formula` with matrices for numbers. W_r is the base, or
where H_0 is no part of the method the average Σ α W / Σ α. Of structure "gram" H W = W A, a dense
matrix for all rows; of "kron" H W = U_G (s ∘ (U_Gᵀ W U_A)) U_Aᵀ, a sum of Kronecker products,
solved by conjugate gradients with the average factors as preconditioner. Of one family:

* shrink c: c H + (1 − c) diag(H), RegMean's 0.9 for the off-diagonals of A; left out, 1,
  or where each "gram" is of fewer rows than inputs, and no H_0 holds what they leave out, 1 less
  the part of them that is chance;
* power p: A ⊗ Gᵖ instead of A ⊗ G; p = 0 is "gram" with the correction of its eigenvalues;
* damping d: H + d mean(H) 1 for every task, the mean over the layer's eigenvalues. G is next to
  singular in a network that is sure of its data, and a sum of such H, turned against each other, is
  no matrix to divide by: d is 1 for "kron" unless given, and 0 for "gram". Where "kron" has no
  damping and H̄ is singular, 1e-6 of its mean is added on the left alone: of the solutions the one
  nearest to W_r + Σ_t α_t (W_t − W_r), task arithmetic or the average.

Along directions without a precision (H̄ ≤ 0, or below a tenth of H_0 + Σ |α_t| H_t, as with α < 0)
W_r + Σ_t α_t (W_t − W_r) stands, task arithmetic or the average, and they are counted.

A table that is tied to a head has H = A + c_v 1 for row v under "gram", which is looked up c_v
times: all rows share the eigenvectors of Σ_t α_t A_t, and each has its own Σ_t α_t c_tv on top of
the eigenvalues.

Source: Jin et al., "Dataless knowledge fusion by merging weights of language models" (RegMean),
ICLR 2023; Martens & Grosse, ICML 2015, and George et al., 2018 for the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis
from blr_analysis.errors import InputError
from blr_analysis.merging.formula import BOUND

SINGULAR = 1e-6  # of the largest eigenvalue: what float32 factors are good for
TOLERANCE = 1e-8  # of conjugate gradients, relative to the right-hand side
MOST = 100  # iterations: what is left then is in the report


@dataclass(frozen=True)
class Solved:
    """How one layer's equation was solved.

    Attributes:
        residual: ‖H̄X − R‖ / ‖R‖, of conjugate gradients; 0 where it was solved densely.
        iterations: of conjugate gradients.
        undefined: numbers without a precision, where task arithmetic (or the average) stands.
    """

    residual: float = 0.0
    iterations: int = 0
    undefined: int = 0


@dataclass(frozen=True)
class Factors:
    """One task's H of a layer, in float64: U diag(s) Uᵀ, its off-diagonals times ``shrink``.

    Attributes:
        basis: U_A, and U_G or none.
        values: s ≥ 0, ``[g, O, I']``, or ``[g, 1, I']`` where all outputs have the same.
        shrink: c.
        rows: what each row of W has on top of the same s, ``[g, O, 1]``, or 0.
    """

    basis: Basis
    values: Tensor
    shrink: float = 1.0
    rows: Tensor | None = None
    diagonal: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "diagonal", self.basis.squares(self.values))

    @property
    def by_rows(self) -> bool:
        """Whether it multiplies every row of W with one matrix."""
        return self.basis.left is None and self.values.shape[1] == 1

    def matrix(self) -> Tensor:
        """A of H W = W A, ``[g, I', I']``."""
        right = self.basis.right
        return _shrunk((right * self.values) @ right.mT, self.diagonal[:, 0], self.shrink)

    def times(self, w: Tensor, low: int = 0) -> Tensor:
        """H W, of the rows from ``low`` on where it multiplies every row by itself."""
        turned = self.basis.back(self.values * self.basis.turn(w))
        if self.shrink != 1:
            turned = torch.lerp(self.diagonal * w, turned, self.shrink)
        return turned if self.rows is None else turned + self.rows[:, low : low + w.shape[1]] * w

    def raised(self, power: float) -> Factors:
        """A ⊗ Gᵖ: the mean over the inputs of s, by the inputs' own mean, is G's eigenvalue.

        Raises:
            InputError: the size of the inputs was not kept.
        """
        if power == 1 or self.basis.left is None:
            return self
        if not self.basis.inputs:
            raise InputError("power needs factors fitted by this release: fit them again")
        g = self.values.mean(-1, keepdim=True) / self.basis.inputs
        scale = torch.where(g > SINGULAR * g.max(), g, torch.inf) ** (power - 1)
        return Factors(self.basis, self.values * scale, self.shrink)

    def damped(self, damping: float | None) -> Factors:
        """H + d mean(H) 1."""
        if damping is None:
            damping = 0.0 if self.by_rows else 1.0
        if not damping:
            return self
        mean = self.values.mean((-2, -1), keepdim=True)
        if self.rows is not None:
            mean = mean + self.rows.mean(-2, keepdim=True)
        return Factors(self.basis, self.values + damping * mean, self.shrink, self.rows)


@dataclass(frozen=True)
class Moments:
    """One task's H of a layer, H W = W A: A ``[g, I', I']`` itself, off-diagonals by ``shrink``."""

    sums: Tensor
    shrink: float = 1.0
    rows: Tensor | None = None

    def matrix(self) -> Tensor:
        """A."""
        return _shrunk(self.sums.clone(), self.sums.diagonal(dim1=-2, dim2=-1), self.shrink)

    def times(self, w: Tensor, low: int = 0) -> Tensor:
        """H W, of the rows from ``low`` on."""
        turned = w @ self.matrix()
        return turned if self.rows is None else turned + self.rows[:, low : low + w.shape[1]] * w


def _shrunk(made: Tensor, diagonal: Tensor, shrink: float) -> Tensor:
    """A with its off-diagonals times c, in place."""
    if shrink != 1:
        made.mul_(shrink).diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return made


Part = tuple[float, Factors | None, bool]  # α_t, H_t or 0, and whether H_0 stands for H_t
Solver = Callable[[Tensor | None, Sequence[Tensor], int], tuple[Tensor, Solved]]


def solver(
    parts: Sequence[Part], first: Factors | None, delta: float, shape: tuple[int, int, int]
) -> Solver:
    """What merges rows of a layer, all precisions given.

    Args:
        parts: of every model.
        first: H_0 without δ, or 0.
        delta: δ.
        shape: ``(g, O, I')``.

    Returns:
        A function of W_0 (None: the average is the reference) and the W_t, ``[g, rows, I']``, and
        of the number of the first of these rows, which gives W and how it was found; of factors
        that are not ``by_rows`` it takes all rows.
    """
    held = [f for f in (first, *(h for _, h, _ in parts)) if f is not None]
    if all(f.by_rows for f in held):
        return dense(parts, first, delta, shape)
    return _iterative(parts, first, delta)


def _steps(
    parts: Sequence[tuple[float, Any, bool]], base: Tensor | None, models: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], Tensor]:
    """W_r, W_t − W_r, and Σ_t α_t (W_t − W_r)."""
    alphas = [alpha for alpha, _, _ in parts]
    if base is None:
        total = sum(alphas)
        base = torch.stack([m * (a / total) for m, a in zip(models, alphas, strict=True)]).sum(0)
    steps = [m - base for m in models]
    return base, steps, torch.stack([s * a for s, a in zip(steps, alphas, strict=True)]).sum(0)


def dense(
    parts: Sequence[tuple[float, Factors | Moments | None, bool]],
    first: Factors | None,
    delta: float,
    shape: tuple[int, int, int],
) -> Solver:
    """:func:`solver` where every H multiplies rows with one matrix."""
    g, _, i = shape
    stood = [alpha for alpha, _, stands in parts if stands]
    signed, absolute = 1 + sum(stood), 1 + sum(map(abs, stood))
    known = [(signed, absolute, first), *((a, abs(a), h) for a, h, stands in parts if not stands)]
    total = torch.eye(i, dtype=torch.float64).mul_(signed * delta).repeat(g, 1, 1)
    positive = all(alpha >= 0 for alpha, _, _ in parts)
    size = total if positive else torch.eye(i).double().mul_(absolute * delta).repeat(g, 1, 1)
    rows = torch.zeros(2, g, 1, 1, dtype=torch.float64)
    for alpha, most, h in known:  # one matrix at a time
        if h is not None:
            own = h.matrix()
            total.add_(own, alpha=alpha)
            if size is not total:
                size.add_(own, alpha=most)
            if h.rows is not None:
                rows = rows + torch.stack([alpha * h.rows, most * h.rows])
    divide = _divide(total, size, rows)

    def start(w: Tensor, low: int) -> Tensor:
        return delta * w if first is None else delta * w + first.times(w, low)

    def solve(base: Tensor | None, models: Sequence[Tensor], low: int = 0) -> tuple[Tensor, Solved]:
        base, steps, plain = _steps(parts, base, models)
        right = torch.zeros_like(base)
        for (alpha, h, stands), step in zip(parts, steps, strict=True):
            right += alpha * start(step, low)
            right += alpha * (
                start(step, low) if stands else 0.0 if h is None else h.times(step, low)
            )
        step, undefined = divide(right, plain, low)
        return base + step, Solved(undefined=undefined)

    return solve


def _divide(
    total: Tensor, size: Tensor, rows: Tensor
) -> Callable[[Tensor, Tensor, int], tuple[Tensor, int]]:
    """R, X ↦ R H̄⁻¹, with X along the directions that H̄ says nothing of, and how many numbers
    these are; ``rows`` holds what H̄, and its size, have in each row, or in all, on top."""
    root, failed = torch.linalg.cholesky_ex(total)
    pivots = root.diagonal(dim1=-2, dim2=-1).square()
    largest = total.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    sound = not bool(failed.any()) and bool((pivots > SINGULAR * largest).all())
    if sound and not bool(rows.any()) and (total is size or torch.equal(total, size)):
        return lambda right, plain, low: (torch.cholesky_solve(right.mT, root).mT, 0)
    values, vectors = torch.linalg.eigh(total)
    along = (vectors * (size @ vectors)).sum(-2)

    def divide(right: Tensor, plain: Tensor, low: int) -> tuple[Tensor, int]:
        own = rows if rows.shape[2] == 1 else rows[:, :, low : low + right.shape[1]]
        curved, most = values.unsqueeze(-2) + own[0], along.unsqueeze(-2) + own[1]
        least = torch.maximum(BOUND * most, SINGULAR * most.amax(-1, keepdim=True))
        kept = (curved > least).expand_as(right)
        inverse = torch.where(kept, 1 / curved, 0.0)
        turned = (right @ vectors) * inverse
        return (turned + (plain @ vectors) * ~kept) @ vectors.mT, int((~kept).sum())

    return divide


def _iterative(parts: Sequence[Part], first: Factors | None, delta: float) -> Solver:
    def start(w: Tensor) -> Tensor:
        return delta * w if first is None else delta * w + first.times(w)

    def own(part: Part, w: Tensor) -> Tensor:
        _, h, stands = part
        return start(w) if stands else torch.zeros_like(w) if h is None else h.times(w)

    def total(w: Tensor) -> Tensor:
        return start(w) + sum(part[0] * own(part, w) for part in parts)

    positive = all(alpha >= 0 for alpha, _, _ in parts)
    stands = sum(alpha for alpha, _, s in parts if s)
    weighted = [(alpha, h) for alpha, h, _ in parts if h is not None]
    weighted += [] if first is None else [(1 + stands, first)]
    lowest = delta * (1 + stands)
    floor = SINGULAR * sum(alpha * float(h.values.mean()) for alpha, h in weighted)
    least = lowest + sum(alpha * float(h.values.min()) for alpha, h in weighted)
    ridge = floor if positive and least < floor else 0.0  # the nearest solution, where several are
    precondition = _preconditioner(weighted, lowest + ridge)

    def solve(base: Tensor | None, models: Sequence[Tensor], low: int = 0) -> tuple[Tensor, Solved]:
        base, steps, plain = _steps(parts, base, models)
        right = -total(plain)
        size = float(right.norm())
        for part, step in zip(parts, steps, strict=True):
            pull = part[0] * (start(step) + own(part, step))
            right += pull
            size += float(pull.norm())
        x, residual, iterations, definite = conjugate_gradients(
            (lambda w: total(w) + ridge * w) if ridge else total,
            right,
            precondition,
            rounding=1e-14 * size,
        )
        if not definite and not positive:  # H̄ is negative somewhere: there is no such step
            return base + plain, Solved(0.0, iterations, plain.numel())
        return base + plain + x, Solved(residual, iterations)

    return solve


def _preconditioner(
    weighted: Sequence[tuple[float, Factors]], delta: float
) -> Callable[[Tensor], Tensor]:
    """The inverse of H̄'s diagonal in the eigenvectors of the average factors."""
    across = sum(
        abs(a) * ((f.basis.right * f.values.sum(1, keepdim=True)) @ f.basis.right.mT)
        for a, f in weighted
    )
    assert isinstance(across, Tensor)
    right, left = torch.linalg.eigh(across)[1], None
    if all(f.basis.left is not None for _, f in weighted):
        down = sum(
            abs(a) * ((u * f.values.sum(-1).unsqueeze(-2)) @ u.mT)
            for a, f in weighted
            if (u := f.basis.left) is not None
        )
        assert isinstance(down, Tensor)
        left = torch.linalg.eigh(down)[1]
    joint = weighted[0][1].basis
    basis = Basis(joint.weight, joint.bias, joint.layout, right, left)
    diagonal = torch.as_tensor(delta, dtype=torch.float64)
    for alpha, f in weighted:
        own = f.values @ (f.basis.right.mT @ right).square()
        if left is not None and f.basis.left is not None:
            own = (left.mT @ f.basis.left).square() @ own
        rest = f.diagonal @ right.square()
        rest = rest if left is None else left.square().mT @ rest
        diagonal = diagonal + abs(alpha) * torch.lerp(rest, own, f.shrink)
    inverse = 1 / diagonal.clamp_min(1e-12 * float(diagonal.max()))
    return lambda r: basis.back(basis.turn(r) * inverse)


def conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    rounding: float = 0.0,
) -> tuple[Tensor, float, int, bool]:
    """H⁻¹ R from 0, as far as R is more than ``rounding``: the solution, its relative residual, the
    iterations, and whether H was positive along all of them."""
    x, r = torch.zeros_like(right), right.clone()
    goal = float(right.norm())
    if goal <= rounding:
        return x, 0.0, 0, True
    z = precondition(r)
    p, rz = z, (r * z).sum()
    for k in range(MOST):
        size = float(r.norm())
        if size <= TOLERANCE * goal:
            return x, size / goal, k, True
        q = times(p)
        curved = (p * q).sum()
        if not float(curved) > 0:
            return x, size / goal, k, False
        step = rz / curved
        x, r = x + step * p, r - step * q
        z = precondition(r)
        rz, last = (r * z).sum(), rz
        p = z + (rz / last) * p
    return x, float(r.norm()) / goal, MOST, True
