"""Our train × test influences of a case: one function per row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import blr_analysis as blr
from benchmarks.agreement.cases import Case
from blr_analysis.backprop.engine import QUIET, chunks
from blr_analysis.sensitivity.curvature import Precision, cg

Rows = dict[str, Callable[[], Tensor]]
FULL = 3_000  # parameters of a dense posterior that is worth its time here
HALF = 0.5  # the share of the data that a random subset keeps


def rows(case: Case, tests: blr.Task) -> Rows:
    """Name → influence ``[N, M]`` of the case on ``tests`` (their model is not used)."""
    structures = [s for s in case.structures if s != "full" or case.size <= FULL]
    found: Rows = {}
    for structure in structures:
        found[structure] = lambda s=structure: fitted(case.task(), tests, s, case.delta)
    found["exact Hessian"] = lambda: solved(case.task(), tests, case.delta)
    for words, effective in (("at half weight", False), ("at effective weight", True)):
        for name, structure in ((best(case), best(case)), ("exact Hessian", None)):
            found[f"{name}, {words}"] = lambda s=structure, e=effective: at_weight(
                case, tests, s, effective=e
            )
    count = len(case.checkpoints)
    if count > 1:
        found[f"exact Hessian, at effective weight, {count} checkpoints"] = lambda: torch.stack(
            [at_weight(case, tests, None, which, effective=True) for which in range(count)]
        ).mean(0)
    return found


def best(case: Case) -> str:
    """The structure nearest to the exact curvature that is worth its time."""
    found = [s for s in case.structures if s != "full" or case.size <= FULL]
    return found[-1]


def fitted(task: blr.Task, tests: blr.Task, structure: str, delta: float) -> Tensor:
    """∇ℓ_jᵀ Σ ∇ℓ_i with a Laplace posterior of this structure."""
    options: dict[str, Any] = {"progress": False}
    q = blr.fit_laplace(task, structure=structure, prior_precision=delta, **options)
    options |= {"solver": "posterior"}
    return as_tensor(blr.influence(task, q, tests.with_model(task), **options))


def as_tensor(values: Tensor) -> Tensor:
    """A plain tensor, whatever subclass came."""
    return values.as_subclass(Tensor)


def solved(task: blr.Task, tests: blr.Task, delta: float) -> Tensor:
    """∇ℓ_jᵀ H⁻¹ ∇ℓ_i with the exact Hessian, dense or by conjugate gradients."""
    params = task.parameters()
    precision = Precision(task, params, delta, kind="hessian")
    asked, given = gradients(tests.with_model(task), params), gradients(task, params)
    size = sum(p.numel() for p in params.values())
    if size <= FULL:
        unit = torch.eye(size, dtype=next(iter(params.values())).dtype)
        parts = unit.split([p.numel() for p in params.values()], 1)
        rows = precision.times(
            {n: u.view(-1, *p.shape) for u, (n, p) in zip(parts, params.items(), strict=True)}
        )
        return flat(given) @ torch.linalg.solve(flat(rows), flat(asked).T)
    q = blr.fit_laplace(task, structure="kron", prior_precision=delta)
    x = cg(
        lambda v: precision.times(v),
        asked,
        preconditioner=q,
        batch_dims=1,
        tolerance=1e-3,
        max_iterations=100,
        progress=False,
    ).x
    return flat(given) @ flat(x).T


def flat(tree: Mapping[str, Tensor]) -> Tensor:
    """``[K, P]`` from one ``[K, *shape]`` per parameter."""
    return torch.cat([t.flatten(1) for t in tree.values()], 1)


def gradients(task: blr.Task, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """∇ℓ_i of all examples, by name ``[N, *shape]``."""
    parts: list[dict[str, Tensor]] = []
    for chunk in chunks(task, dict(params), QUIET, columns=1):
        error = task.likelihood.error(chunk.outputs, chunk.targets)
        terms = chunk.terms(error.unsqueeze(1))
        parts.append({n: g[:, 0] for term in terms for n, g in term.jacobian().items()})
    return {n: torch.cat([p[n] for p in parts]) for n in params}


def at_weight(
    case: Case,
    tests: blr.Task,
    structure: str | None,
    which: int = 0,
    keep: float = HALF,
    effective: bool = False,
) -> Tensor:
    """The influences where every example counts as a random subset of the data is worth.

    Args:
        structure: of the posterior; None: the exact Hessian.
        which: the checkpoint.
        keep: the share of the data that a subset keeps.
        effective: whether the weight also allows for what a kept example explains of itself; see
            :func:`blr_analysis.subset_posterior`.
    """
    task = case.task(which)
    q = blr.fit_laplace(task, structure="diag", prior_precision=case.delta)
    found = blr.subset_posterior(
        task,
        q,
        keep,
        effective=effective,
        structure=structure or best(case),
        progress=False,
    )
    if structure is not None:
        return as_tensor(blr.influence(task, found, tests.with_model(task)))
    task.model.load_state_dict({**task.model.state_dict(), **found.mean})
    weight = found.record["subset"]["weight"]
    return solved(task, tests, case.delta / weight) / weight
