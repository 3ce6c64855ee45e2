"""Our train × test influences of a case: one function per row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import blr_analysis as blr
from benchmarks.agreement.cases import Case
from blr_analysis.backprop.engine import chunks

Rows = dict[str, Callable[[], Tensor]]
FULL = 3_000  # parameters of a dense posterior that is worth its time here


def rows(case: Case, tests: blr.Task) -> Rows:
    """Name → influence ``[N, M]`` of the case on ``tests`` (their model is not used)."""
    structures = [s for s in case.structures if s != "full" or case.size <= FULL]
    found: Rows = {}
    for structure in structures:
        found[structure] = lambda s=structure: fitted(case.task(), tests, s, case.delta)
    if case.size <= FULL:
        found["exact Hessian"] = lambda: fitted(case.task(), tests, "full", case.delta, "exact")
    return found


def fitted(
    task: blr.Task, tests: blr.Task, structure: str, delta: float, curvature: str = "ggn"
) -> Tensor:
    """∇ℓ_jᵀ Σ ∇ℓ_i with a Laplace posterior of this structure."""
    how = {"structure": structure, "prior_precision": delta, "curvature": curvature}
    q = blr.fit_laplace(task.quiet, **how)
    return blr.influence(task.quiet, q, tests.with_model(task)).as_subclass(Tensor)


def gradients(task: blr.Task, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """∇ℓ_i of all examples, by name ``[N, *shape]``."""
    parts: list[dict[str, Tensor]] = []
    for chunk in chunks(task.quiet, dict(params), columns=1):
        error = task.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1))
        parts.append({n: g[:, 0] for term in terms for n, g in term.jacobian().items()})
    return {n: torch.cat([p[n] for p in parts]) for n in params}
