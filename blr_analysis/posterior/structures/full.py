"""One dense precision matrix over all parameters, for small models and as the others' oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.terms import Term, total
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.fit import Fit
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures.contract import Structure, Tree, tree_of

PARAMETER_LIMIT = 20_000  # of a fit: its matrix has 3 GB in float64
SLACK = 1e-6  # of the largest diagonal entry: what rounding may leave below the prior


class Full(Structure):
    """S as one dense matrix over all parameters, in the order of ``shapes``; small P only."""

    kind = "full"
    draws_labels = False

    def __init__(self, matrix: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.matrix = matrix
        self.shapes = {n: tuple(s) for n, s in shapes.items()}

    @classmethod
    def check_fit(cls, size: int, rank: int | None) -> None:
        super().check_fit(size, rank)
        if size > PARAMETER_LIMIT:
            raise InputError(
                f"structure='full' would hold {size:,} × {size:,} numbers; use 'kron' or "
                f"'lowrank' above {PARAMETER_LIMIT:,} parameters"
            )

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Full, dict[str, Any]]:
        size = sum(p.numel() for p in fit.params.values())
        some_weights = next(iter(fit.params.values()))
        zeros = some_weights.new_zeros(size, size)
        shapes = {n: tuple(p.shape) for n, p in fit.params.items()}
        form = cls(zeros, shapes).summed(fit)
        ranks.total([form.matrix])
        return form, {}

    @classmethod
    def of_rows(cls, params: Tree, rows: Iterator[tuple[slice, Tensor]]) -> Full:
        matrix = torch.cat([block for _, block in rows])
        symmetric = (matrix + matrix.mT) / 2
        return cls(symmetric, {n: tuple(p.shape) for n, p in params.items()})

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> Full:
        shapes = {n: tuple(record["shapes"][n]) for n in names}
        return cls(tensors["full.precision"], shapes)

    @cached_property
    def factor(self) -> Tensor:
        """R of S = R Rᵀ: the lower Cholesky factor, computed once and in float64."""
        factor, failure = torch.linalg.cholesky_ex(self.matrix.double())
        if bool(failure):
            raise PosteriorError("the full matrix is not positive definite; raise prior_precision")
        return factor.to(self.matrix.dtype)

    def flat(self, v: Mapping[str, Tensor]) -> Tensor:
        """Tensors by name, side by side: ``[..., P]``."""
        parts = []
        for name, shape in self.shapes.items():
            tensor = v[name]
            leading_shape = tensor.shape[: tensor.ndim - len(shape)]
            parts.append(tensor.reshape(*leading_shape, -1))
        return torch.cat(parts, dim=-1)

    def _map(self, v: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
        """``function`` of the vectors as columns ``[P, n]``, split by name again."""
        self._check_vector(v)
        vectors = self.flat(v)
        columns = vectors.reshape(-1, vectors.shape[-1]).mT
        images = function(columns)
        return tree_of(images.mT.reshape(vectors.shape), self.shapes)

    def times(self, v: Tree) -> Tree:
        return self._map(v, lambda columns: self.matrix @ columns)

    def solve(self, v: Tree) -> Tree:
        return self._map(v, lambda columns: torch.cholesky_solve(columns, self.factor))

    def root_solve(self, v: Tree) -> Tree:
        transposed_factor = self.factor.mT

        def solve(columns: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(transposed_factor, columns, upper=True)

        return self._map(v, solve)

    def diagonal(self, *, inverse: bool = False) -> Tree:
        matrix = torch.cholesky_inverse(self.factor) if inverse else self.matrix
        return tree_of(matrix.diagonal().clone(), self.shapes)

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().double().log().sum()

    def gram(self, terms: Sequence[Term]) -> Tensor:
        gradients = self._gradients(terms)
        columns = gradients.reshape(-1, gradients.shape[-1]).mT
        solved = torch.linalg.solve_triangular(self.factor, columns, upper=False)
        roots = solved.mT.reshape(gradients.shape)  # G_i R⁻ᵀ
        return roots @ roots.mT

    def _gradients(self, terms: Sequence[Term]) -> Tensor:
        """G_i of all parameters, ``[B, K, P]``; 0 for a parameter that is in no term."""
        gradients = {n: g for term in terms for n, g in term.jacobian().items()}
        some_gradient = total(list(gradients.values())[:1])  # refuses where there is none
        n_examples, n_columns = some_gradient.shape[:2]
        for name, shape in self.shapes.items():
            if name not in gradients:
                gradients[name] = some_gradient.new_zeros(n_examples, n_columns, *shape)
        return self.flat(gradients)

    def add(self, terms: Sequence[Term]) -> Full:
        rows = self._gradients(terms).flatten(0, 1)
        return Full(torch.addmm(self.matrix, rows.mT, rows), self.shapes)

    def plus(self, other: Full, scale: float = 1.0) -> Full:  # type: ignore[override]
        return Full(torch.add(self.matrix, other.matrix, alpha=scale), self.shapes)

    def plus_numbers(self, prior: Prior) -> Full:
        return Full(self.matrix + self._prior_vector(prior).diag(), self.shapes)

    def plus_other(self, form: Structure) -> Full:
        identity = torch.eye(len(self.matrix)).to(self.matrix)
        unit_vectors = tree_of(identity, self.shapes)
        placed_form = form.to(self.matrix.device, self.matrix.dtype)
        dense = self.flat(placed_form.times(unit_vectors))
        return Full(self.matrix + dense, self.shapes)

    def _prior_vector(self, prior: Prior | Given) -> Tensor:
        """δ of every weight, ``[P]``."""
        delta = Prior.of_any(prior)
        parts = [self.matrix.new_full(s, delta.of(n)).flatten() for n, s in self.shapes.items()]
        return torch.cat(parts)

    def floored(self, prior: Prior | Given) -> tuple[Full, float]:
        """S itself where S − diag(δ) is positive up to rounding; else its eigenvalues are raised
        to 0."""
        delta = self._prior_vector(prior).diag()
        excess = (self.matrix - delta).double()
        slack = SLACK * float(self.matrix.diagonal().abs().max())
        identity = torch.eye(len(excess)).to(excess)
        _, failure = torch.linalg.cholesky_ex(excess + slack * identity)
        if not failure:
            return self, 0.0
        eigenvalues, eigenvectors = torch.linalg.eigh(excess)
        positive_part = (eigenvectors * eigenvalues.clamp_min(0)) @ eigenvectors.mT
        share_raised = float((eigenvalues < -slack).double().mean())
        return Full(positive_part.to(delta) + delta, self.shapes), share_raised

    def tensors(self) -> dict[str, Tensor]:
        return {"full.precision": self.matrix}

    def to(self, device: torch.device, dtype: torch.dtype) -> Full:
        return Full(self.matrix.to(device, dtype), self.shapes)

    def check(self) -> None:
        if not bool(torch.isfinite(self.matrix).all()):
            raise PosteriorError("the full precision matrix holds NaN or inf")
        _ = self.factor
