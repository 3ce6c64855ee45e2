"""The merge of one layer whose precisions have factors: a matrix equation, solved.

With W the layer's joint matrix ``[g, O, I']`` (the bias is a last column), and H symmetric,

    H̄ (W − W_r) = Σ_t α_t (H_0 + H_t)(W_t − W_r),        H̄ = H_0 + Σ_t α_t H_t

This is the formula of :mod:`blr_analysis.merging.formula` with matrices in place of numbers. The
reference W_r is the base; if the method has no H_0, it is the average Σ α W / Σ α.

* Structure "gram": H W = W A, with one dense matrix A for all rows. The equation is solved exactly.
* Structure "kron": H W = U_G (s ∘ (U_Gᵀ W U_A)) U_Aᵀ. A sum of such H is solved by conjugate
  gradients, with the average factors as preconditioner. Without off-diagonals (shrink 0), every H
  is a number for each entry, and the equation a division.

Three settings change every H_t:

* shrink c: c H + (1 − c) diag(H). RegMean uses 0.9 for the off-diagonals of A. Without a setting, c
  is 1. It is 1 less the part of the off-diagonals that is chance where every "gram" comes from
  fewer rows than inputs and there is no H_0;
* power p: A ⊗ Gᵖ instead of A ⊗ G. p = 0 is "gram" with the correction of its eigenvalues;
* damping d: H + d mean(H) 1, the mean over the layer's eigenvalues. Without a setting, d is 1 for
  "kron" and 0 for "gram". In a network that is sure of its data, G is nearly singular. Sums of such
  H, whose eigenvectors differ, are badly conditioned, hence the 1. Where losses are quadratic,
  d = 0 gives the optimum of all tasks, and d = 1 misses it. Where "kron" has no damping and H̄ is
  singular, 1e-6 of its mean is added on the left side alone: of all solutions, this picks the one
  nearest to W_r + Σ_t α_t (W_t − W_r).

A model's own mean in the damping has a drawback: for large d, the models are weighed by their mean
precisions, and not averaged. Balanced precisions, H / mean(H) + d 1, are averaged for large d. The
default method takes these, and of "kron" the moments of its inputs, A = Σ ‖g‖² a aᵀ, which
are the mean of H over the outputs.

Some directions have no precision: H̄ ≤ 0 there, or negative α leave less of it than a tenth of
H_0 + Σ |α_t| H_t. These directions are counted. They stay at W_r + Σ_t α_t (W_t − W_r), which is
task arithmetic or the average.

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

SINGULAR = 1e-6  # of the largest eigenvalue: smaller ones are rounding of float32 factors
TOLERANCE = 1e-8  # conjugate gradients end at this residual, relative to the right-hand side
MAX_ITERATIONS = 100  # of conjugate gradients; the report gives the residual they end with
ROUNDING = 1e-14  # of the terms of the right-hand side: a smaller sum of them counts as 0
SMALLEST_PIVOT = 1e-12  # of the preconditioner's largest entry: smaller entries are raised to it


@dataclass(frozen=True)
class Solved:
    """How one layer's equation was solved.

    Attributes:
        residual: ‖H̄X − R‖ / ‖R‖ of conjugate gradients; 0 where it was solved exactly.
        iterations: the number of iterations of conjugate gradients.
        undefined: the count of numbers without a precision, where task arithmetic or the average
            stands.
    """

    residual: float = 0.0
    iterations: int = 0
    undefined: int = 0


@dataclass(frozen=True)
class Factors:
    """One task's H of a layer, in float64: U diag(s) Uᵀ, its off-diagonals times ``shrink``.

    Attributes:
        basis: U_A and, for "kron", U_G.
        values: s ≥ 0, ``[g, O, I']``, or ``[g, 1, I']`` where all outputs share theirs.
        shrink: c.
        rows: c_v, which row v adds to its eigenvalues, ``[g, O, 1]``; None: 0.
        diagonal: diag(H), in the shape of ``values``.
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
        """Whether H multiplies every row of W by the same matrix, as "gram" does."""
        return self.basis.left is None and self.values.shape[1] == 1

    @property
    def is_diagonal(self) -> bool:
        """Whether H multiplies every entry of W by a number of its own."""
        return self.shrink == 0

    def matrix(self) -> Tensor:
        """A of H W = W A, ``[g, I', I']``."""
        right = self.basis.right
        return _shrunk((right * self.values) @ right.mT, self.diagonal[:, 0], self.shrink)

    def times(self, w: Tensor, low: int = 0) -> Tensor:
        """H W. Where H acts on inputs only, W may be some rows, from row ``low`` on."""
        if self.is_diagonal:
            return _plus_rows(self.diagonal * w, self.rows, w, low)
        product = self.basis.back(self.values * self.basis.turn(w))
        if self.shrink != 1:
            product = torch.lerp(self.diagonal * w, product, self.shrink)
        return _plus_rows(product, self.rows, w, low)

    def raised(self, power: float) -> Factors:
        """A ⊗ Gᵖ instead of A ⊗ G.

        An eigenvalue of G is the mean of s over the inputs, divided by the mean eigenvalue of A.

        Raises:
            InputError: the mean eigenvalue of A was not recorded.
        """
        if power == 1 or self.basis.left is None:
            return self
        if not self.basis.inputs:
            raise InputError("power needs factors fitted by this release: fit them again")
        output_values = self.values.mean(-1, keepdim=True) / self.basis.inputs
        is_regular = output_values > SINGULAR * output_values.max()
        scale = torch.where(is_regular, output_values, torch.inf) ** (power - 1)
        return Factors(self.basis, self.values * scale, self.shrink)

    def on_inputs(self) -> Factors:
        """The mean of H over the outputs: H W = W A, A = U_A diag(mean s) U_Aᵀ."""
        if self.basis.left is None:
            return self
        basis = replace(self.basis, left=None)
        return Factors(basis, self.values.mean(-2, keepdim=True), self.shrink)

    def balanced(self, damping: float) -> Factors:
        """H / mean(H) + d 1; d 1 where H is 0."""
        mean = self._mean()
        mean = torch.where(mean > 0, mean, 1.0)
        rows = None if self.rows is None else self.rows / mean
        return Factors(self.basis, self.values / mean + damping, self.shrink, rows)

    def damped(self, damping: float | None) -> Factors:
        """H + d mean(H) 1; None is 1 for "kron" and 0 for "gram"."""
        if damping is None:
            damping = 0.0 if self.acts_on_inputs_only else 1.0
        if not damping:
            return self
        values = self.values + damping * self._mean()
        return Factors(self.basis, values, self.shrink, self.rows)

    def _mean(self) -> Tensor:
        """The mean of the eigenvalues of each group, ``[g, 1, 1]``."""
        mean = self.values.mean((-2, -1), keepdim=True)
        if self.rows is None:
            return mean
        return mean + self.rows.mean(-2, keepdim=True)


@dataclass(frozen=True)
class Moments:
    """One task's H of a layer as a matrix, H W = W A.

    Attributes:
        sums: A, ``[g, I', I']``.
        shrink: the factor of its off-diagonals.
        rows: c_v, which is added for row v of W, ``[g, O, 1]``; None: 0.
    """

    sums: Tensor
    shrink: float = 1.0
    rows: Tensor | None = None

    def matrix(self) -> Tensor:
        """A with its off-diagonals shrunk, ``[g, I', I']``."""
        return _shrunk(self.sums.clone(), self.sums.diagonal(dim1=-2, dim2=-1), self.shrink)

    def times(self, w: Tensor, low: int = 0) -> Tensor:
        """H W, where W is rows of the layer from row ``low`` on."""
        return _plus_rows(w @ self.matrix(), self.rows, w, low)


def _shrunk(matrix: Tensor, diagonal: Tensor, shrink: float) -> Tensor:
    """A with its off-diagonals times c, in place."""
    if shrink != 1:
        matrix.mul_(shrink)
        matrix.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return matrix


def _plus_rows(product: Tensor, rows: Tensor | None, w: Tensor, low: int) -> Tensor:
    """H W plus c_v W of each row v; W begins at row ``low``."""
    if rows is None:
        return product
    return product + rows[:, low : low + w.shape[1]] * w


class Part(NamedTuple):
    """One model's terms in a layer's equation.

    Attributes:
        weight: α_t.
        precision: H_t; None: 0.
        takes_base: whether H_0 + δ stands for a missing H_t.
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
    """A function that merges rows of a layer by its precisions.

    Args:
        parts: the terms of every model.
        base_factors: H_0 without δ; None: 0.
        delta: δ.
        shape: ``(g, O, I')``.

    Returns:
        A function ``solve(W_0, W_t, low)``. W_0 and every W_t are ``[g, rows, I']``, from row
        ``low`` on; without W_0 (None) the average is the reference. It returns W and how it was
        found. If some factors do not act on inputs only, W_0 and W_t must hold all rows.
    """
    precisions = [base_factors, *(part.precision for part in parts)]
    factors = [factor for factor in precisions if isinstance(factor, Factors)]
    has_moments = any(isinstance(precision, Moments) for precision in precisions)
    if not has_moments and all(factor.is_diagonal for factor in factors):
        return _entry_by_entry(parts, base_factors, delta)
    if all(factor.acts_on_inputs_only for factor in factors):
        return dense(parts, base_factors, delta, shape)
    return _iterative(parts, base_factors, delta)


@dataclass(frozen=True)
class _Equation:
    """One layer's H̄ (W − W_r) = Σ_t α_t (H_0 + H_t)(W_t − W_r).

    Attributes:
        parts: the terms of every model.
        base_factors: H_0 without δ; None: 0.
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

    def total_times(self, w: Tensor, low: int = 0) -> Tensor:
        """H̄ W."""
        return self.base_times(w, low) + sum(
            part.weight * self.part_times(part, w, low) for part in self.parts
        )

    def size_times(self, w: Tensor, low: int = 0) -> Tensor:
        """(H_0 + Σ_t |α_t| H_t) W."""
        return self.base_times(w, low) + sum(
            abs(part.weight) * self.part_times(part, w, low) for part in self.parts
        )

    def pull(self, steps: Sequence[Tensor], low: int = 0) -> Tensor:
        """Σ_t α_t (H_0 + H_t)(W_t − W_r), the right-hand side."""
        total = torch.zeros_like(steps[0])
        for part, step in zip(self.parts, steps, strict=True):
            total += part.weight * self.base_times(step, low)
            total += part.weight * self.part_times(part, step, low)
        return total


class _Total(NamedTuple):
    """H̄ of a layer where every H multiplies rows with one matrix.

    Attributes:
        matrix: H̄ without the c_v of its rows, ``[g, I', I']``.
        size: H_0 + Σ_t |α_t| H_t, likewise; the same tensor where no α_t is negative.
        rows: Σ_t α_t c_tv and Σ_t |α_t| c_tv of each row v, ``[2, g, O or 1, 1]``.
    """

    matrix: Tensor
    size: Tensor
    rows: Tensor


def _total(
    parts: Sequence[Part], base_factors: Factors | None, delta: float, groups: int, columns: int
) -> _Total:
    """The sum of the precisions, with one more matrix in memory at a time."""
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
    """``[g, I', I']``."""
    return torch.eye(columns, dtype=torch.float64).mul_(scale).repeat(groups, 1, 1)


def dense(
    parts: Sequence[Part], base_factors: Factors | None, delta: float, shape: tuple[int, int, int]
) -> Solver:
    """:func:`solver` where every H multiplies all rows by one matrix."""
    groups, _, columns = shape
    divide = _division(_total(parts, base_factors, delta, groups, columns))
    equation = _Equation(parts, base_factors, delta)

    def solve(base: Tensor | None, models: Sequence[Tensor], low: int = 0) -> tuple[Tensor, Solved]:
        reference = equation.reference(base, models)
        steps = [w - reference for w in models]
        step, undefined = divide(equation.pull(steps, low), equation.arithmetic(steps), low)
        return reference + step, Solved(undefined=undefined)

    return solve


def _entry_by_entry(parts: Sequence[Part], base_factors: Factors | None, delta: float) -> Solver:
    """:func:`solver` where every H multiplies each entry by a number: a division."""
    equation = _Equation(parts, base_factors, delta)

    def solve(base: Tensor | None, models: Sequence[Tensor], low: int = 0) -> tuple[Tensor, Solved]:
        reference = equation.reference(base, models)
        steps = [w - reference for w in models]
        ones = torch.ones_like(reference)
        curvature = equation.total_times(ones, low)
        is_defined = curvature > BOUND * equation.size_times(ones, low)
        step = torch.where(
            is_defined, equation.pull(steps, low) / curvature, equation.arithmetic(steps)
        )
        return reference + step, Solved(undefined=int((~is_defined).sum()))

    return solve


def _division(total: _Total) -> Division:
    """A function ``divide(R, X, low)`` of some rows, from row ``low`` on.

    It returns R H̄⁻¹, in which X replaces the directions where H̄ is not positive, and the count of
    numbers that X gives.
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
    """:func:`solver` by conjugate gradients, which start at W_r + Σ_t α_t (W_t − W_r)."""
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
        if has_no_solution:  # H̄ is not positive along some direction: task arithmetic stands
            undefined = arithmetic.numel()
            return reference + arithmetic, Solved(0.0, answer.iterations, undefined)
        solved = Solved(answer.residual, answer.iterations)
        return reference + arithmetic + answer.solution, solved

    return solve


def _base_weight(parts: Sequence[Part]) -> float:
    """The weight of H_0 in H̄: 1, and α_t of every model that takes it for its own."""
    return 1 + sum(part.weight for part in parts if part.takes_base)


def _weighted(parts: Sequence[Part], base_factors: Factors | None) -> list[tuple[float, Factors]]:
    """The factors in H̄, with their weights; δ is left out."""
    weighted = [
        (part.weight, part.precision) for part in parts if isinstance(part.precision, Factors)
    ]
    if base_factors is not None:
        weighted.append((_base_weight(parts), base_factors))
    return weighted


def _ridge(weighted: Sequence[tuple[float, Factors]], delta: float) -> float:
    """A small number that is added to H̄ where H̄ is singular; 0 where it is not."""
    mean = sum(weight * float(factors.values.mean()) for weight, factors in weighted)
    smallest = delta + sum(weight * float(factors.values.min()) for weight, factors in weighted)
    ridge = SINGULAR * mean
    is_singular = smallest < ridge
    return ridge if is_singular else 0.0


def _preconditioner(weighted: Sequence[tuple[float, Factors]], delta: float) -> Operator:
    """A function that multiplies by an approximate H̄⁻¹.

    It inverts the diagonal of H̄ in the eigenvectors of the average factors.
    """
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
    pairs = [
        (factors.basis.right, abs(weight) * factors.values.sum(1, keepdim=True))
        for weight, factors in weighted
    ]
    return _eigenvectors(pairs)


def _average_outputs(weighted: Sequence[tuple[float, Factors]]) -> Tensor | None:
    """Eigenvectors of the average G; None where one of the precisions has no G."""
    pairs = []
    for weight, factors in weighted:
        if factors.basis.left is None:
            return None
        values = factors.values.sum(-1).unsqueeze(-2)
        pairs.append((factors.basis.left, abs(weight) * values))
    return _eigenvectors(pairs)


def _eigenvectors(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The eigenvectors of the sum of some matrices U diag(s) Uᵀ, with one of them in memory."""
    total = torch.zeros_like(pairs[0][0])
    for vectors, values in pairs:
        total.baddbmm_(vectors * values, vectors.mT)
    _, vectors = torch.linalg.eigh(total)
    return vectors


class Answer(NamedTuple):
    """The result of conjugate gradients.

    Attributes:
        solution: X of H X = R.
        residual: ‖H X − R‖ / ‖R‖.
        iterations: their number.
        is_positive: whether H was positive along all directions that were searched.
    """

    solution: Tensor
    residual: float
    iterations: int
    is_positive: bool


def conjugate_gradients(
    times: Operator, right: Tensor, precondition: Operator, *, rounding: float = 0.0
) -> Answer:
    """H⁻¹ R by conjugate gradients that start at 0.

    Args:
        times: multiplies by H.
        right: R.
        precondition: multiplies by an approximate H⁻¹.
        rounding: an R of at most this norm counts as 0, and the solution is 0.
    """
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
