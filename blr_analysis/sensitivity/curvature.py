"""Linear systems in the exact precision of a posterior, matrix-free.

    S = Σ_i J_iᵀ Λ_i J_i + diag(δ)        (or Σ_i ∇²ℓ_i + diag(δ))

is never formed: products with it cost two sweeps over the data, and preconditioned conjugate
gradients solve S x = b. The learned posterior is the preconditioner: the better it fits the
exact precision, the fewer iterations are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.products import Curvature
from blr_analysis.checks import instance, positive_int, positive_number
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.progress import bar
from blr_analysis.task import Task

Operator = Callable[[Tree], Tree]


class Precision:
    """S = Σ_i J_iᵀ Λ_i J_i + diag(δ), exact, as products; see :class:`Curvature` for the rest.

    Example:
        >>> import torch
        >>> from blr_analysis import Task
        >>> X, y = torch.randn(9, 3), torch.randn(9)
        >>> task = Task(torch.nn.Linear(3, 1, bias=False), (X, y), likelihood="gaussian")
        >>> S = Precision(task, task.parameters(), 2.0)
        >>> one = S.times({"weight": torch.ones(1, 3)})["weight"]
        >>> torch.allclose(one[0], (X.T @ X + 2 * torch.eye(3)).sum(1), atol=1e-4)
        True
    """

    def __init__(
        self,
        task: Task,
        params: Mapping[str, Tensor],
        prior_precision: Given | Prior,
        *,
        kind: str = "ggn",
        memory_budget: int | None = None,
    ) -> None:
        self.curvature = Curvature(task, params, kind=kind, memory_budget=memory_budget)
        self.prior = Prior.of_any(prior_precision)

    def times(self, v: Tree) -> Tree:
        """S v; leading dimensions of v are several vectors, multiplied in one sweep."""
        own = self.prior.times(v)
        return {n: x + own[n] for n, x in self.curvature.product(v, progress=False).items()}


@dataclass(frozen=True)
class Solution:
    """What :func:`cg` found.

    Attributes:
        x: the solutions, by parameter name, ``[*K, *shape]``.
        iterations: products with the operator.
        residual: ‖b − S x‖ / ‖b‖ in the preconditioner's norm ``[*K]``, as the recursion has it.
        converged: where the residual is below the tolerance, ``[*K]``.
        indefinite: where a direction of curvature ≤ 0 was met, ``[*K]``; x is what was found
            before it.
        history: the largest residual after each iteration.
    """

    x: Tree
    iterations: int
    residual: Tensor
    converged: Tensor
    indefinite: Tensor
    history: list[float]

    def __repr__(self) -> str:
        done, several = int(self.converged.sum()), self.converged.numel()
        return (
            f"Solution({done}/{several} converged after {self.iterations} iterations, residual "
            f"{float(self.residual.max()):.1e})"
        )


@torch.inference_mode(False)
def cg(
    operator: Operator,
    rhs: Tree,
    *,
    preconditioner: Structure | Posterior | Operator | None = None,
    batch_dims: int = 0,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    progress: bool | None = None,
) -> Solution:
    """Solve S x = b by preconditioned conjugate gradients, for several b at once.

    Each b has its own step sizes, so that the solutions are those of separate runs; one product
    with the operator serves all. A b that has converged, or that meets a direction of curvature
    ≤ 0, stays where it is while the others go on.

    Args:
        operator: v ↦ S v over parameters by name, symmetric positive, for example
            ``Precision(...).times``.
        rhs: b, one tensor ``[*K, *shape]`` per parameter.
        batch_dims: how many leading dimensions K has; each of their entries is a system of its
            own.
        preconditioner: a structure or posterior M ≈ S, applied as M⁻¹; a function v ↦ M⁻¹ v;
            None: the identity.
        tolerance: the relative residual √(rᵀM⁻¹r / bᵀM⁻¹b) to reach.
        max_iterations: products at most; the result says what has not converged by then.

    Raises:
        InputError: a tolerance or a number of iterations that is not positive, b of no
            parameter or not finite.
        PosteriorError: the preconditioner is not positive definite, or the operator gives NaN.

    Source: Hestenes & Stiefel, 1952; Saad, "Iterative Methods for Sparse Linear Systems", Alg. 9.1.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
        >>> solution = cg(lambda v: {"w": v["w"] @ A}, {"w": torch.ones(3)})
        >>> solution.iterations, torch.allclose(solution.x["w"], torch.tensor([1.0, 0.5, 0.2]))
        (3, True)
    """
    positive_number("tolerance", tolerance)
    positive_int("max_iterations", max_iterations)
    instance("rhs", rhs, dict, "tensors by parameter name")
    if not rhs or not all(bool(torch.isfinite(b).all()) for b in rhs.values()):
        raise InputError("the right-hand side holds no parameter, or NaN or inf")
    space = _Space(rhs, batch_dims)
    precondition = _inverse(preconditioner)
    x = {n: torch.zeros_like(b) for n, b in rhs.items()}
    r = dict(rhs)
    z = precondition(r)
    p = dict(z)
    rho = space.dot(r, z)
    if not bool((rho >= 0).all()):
        raise PosteriorError(
            "the preconditioner is not positive definite; give another posterior, or none"
        )
    scale = rho.clone()
    bound = tolerance**2 * scale
    converged, indefinite = rho <= bound, torch.zeros_like(rho, dtype=torch.bool)
    history: list[float] = []
    iterations = 0
    with bar(max_iterations, "conjugate gradients", progress) as shown:
        while iterations < max_iterations and not bool((converged | indefinite).all()):
            q = operator(p)
            iterations += 1
            curved = space.dot(p, q)
            if not bool(torch.isfinite(curved).all()):
                raise PosteriorError(
                    "conjugate gradients met NaN or inf: raise prior_precision, or use float64"
                )
            live = ~(converged | indefinite)
            indefinite = indefinite | (live & (curved <= 0))
            live = live & ~indefinite
            alpha = torch.where(live, rho / torch.where(live, curved, 1.0), 0.0)
            x = space.add(x, alpha, p)
            r = space.add(r, -alpha, q)
            z = precondition(r)
            new = space.dot(r, z)
            converged = converged | (live & (new <= bound))
            beta = torch.where(live, new / torch.where(live, rho, 1.0), 0.0)
            p = space.add(z, beta, p)
            rho = torch.where(live, new, rho)
            history.append(float(_ratio(rho, scale).max()))
            shown.update()
            shown.set_postfix_str(f"residual {history[-1]:.1e}")
    return Solution(x, iterations, _ratio(rho, scale), converged, indefinite, history)


def _ratio(rho: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, rho.clamp_min(0) / torch.where(scale > 0, scale, 1.0), 0.0).sqrt()


def _inverse(preconditioner: Structure | Posterior | Operator | None) -> Operator:
    if preconditioner is None:
        return lambda v: dict(v)
    if isinstance(preconditioner, Posterior):
        return preconditioner.form.solve
    if isinstance(preconditioner, Structure):
        return preconditioner.solve
    if callable(preconditioner):
        return preconditioner
    raise InputError(
        "preconditioner must be a posterior, a structure or a function, got "
        f"{type(preconditioner).__name__}"
    )


class _Space:
    """Vectors by parameter name with K leading dimensions: inner products and sums."""

    def __init__(self, like: Tree, batch_dims: int) -> None:
        leads = {n: tuple(b.shape[:batch_dims]) for n, b in like.items()}
        if len(set(leads.values())) != 1 or any(b.ndim < batch_dims for b in like.values()):
            raise InputError(f"the leading dimensions of the right-hand sides differ: {leads}")
        self._lead = next(iter(leads.values()))

    def dot(self, a: Tree, b: Tree) -> Tensor:
        """⟨a, b⟩ in float64, ``[*K]``."""
        parts = [
            (x.double() * b[n].double()).reshape((*self._lead, -1)).sum(-1) for n, x in a.items()
        ]
        return torch.stack(parts).sum(0)

    def add(self, a: Tree, scale: Tensor, b: Tree) -> Tree:
        """a + scale · b."""
        depth = len(self._lead)
        return {
            n: x + scale.to(x).reshape((*self._lead, *[1] * (x.ndim - depth))) * b[n]
            for n, x in a.items()
        }
