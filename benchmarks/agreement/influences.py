"""Our train × test influences of a case: one function per row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import blr_analysis as blr
from benchmarks.agreement.cases import Case
from blr_analysis.backprop.engine import QUIET, chunks
from blr_analysis.backprop.products import Curvature

Rows = dict[str, Callable[[], Tensor]]
Product = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
FULL = 3_000  # parameters of a dense posterior that is worth its time here


def rows(case: Case, tests: blr.Task) -> Rows:
    """Name → influence ``[N, M]`` of the case on ``tests`` (their model is not used)."""
    structures = [s for s in case.structures if s != "full" or case.size <= FULL]
    found: Rows = {}
    for structure in structures:
        found[structure] = lambda s=structure: fitted(case.task(), tests, s, case.delta)
    found["exact Hessian"] = lambda: solved(case.task(), tests, case.delta)
    return found


def best(case: Case) -> str:
    """The structure nearest to the exact curvature that is worth its time."""
    found = [s for s in case.structures if s != "full" or case.size <= FULL]
    return found[-1]


def fitted(task: blr.Task, tests: blr.Task, structure: str, delta: float) -> Tensor:
    """∇ℓ_jᵀ Σ ∇ℓ_i with a Laplace posterior of this structure."""
    q = blr.fit_laplace(task.quiet, structure=structure, prior_precision=delta)
    return as_tensor(blr.influence(task.quiet, q, tests.with_model(task)))


def as_tensor(values: Tensor) -> Tensor:
    """A plain tensor, whatever subclass came."""
    return values.as_subclass(Tensor)


def solved(task: blr.Task, tests: blr.Task, delta: float) -> Tensor:
    """∇ℓ_jᵀ H⁻¹ ∇ℓ_i with the exact Hessian, dense or by conjugate gradients."""
    params = task.parameters()
    hessian = Curvature(task, params, kind="hessian")

    def times(v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: x + delta * v[n] for n, x in hessian.product(v, progress=False).items()}

    asked, given = gradients(tests.with_model(task), params), gradients(task, params)
    size = sum(p.numel() for p in params.values())
    if size <= FULL:
        unit = torch.eye(size, dtype=next(iter(params.values())).dtype)
        parts = unit.split([p.numel() for p in params.values()], 1)
        rows = times(
            {n: u.view(-1, *p.shape) for u, (n, p) in zip(parts, params.items(), strict=True)}
        )
        return flat(given) @ torch.linalg.solve(flat(rows), flat(asked).T)
    q = blr.fit_laplace(task, structure="kron", prior_precision=delta)
    return flat(given) @ flat(conjugate_gradients(times, asked, q.form.solve)).T


def conjugate_gradients(
    times: Product, b: dict[str, Tensor], inverse: Product, steps: int = 100
) -> dict[str, Tensor]:
    """The solutions of several systems at once, ``[K, *shape]``, to a thousandth."""

    def dot(u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        return sum((u[n] * v[n]).double().flatten(1).sum(1) for n in u)  # type: ignore[return-value]

    def plus(u: Mapping[str, Tensor], a: Tensor, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: x + a.to(x).view(-1, *[1] * (x.ndim - 1)) * v[n] for n, x in u.items()}

    x, r = {n: torch.zeros_like(t) for n, t in b.items()}, b
    p = z = inverse(r)
    rho = first = dot(r, z)
    for _ in range(steps):
        if bool((rho <= 1e-6 * first).all()):
            break
        s = times(p)
        alpha = rho / dot(p, s).clamp_min(1e-300)
        x, r = plus(x, alpha, p), plus(r, -alpha, s)
        z, before = inverse(r), rho
        rho = dot(r, z)
        p = plus(z, rho / before.clamp_min(1e-300), p)
    return x


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
