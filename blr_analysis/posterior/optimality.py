r"""Is a posterior what the Bayesian learning rule ends in? Both of its conditions (K&R 25 and 26):

    E_q[∇ℓ̄(θ)] = 0,        E_q[∇²ℓ̄(θ)] = S,        ℓ̄ = Σ_i ℓ_i + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

The first is :mod:`blr_analysis.posterior.stationarity`'s, at the mean. The second is tried with a
few random vectors z_k ~ N(0, S⁻¹), each multiplied by the Hessian (a pass over the data for all of
them together) and by S, both without the prior, which they share. With H = E_q[Σ_i ∇²ℓ_i] and
A = S − diag(δ),

    mismatch² = Σ_k ‖(H − A) z_k‖² / Σ_k ‖A z_k‖²        norms in S⁻¹
              → ‖S^-½ (H − A) S^-½‖² / ‖S^-½ A S^-½‖²     (Frobenius), as probes grow in number
    ratio     = Σ_k z_kᵀ H z_k / Σ_k z_kᵀ A z_k → tr(S⁻¹H) / tr(S⁻¹A)

(Hutchinson's estimates.) Both norms weigh a direction by the posterior's own variance, so that
units of weights do not count. By the delta method, E_q[∇²] is taken at the mean; or it is averaged
over draws of the weights.

Source: Khan & Rue, "The Bayesian Learning Rule", Eqs. 25 and 26; Hutchinson, 1989.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from blr_analysis.backprop.hessian import Hessian
from blr_analysis.backprop.tree import add, dot
from blr_analysis.checks import at_least, positive_int, whole
from blr_analysis.errors import InputError
from blr_analysis.posterior.minimum import PrecisionMatch
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.stationarity import with_stationarity
from blr_analysis.posterior.structures import Tree
from blr_analysis.task import Task


@torch.inference_mode(False)  # also where the caller switched it on
def checked(
    task: Task, posterior: Posterior, *, probes: int = 8, draws: int = 0, seed: int = 0
) -> Posterior:
    """The posterior with ``at_minimum`` and ``precision_matches`` measured; its repr says both.

    Costs one gradient and ``probes`` Hessian products over the data (with draws, for each).

    Args:
        task: the model and the data that it was learned from.
        posterior: of any structure and source.
        probes: random vectors.
        draws: of the weights, over which the Hessian is averaged; 0: it is taken at the mean.
        seed: of probes and draws.

    Returns:
        A posterior on the task's device, with ``stationarity`` and ``precision_match``.

    Raises:
        InputError: no positive number of probes.
        PosteriorError: it belongs to another model or other data.
        ModelError: a layer that cannot be differentiated twice.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2).double(), torch.randn(60).double()
        >>> model = torch.nn.Linear(2, 1).double()
        >>> task = blr.Task(model, (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
        >>> q = checked(task, q)
        >>> q.at_minimum, q.precision_matches
        (False, True)
    """
    positive_int("probes", probes)
    at_least(0, "seed", seed)
    if whole(draws) is None or draws < 0:
        raise InputError(f"draws must be 0 or a positive whole number, got {draws!r}")
    q = with_stationarity(task, posterior)
    generator = torch.Generator().manual_seed(seed)
    vectors = _probes(q, probes, generator)
    hessian = _expected_products(task, q, vectors, draws, generator)
    own = add(q.form.times(vectors), -1.0, q.prior.times(vectors))
    difference = add(hessian, -1.0, own)
    match = PrecisionMatch(
        mismatch=math.sqrt(_over(_squared(q, difference), _squared(q, own))),
        ratio=_over(dot(vectors, hessian), dot(vectors, own)),
        probes=probes,
        draws=draws,
    )
    return q.changed(precision_match=match)


def _probes(q: Posterior, count: int, generator: torch.Generator) -> Tree:
    """z ~ N(0, S⁻¹), ``[count, *shape]`` by name."""
    draws = q.sample(generator=generator, n=count)
    return {name: draw - q.mean[name] for name, draw in draws.items()}


def _expected_products(
    task: Task, q: Posterior, vectors: Tree, draws: int, generator: torch.Generator
) -> Tree:
    """E_q[Σ_i ∇²ℓ_i] z."""
    total = {name: torch.zeros_like(v) for name, v in vectors.items()}
    for weights in _places(q, draws, generator):
        products = Hessian(task, weights).product(vectors)
        total = add(total, 1 / max(draws, 1), products)
    return total


def _places(q: Posterior, draws: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Where the Hessian is taken."""
    if not draws:
        yield dict(q.mean)
    for _ in range(draws):
        yield q.as_drawn.sample(generator=generator)


def _squared(q: Posterior, v: Tree) -> float:
    """Σ_k v_kᵀ S⁻¹ v_k."""
    return dot(v, q.form.solve(v))


def _over(numerator: float, denominator: float) -> float:
    """The quotient; of a posterior without data's curvature infinite, or 1 where there is none."""
    if denominator == 0:
        return 1.0 if numerator == 0 else math.inf
    return numerator / denominator
