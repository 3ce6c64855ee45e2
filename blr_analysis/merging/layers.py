"""The merge of one layer whose precisions have structure: a matrix equation, solved.

With W the layer's joint matrix ``[g, O, I']`` (the bias a last column), and symmetric H on it,

    H̄ (W − W_r) = Σ_t α_t (H_0 + H_t)(W_t − W_r),        H̄ = H_0 + Σ_t α_t H_t

the formula of :mod:`blr_analysis.merging.formula` with matrices for numbers. W_r is the base, or
where H_0 is no part of the method the average Σ α W / Σ α. Of structure "gram" H W = W A, a dense
matrix for all rows; of "kron" H W = U_G (s ∘ (U_Gᵀ W U_A)) U_Aᵀ, a sum of Kronecker products,
solved by conjugate gradients with the average factors as preconditioner. Of one family:

* shrink c: c H + (1 − c) diag(H), RegMean's 0.9 for the off-diagonals of A. If it is left out, c
  is 1; where every "gram" comes from fewer rows than inputs and there is no H_0, c is 1 less the
  part of the off-diagonals that is chance;
* power p: A ⊗ Gᵖ instead of A ⊗ G; p = 0 is "gram" with the correction of its eigenvalues;
* damping d: H + d mean(H) 1 for every task, the mean over the layer's eigenvalues. G is nearly
  singular in a network that is sure of its data, and sums of such H, each with eigenvectors of its
  own, are badly conditioned: so d is 1 for "kron" unless given, and 0 for "gram". Where losses are
  quadratic, d = 0 gives the optimum of all tasks, and d = 1 misses it. Where "kron" has no damping
  and H̄ is singular, 1e-6 of its mean is added on the left side alone, which picks the solution
  nearest to W_r + Σ_t α_t (W_t − W_r), task arithmetic or the average.

Directions without a precision (H̄ ≤ 0, or below a tenth of H_0 + Σ |α_t| H_t, as with α < 0) are
counted, and stay at W_r + Σ_t α_t (W_t − W_r), task arithmetic or the average.

Under "gram", a table that is tied to a head has H = A + c_v 1 for row v, where c_v counts how often
the token was looked up. All rows share the eigenvectors of Σ_t α_t A_t, and row v adds Σ_t α_t c_tv
to the eigenvalues.

Source: Jin et al., "Dataless knowledge fusion by merging weights of language models" (RegMean),
ICLR 2023; Martens & Grosse, ICML 2015, and George et al., 2018 for the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis
from blr_analysis.errors import InputError
from blr_analysis.merging.formula import BOUND

SINGULAR = 1e-6  # of the largest eigenvalue: float32 factors are no more accurate
TOLERANCE = 1e-8  # of conjugate gradients, relative to the right-hand side
MAX_ITERATIONS = 100  # of conjugate gradients; the report gives the residual
ROUNDING = 1e-14  # of the right-hand side's terms: a smaller sum of them counts as 0
SMALLEST_PIVOT = 1e-12  # of the preconditioner's largest number


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
    def acts_on_inputs_only(self) -> bool:
        """Whether it multiplies every row of W with one matrix."""
        return self.basis.left is None and self.values.shape[1] == 1

    def matrix(self) -> Tensor:
        """A of H W = W A, ``[g, I', I']``."""
        right = self.basis.right
        return _shrunk((right * self.values) @ right.mT, self.diagonal[:, 0], self.shrink)

    def times(self, w: Tensor, low: int = 0) -> Tensor:
        """H W. If every row is multiplied by itself, W may hold the rows from ``low`` on alone."""
        product = self.basis.back(self.values * self.basis.turn(w))
        if self.shrink != 1:
            product = torch.lerp(self.diagonal * w, product, self.shrink)
        return _plus_rows(product, self.rows, w, low)

    def raised(self, power: float) -> Factors:
        """A ⊗ Gᵖ: the mean over the inputs of s, by the inputs' own mean, is G's eigenvalue.

        Raises:
            InputError: the size of the inputs was not kept.
        """
        if power == 1 or self.basis.left is None:
            return self
        if not self.basis.inputs:
            raise InputError("power needs factors fitted by this release: fit them again")
        output_values = self.values.mean(-1, keepdim=True) / self.basis.inputs
        is_regular = output_values > SINGULAR * output_values.max()
        scale = torch.where(is_regular, output_values, torch.inf) ** (power - 1)
        return Factors(self.basis, self.values * scale, self.shrink)

    def damped(self, damping: float | None) -> Factors:
        """H + d mean(H) 1."""
        if damping is None:
            damping = 0.0 if self.acts_on_inputs_only else 1.0
        if not damping:
            return self
        mean = self.values.mean((-2, -1), keepdim=True)
        if self.rows is not None:
            mean = mean + self.rows.mean(-2, keepdim=True)
        return Factors(self.basis, self.values + damping * mean, self.shrink, self.rows)


@dataclass(frozen=True)
class Moments:
    """One task's H of a layer as a matrix, H W = W A.

    Attributes:
        sums: A, ``[g, I', I']``.
        shrink: what its off-diagonals are multiplied by.
        rows: what each row of W has on top, ``[g, O, 1]``, or 0.
    """

    sums: Tensor
    shrink: float = 1.0
    rows: Tensor | None = None

    def matrix(self) -> Tensor:
        """A."""
        return _shrunk(self.sums.clone(), self.sums.diagonal(dim1=-2, dim2=-1), self.shrink)

    def times(self, w: Tensor, low: int = 0) -> Tensor:
        """H W, of the rows from ``low`` on."""
        return _plus_rows(w @ self.matrix(), self.rows, w, low)


def _shrunk(matrix: Tensor, diagonal: Tensor, shrink: float) -> Tensor:
    """A with its off-diagonals times c, in place."""
    if shrink != 1:
        matrix.mul_(shrink)
        matrix.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return matrix


def _plus_rows(product: Tensor, rows: Tensor | None, w: Tensor, low: int) -> Tensor:
    """H W with what each row has on top; W begins at row ``low``."""
    if rows is None:
        return product
    return product + rows[:, low : low + w.shape[1]] * w


class Part(NamedTuple):
    """What one model brings into a layer's equation.

    Attributes:
        weight: α_t.
        precision: H_t; None: 0.
        takes_base: whether H_0 + δ stands for H_t.
    """

    weight: float
    precision: Factors | Moments | None
    takes_base: bool


Solver = Callable[[Tensor | None, Sequence[Tensor], int], tuple[Tensor, Solved]]
Division = Callable[[Tensor, Tensor, int], tuple[Tensor, int]]
Operator = Callable[[Tensor], Tensor]


def solver(
    parts: Sequence[Part], base_factors: Factors | None, delta: float, shape: tuple[int, int, int]
) -> Solver:
    """What merges rows of a layer, all precisions given.

    Args:
        parts: of every model.
        base_factors: H_0 without δ, or 0.
        delta: δ.
        shape: ``(g, O, I')``.

    Returns:
        A function of W_0 (None: the average is the reference), the W_t, ``[g, rows, I']``, and the
        number of the first of these rows. It gives W and how it was found. Where factors are not
        ``acts_on_inputs_only``, it takes all rows.
    """
    precisions = [base_factors, *(part.precision for part in parts)]
    factors = [factor for factor in precisions if isinstance(factor, Factors)]
    if all(factor.acts_on_inputs_only for factor in factors):
        return dense(parts, base_factors, delta, shape)
    return _iterative(parts, base_factors, delta)


@dataclass(frozen=True)
class _Equation:
    """One layer's H̄ (W − W_r) = Σ_t α_t (H_0 + H_t)(W_t − W_r).

    Attributes:
        parts: of every model.
        base_factors: H_0 without δ, or 0.
        delta: δ.
    """

    parts: Sequence[Part]
    base_factors: Factors | None
    delta: float

    def reference(self, base: Tensor | None, models: Sequence[Tensor]) -> Tensor:
        """W_r: the base, or the average."""
        if base is not None:
            return base
        total = sum(part.weight for part in self.parts)
        shares = [part.weight / total for part in self.parts]
        return torch.stack([w * share for w, share in zip(models, shares, strict=True)]).sum(0)

    def arithmetic(self, steps: Sequence[Tensor]) -> Tensor:
        """Σ_t α_t (W_t − W_r)."""
        weighted = [step * part.weight for step, part in zip(steps, self.parts, strict=True)]
        return torch.stack(weighted).sum(0)

    def base_times(self, w: Tensor, low: int = 0) -> Tensor:
        """(H_0 + δ) W."""
        if self.base_factors is None:
            return self.delta * w
        return self.delta * w + self.base_factors.times(w, low)

    def part_times(self, part: Part, w: Tensor, low: int = 0) -> Tensor:
        """H_t W."""
        if part.takes_base:
            return self.base_times(w, low)
        if part.precision is None:
            return torch.zeros_like(w)
        return part.precision.times(w, low)

    def total_times(self, w: Tensor) -> Tensor:
        """H̄ W."""
        return self.base_times(w) + sum(
            part.weight * self.part_times(part, w) for part in self.parts
        )


class _Total(NamedTuple):
    """H̄ of a layer where every H multiplies rows with one matrix.

    Attributes:
        matrix: H̄, ``[g, I', I']``.
        size: H_0 + Σ_t |α_t| H_t; the same tensor where no α_t is negative.
        rows: what the matrix and the size have in each row on top, ``[2, g, O or 1, 1]``.
    """

    matrix: Tensor
    size: Tensor
    rows: Tensor


def _total(
    parts: Sequence[Part], base_factors: Factors | None, delta: float, groups: int, columns: int
) -> _Total:
    """Sum the precisions, with one matrix in memory at a time."""
    base_weights = [part.weight for part in parts if part.takes_base]
    base_weight = 1 + sum(base_weights)
    base_magnitude = 1 + sum(map(abs, base_weights))
    terms: list[tuple[float, float, Factors | Moments | None]]
    terms = [(base_weight, base_magnitude, base_factors)]
    for part in parts:
        if not part.takes_base:
            terms.append((part.weight, abs(part.weight), part.precision))
    matrix = _scaled_identity(base_weight * delta, groups, columns)
    size = matrix
    has_negative_weights = any(part.weight < 0 for part in parts)
    if has_negative_weights:
        size = _scaled_identity(base_magnitude * delta, groups, columns)
    rows = torch.zeros(2, groups, 1, 1, dtype=torch.float64)
    for weight, magnitude, precision in terms:
        if precision is None:
            continue
        term = precision.matrix()
        matrix.add_(term, alpha=weight)
        if size is not matrix:
            size.add_(term, alpha=magnitude)
        if precision.rows is not None:
            signed_and_absolute = [weight * precision.rows, magnitude * precision.rows]
            rows = rows + torch.stack(signed_and_absolute)
    return _Total(matrix, size, rows)


def _scaled_identity(scale: float, groups: int, columns: int) -> Tensor:
    return torch.eye(columns, dtype=torch.float64).mul_(scale).repeat(groups, 1, 1)


def dense(
    parts: Sequence[Part], base_factors: Factors | None, delta: float, shape: tuple[int, int, int]
) -> Solver:
    """:func:`solver` where every H multiplies rows with one matrix."""
    groups, _, columns = shape
    divide = _division(_total(parts, base_factors, delta, groups, columns))
    equation = _Equation(parts, base_factors, delta)

    def solve(base: Tensor | None, models: Sequence[Tensor], low: int = 0) -> tuple[Tensor, Solved]:
        reference = equation.reference(base, models)
        steps = [w - reference for w in models]
        right = torch.zeros_like(reference)
        for part, step in zip(parts, steps, strict=True):
            right += part.weight * equation.base_times(step, low)
            right += part.weight * equation.part_times(part, step, low)
        step, undefined = divide(right, equation.arithmetic(steps), low)
        return reference + step, Solved(undefined=undefined)

    return solve


def _division(total: _Total) -> Division:
    """A function of R, X and the number of R's first row.

    It gives R H̄⁻¹, with X in its place along the directions where H̄ is not positive, and how many
    numbers X gives.
    """
    root, failed = torch.linalg.cholesky_ex(total.matrix)
    pivots = root.diagonal(dim1=-2, dim2=-1).square()
    largest = total.matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    is_regular = not bool(failed.any()) and bool((pivots > SINGULAR * largest).all())
    is_positive = total.matrix is total.size or torch.equal(total.matrix, total.size)
    has_rows = bool(total.rows.any())
    if is_regular and is_positive and not has_rows:

        def divide_by_cholesky(right: Tensor, plain: Tensor, low: int) -> tuple[Tensor, int]:
            return torch.cholesky_solve(right.mT, root).mT, 0

        return divide_by_cholesky
    values, vectors = torch.linalg.eigh(total.matrix)
    sizes = (vectors * (total.size @ vectors)).sum(-2)

    def divide(right: Tensor, plain: Tensor, low: int) -> tuple[Tensor, int]:
        rows = total.rows
        if rows.shape[2] > 1:
            rows = rows[:, :, low : low + right.shape[1]]
        curvature = values.unsqueeze(-2) + rows[0]
        magnitude = sizes.unsqueeze(-2) + rows[1]
        largest_magnitude = magnitude.amax(-1, keepdim=True)
        smallest_curvature = torch.maximum(BOUND * magnitude, SINGULAR * largest_magnitude)
        is_defined = (curvature > smallest_curvature).expand_as(right)
        inverse = torch.where(is_defined, 1 / curvature, 0.0)
        defined_step = (right @ vectors) * inverse
        undefined_step = (plain @ vectors) * ~is_defined
        step = (defined_step + undefined_step) @ vectors.mT
        return step, int((~is_defined).sum())

    return divide


def _iterative(parts: Sequence[Part], base_factors: Factors | None, delta: float) -> Solver:
    """:func:`solver` by conjugate gradients."""
    equation = _Equation(parts, base_factors, delta)
    weighted = _weighted(parts, base_factors)
    total_delta = delta * _base_weight(parts)
    all_positive = all(part.weight >= 0 for part in parts)
    ridge = _ridge(weighted, total_delta) if all_positive else 0.0
    precondition = _preconditioner(weighted, total_delta + ridge)

    def times(w: Tensor) -> Tensor:
        product = equation.total_times(w)
        return product + ridge * w if ridge else product

    def solve(base: Tensor | None, models: Sequence[Tensor], low: int = 0) -> tuple[Tensor, Solved]:
        reference = equation.reference(base, models)
        steps = [w - reference for w in models]
        arithmetic = equation.arithmetic(steps)
        right = -equation.total_times(arithmetic)
        size = float(right.norm())
        for part, step in zip(parts, steps, strict=True):
            pull = part.weight * (equation.base_times(step) + equation.part_times(part, step))
            right += pull
            size += float(pull.norm())
        answer = conjugate_gradients(times, right, precondition, rounding=ROUNDING * size)
        has_no_solution = not answer.is_positive and not all_positive
        if has_no_solution:  # H̄ has a direction that is not positive: task arithmetic stands
            undefined = arithmetic.numel()
            return reference + arithmetic, Solved(0.0, answer.iterations, undefined)
        solved = Solved(answer.residual, answer.iterations)
        return reference + arithmetic + answer.solution, solved

    return solve


def _base_weight(parts: Sequence[Part]) -> float:
    """How often H̄ has the base's precision."""
    return 1 + sum(part.weight for part in parts if part.takes_base)


def _weighted(parts: Sequence[Part], base_factors: Factors | None) -> list[tuple[float, Factors]]:
    """The factors whose sum, each by its weight, is H̄ without δ."""
    weighted = [
        (part.weight, part.precision) for part in parts if isinstance(part.precision, Factors)
    ]
    if base_factors is not None:
        weighted.append((_base_weight(parts), base_factors))
    return weighted


def _ridge(weighted: Sequence[tuple[float, Factors]], delta: float) -> float:
    """What is added to H̄ where it is singular, so that the nearest solution is found; else 0."""
    mean = sum(weight * float(factors.values.mean()) for weight, factors in weighted)
    smallest = delta + sum(weight * float(factors.values.min()) for weight, factors in weighted)
    ridge = SINGULAR * mean
    is_singular = smallest < ridge
    return ridge if is_singular else 0.0


def _preconditioner(weighted: Sequence[tuple[float, Factors]], delta: float) -> Operator:
    """The inverse of H̄'s diagonal in the eigenvectors of the average factors."""
    right = _average_inputs(weighted)
    left = _average_outputs(weighted)
    _, first_factors = weighted[0]
    basis = replace(first_factors.basis, right=right, left=left)
    diagonal = torch.as_tensor(delta, dtype=torch.float64)
    for weight, factors in weighted:
        of_product = factors.values @ (factors.basis.right.mT @ right).square()
        if left is not None and factors.basis.left is not None:
            of_product = (left.mT @ factors.basis.left).square() @ of_product
        of_diagonal = factors.diagonal @ right.square()
        if left is not None:
            of_diagonal = left.square().mT @ of_diagonal
        diagonal = diagonal + abs(weight) * torch.lerp(of_diagonal, of_product, factors.shrink)
    inverse = 1 / diagonal.clamp_min(SMALLEST_PIVOT * float(diagonal.max()))

    def precondition(residual: Tensor) -> Tensor:
        return basis.back(basis.turn(residual) * inverse)

    return precondition


def _average_inputs(weighted: Sequence[tuple[float, Factors]]) -> Tensor:
    """Eigenvectors of the average A."""
    matrices = []
    for weight, factors in weighted:
        vectors = factors.basis.right
        values = factors.values.sum(1, keepdim=True)
        matrices.append(abs(weight) * ((vectors * values) @ vectors.mT))
    return _eigenvectors(matrices)


def _average_outputs(weighted: Sequence[tuple[float, Factors]]) -> Tensor | None:
    """Eigenvectors of the average G; None where one of the precisions has no G."""
    matrices = []
    for weight, factors in weighted:
        vectors = factors.basis.left
        if vectors is None:
            return None
        values = factors.values.sum(-1).unsqueeze(-2)
        matrices.append(abs(weight) * ((vectors * values) @ vectors.mT))
    return _eigenvectors(matrices)


def _eigenvectors(matrices: Sequence[Tensor]) -> Tensor:
    """Those of the sum of some matrices."""
    total = sum(matrices[1:], matrices[0])
    _, vectors = torch.linalg.eigh(total)
    return vectors


class Answer(NamedTuple):
    """What conjugate gradients found.

    Attributes:
        solution: of H X = R.
        residual: ‖H X − R‖ / ‖R‖.
        iterations: how many.
        is_positive: whether H was positive along all directions that were searched.
    """

    solution: Tensor
    residual: float
    iterations: int
    is_positive: bool


def conjugate_gradients(
    times: Operator, right: Tensor, precondition: Operator, *, rounding: float = 0.0
) -> Answer:
    """H⁻¹ R from 0; the solution is 0 where R is no larger than ``rounding``."""
    solution = torch.zeros_like(right)
    goal = float(right.norm())
    if goal <= rounding:
        return Answer(solution, residual=0.0, iterations=0, is_positive=True)
    residual = right.clone()
    preconditioned = precondition(residual)
    direction = preconditioned
    product = (residual * preconditioned).sum()
    for iteration in range(MAX_ITERATIONS):
        size = float(residual.norm())
        if size <= TOLERANCE * goal:
            return Answer(solution, size / goal, iteration, is_positive=True)
        image = times(direction)
        curvature = (direction * image).sum()
        if not float(curvature) > 0:
            return Answer(solution, size / goal, iteration, is_positive=False)
        length = product / curvature
        solution = solution + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        product_before = product
        product = (residual * preconditioned).sum()
        direction = preconditioned + (product / product_before) * direction
    relative_residual = float(residual.norm()) / goal
    return Answer(solution, relative_residual, MAX_ITERATIONS, is_positive=True)
