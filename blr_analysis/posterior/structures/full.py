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

LIMIT = 20_000  # parameters of a fit: 3 GB of float64


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
        if size > LIMIT:
            raise InputError(
                f"structure='full' would hold {size:,} × {size:,} numbers; use 'kron' or "
                f"'lowrank' above {LIMIT:,} parameters"
            )

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Full, dict[str, Any]]:
        size = sum(p.numel() for p in fit.params.values())
        first = next(iter(fit.params.values()))
        zeros = first.new_zeros(size, size)
        form = cls(zeros, {n: p.shape for n, p in fit.params.items()}).summed(fit)
        ranks.total([form.matrix])
        return form, {}

    @classmethod
    def of_rows(cls, params: Tree, rows: Iterator[tuple[slice, Tensor]]) -> Full:
        matrix = torch.cat([block for _, block in rows])
        return cls((matrix + matrix.mT) / 2, {n: p.shape for n, p in params.items()})

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> Full:
        return cls(tensors["full.precision"], {n: record["shapes"][n] for n in names})

    @cached_property
    def factor(self) -> Tensor:
        """The Cholesky factor R of S = R Rᵀ, taken in float64 once."""
        factor, failed = torch.linalg.cholesky_ex(self.matrix.double())
        if bool(failed):
            raise PosteriorError("the full matrix is not positive definite; raise prior_precision")
        return factor.to(self.matrix.dtype)

    def flat(self, v: Mapping[str, Tensor]) -> Tensor:
        """``[..., P]`` from tensors by name."""
        parts = []
        for name, shape in self.shapes.items():
            x = v[name]
            batch = x.shape[: x.ndim - len(shape)]
            parts.append(x.reshape(*batch, -1))
        return torch.cat(parts, dim=-1)

    def _map(self, v: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
        """A function of columns ``[P, n]``, applied to vectors by name."""
        self._take(v)
        vectors = self.flat(v)
        columns = vectors.reshape(-1, vectors.shape[-1]).mT
        result = function(columns)
        return tree_of(result.mT.reshape(vectors.shape), self.shapes)

    def times(self, v: Tree) -> Tree:
        return self._map(v, lambda x: self.matrix @ x)

    def solve(self, v: Tree) -> Tree:
        return self._map(v, lambda x: torch.cholesky_solve(x, self.factor))

    def root_solve(self, v: Tree) -> Tree:
        upper = self.factor.mT
        return self._map(v, lambda x: torch.linalg.solve_triangular(upper, x, upper=True))

    def diagonal(self, *, inverse: bool = False) -> Tree:
        matrix = torch.cholesky_inverse(self.factor) if inverse else self.matrix
        return tree_of(matrix.diagonal().clone(), self.shapes)

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().double().log().sum()

    def gram(self, terms: Sequence[Term]) -> Tensor:
        rows = self._gradients(terms)
        columns = rows.reshape(-1, rows.shape[-1]).mT
        solved = torch.linalg.solve_triangular(self.factor, columns, upper=False)
        half = solved.mT.reshape(rows.shape)  # G_i R⁻ᵀ
        return half @ half.mT

    def _gradients(self, terms: Sequence[Term]) -> Tensor:
        """G_i of all parameters, 0 where no term has them, ``[B, K, P]``."""
        gradients = {n: g for term in terms for n, g in term.jacobian().items()}
        first = total(list(gradients.values())[:1])
        for name, shape in self.shapes.items():
            if name not in gradients:
                gradients[name] = first.new_zeros(*first.shape[:2], *shape)
        return self.flat(gradients)

    def add(self, terms: Sequence[Term]) -> Full:
        rows = self._gradients(terms).flatten(0, 1)
        return Full(torch.addmm(self.matrix, rows.mT, rows), self.shapes)

    def plus(self, other: Full, scale: float = 1.0) -> Full:  # type: ignore[override]
        return Full(torch.add(self.matrix, other.matrix, alpha=scale), self.shapes)

    def plus_numbers(self, prior: Prior) -> Full:
        return Full(self.matrix + self._prior_vector(prior).diag(), self.shapes)

    def plus_other(self, form: Structure) -> Full:
        unit_vectors = tree_of(torch.eye(len(self.matrix)).to(self.matrix), self.shapes)
        rows = self.flat(form.to(self.matrix.device, self.matrix.dtype).times(unit_vectors))
        return Full(self.matrix + rows, self.shapes)

    def _prior_vector(self, prior: Prior | Given) -> Tensor:
        delta = Prior.of_any(prior)
        parts = [self.matrix.new_full(s, delta.of(n)).flatten() for n, s in self.shapes.items()]
        return torch.cat(parts)

    def floored(self, prior: Prior | Given) -> tuple[Full, float]:
        """S itself where S − diag(δ) ⪰ 0 to working precision; else its eigenvalues are raised."""
        delta = self._prior_vector(prior).diag()
        excess = (self.matrix - delta).double()
        slack = 1e-6 * float(self.matrix.diagonal().abs().max())
        identity = torch.eye(len(excess)).to(excess)
        _, failed = torch.linalg.cholesky_ex(excess + slack * identity)
        if not failed:
            return self, 0.0
        values, basis = torch.linalg.eigh(excess)
        raised = ((basis * values.clamp_min(0)) @ basis.mT).to(delta) + delta
        return Full(raised, self.shapes), float((values < -slack).double().mean())

    def tensors(self) -> dict[str, Tensor]:
        return {"full.precision": self.matrix}

    def to(self, device: torch.device, dtype: torch.dtype) -> Full:
        return Full(self.matrix.to(device, dtype), self.shapes)

    def check(self) -> None:
        if not bool(torch.isfinite(self.matrix).all()):
            raise PosteriorError("the full precision matrix holds NaN or inf")
        _ = self.factor
