r"""Is a posterior the end of the Bayesian learning rule? Tests of its two conditions (K&R 25, 26):

    E_q[∇ℓ̄(θ)] = 0,        E_q[∇²ℓ̄(θ)] = S,        ℓ̄ = Σ_i ℓ_i + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

The first one is tested at the mean, see :mod:`blr_analysis.posterior.stationarity`. The second one
is tested with a few random vectors z_k ~ N(0, S⁻¹). Each is multiplied by the Hessian, all in one
pass over the data, and by S. The prior is in both matrices and is left out. With H = E_q[Σ_i ∇²ℓ_i]
and A = S − diag(δ), Hutchinson's estimates are

    mismatch² = Σ_k ‖(H − A) z_k‖² / Σ_k ‖A z_k‖²        norms in S⁻¹
              → ‖S^-½ (H − A) S^-½‖² / ‖S^-½ A S^-½‖²    Frobenius norms, for many probes
    ratio     = Σ_k z_kᵀ H z_k / Σ_k z_kᵀ A z_k
              → tr(S⁻¹H) / tr(S⁻¹A)

The norms weigh each direction by its variance under the posterior, so that the units of weights do
not matter. E_q[∇²ℓ̄] is taken at the mean (delta method), or averaged over draws of the weights.

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
        probes: the number of random vectors.
        draws: the number of draws of the weights over which the Hessian is averaged; 0: the Hessian
            at the mean.
        seed: of probes and draws.

    Returns:
        A posterior on the task's device, with ``stationarity`` and ``precision_match``.

    Raises:
        InputError: ``probes`` is not a positive number.
        PosteriorError: the posterior belongs to another model or other data.
        ModelError: a layer cannot be differentiated twice.

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
    by_hessian = _expected_products(task, q, vectors, draws, generator)
    by_posterior = add(q.form.times(vectors), -1.0, q.prior.times(vectors))
    difference = add(by_hessian, -1.0, by_posterior)
    match = PrecisionMatch(
        mismatch=math.sqrt(_ratio(_squared(q, difference), _squared(q, by_posterior))),
        ratio=_ratio(dot(vectors, by_hessian), dot(vectors, by_posterior)),
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
    """E_q[Σ_i ∇²ℓ_i] z, ``[count, *shape]`` by name."""
    total = {name: torch.zeros_like(v) for name, v in vectors.items()}
    for weights in _weights_of_hessians(q, draws, generator):
        products = Hessian(task, weights).product(vectors)
        total = add(total, 1 / max(draws, 1), products)
    return total


def _weights_of_hessians(
    q: Posterior, draws: int, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """The weights at which the Hessian is taken: draws of them, or the mean."""
    if draws == 0:
        yield dict(q.mean)
    for _ in range(draws):
        yield q.as_drawn.sample(generator=generator)


def _squared(q: Posterior, v: Tree) -> float:
    """Σ_k v_kᵀ S⁻¹ v_k."""
    return dot(v, q.form.solve(v))


def _ratio(numerator: float, denominator: float) -> float:
    """The quotient. Over 0, where S has no curvature of data, it is infinite; 0/0 is 1."""
    if denominator == 0:
        return 1.0 if numerator == 0 else math.inf
    return numerator / denominator
