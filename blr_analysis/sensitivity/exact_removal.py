"""What one example's output would be without it, by the exact curvature and no structure.

    f_i + J_i (H − ∇²ℓ_i)⁻¹ J_iᵀ e_i,    H = Σ_j ∇²ℓ_j + diag(δ)

(or the Gauss–Newton form J_jᵀ Λ_j J_j for ∇²ℓ_j): the cavity with the curvature of all other
examples as it is, by matrix-free conjugate gradients. Several examples share a sweep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.products import Curvature
from blr_analysis.backprop.terms import products
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import track
from blr_analysis.sensitivity.curvature import Precision, cg
from blr_analysis.sensitivity.refinement import refined
from blr_analysis.task import Task

HELD = 512 * 2**20  # bytes of vectors over the parameters, where the user names no bound
VECTORS = 8  # of the size of the parameters, per example: what conjugate gradients hold


@dataclass(frozen=True)
class Removals:
    """Some examples, each left out exactly; ``[K]``, on the CPU.

    Attributes:
        outputs: of each without it, ``[K, C]``.
        residual: of the conjugate gradients, relative, in the preconditioner's norm.
        converged: whether the residual fell below the tolerance.
        indefinite: where the curvature without the example was found not to be positive.
        iterations: of conjugate gradients, summed over the groups that were solved together.
        passes: sweeps over the training data.
    """

    outputs: Tensor
    residual: Tensor
    converged: Tensor
    indefinite: Tensor
    iterations: int
    passes: float


def exact_removals(
    task: Task,
    q: Posterior,
    indices: Tensor,
    *,
    kind: str,
    tolerance: float,
    max_iterations: int,
    chunking: Chunking,
) -> Removals:
    """Take each of these examples out in turn; the posterior preconditions the solves."""
    size = sum(m.numel() * m.element_size() for m in q.mean.values())
    together = max(1, (chunking.memory_budget or HELD) // (VECTORS * size))
    precision = Precision(task, q.mean, q.prior, kind=kind, memory_budget=chunking.memory_budget)
    found: list[tuple[Tensor, ...]] = []
    iterations = 0
    groups = indices.split(together)
    for group in track(groups, total=len(groups), label="exact solves", show=chunking.progress):
        own = [Curvature(task, q.mean, indices=i.reshape(1), kind=kind) for i in group]

        def without(v: Tree, own: list[Curvature] = own) -> Tree:
            whole = precision.times(v)
            for k, each in enumerate(own):
                share = each.product({n: x[k] for n, x in v.items()}, progress=False)
                for name, x in whole.items():
                    x[k] -= share[name]
            return whole

        slopes = [loss_and_gradient(task, q.mean, i.reshape(1))[0] for i in group]
        solved = cg(
            without,
            {n: torch.stack([g[n] for g in slopes]) for n in q.mean},
            preconditioner=q.form,
            batch_dims=1,
            tolerance=tolerance,
            max_iterations=max_iterations,
            progress=chunking.progress,
        )
        iterations += solved.iterations
        outputs = _moved(task, q, group, solved.x)
        parts = (outputs, solved.residual, solved.converged, solved.indefinite)
        found.append(tuple(t.cpu() for t in parts))
    outputs, residual, converged, indefinite = (torch.cat(p) for p in zip(*found, strict=True))
    passes = precision.curvature.passes
    return Removals(outputs, residual, converged, indefinite, iterations, passes)


def descended_removals(
    task: Task,
    q: Posterior,
    indices: Tensor,
    *,
    passes: int,
    tolerance: float,
    progress: bool | None = None,
) -> Removals:
    """The same with nothing linearised: by quasi-Newton moves on the other examples.

    An example that was not taken out, for want of a minimum to start from, is ``indefinite``.
    """
    found = refined(task, q, indices, passes=passes, progress=progress)
    residual = found.decrement.sqrt()
    return Removals(
        found.outputs, residual, residual <= tolerance, ~found.found, passes, found.passes
    )


def _moved(task: Task, q: Posterior, group: Tensor, moves: Tree) -> Tensor:
    """f_i + J_i move_i, ``[K, C]``."""
    rows = []
    for k, chunk in enumerate(chunks(task, q.mean, Chunking(1, progress=False), indices=group)):
        move = {n: x[k : k + 1] for n, x in moves.items()}
        change = products(chunk.jacobian_terms(), move, dtype=chunk.outputs.dtype)
        rows.append(chunk.outputs + change.squeeze(-1))
    return torch.cat(rows)
