"""What the Hessian is taken to be.

A row of Table 1 puts some estimate in the place of E_q[∇²ℓ]. For networks it is elementwise and
made of what the draws since the last step have gathered: a :class:`HessianEstimate` names that
evidence (``method``) and turns it into the estimate ĥ of the Hessian of the mean loss. For small
models the functions below take a loss per example and give gradient and Hessian in full.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from blr_analysis.learning_rule.families.gaussian import FullGaussian

Tensors = list[Tensor]
Losses = Callable[[Tensor], Tensor]
"""θ ``[P]`` → the loss of every example ``[N]``."""


@dataclass(frozen=True)
class HessianEstimate:
    """An estimate of the Hessian.

    Attributes:
        name: as the table says it.
        method: the evidence that is averaged over draws: ``"none"``, ``"gradsq"`` (squared
            minibatch gradients ḡ²), ``"ggn"`` (means over examples of g_i²), ``"price"``
            (noise · gradient), ``"abs"`` (|ḡ|), ``"hutchinson"`` (z ∘ ∇²ℓ z,
            z signs). Empty: not an elementwise estimate.
        estimate: (evidence, h + δ, settings) → ĥ, lists of tensors; None: no Hessian.
    """

    name: str
    method: str = ""
    estimate: Callable[[Tensors, Tensors, Mapping[str, Any]], Tensors] | None = None


def _as_it_is(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    return evidence


def _times_ess(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = ess · ḡ²: the squared gradient as IVON scales it."""
    return list(torch._foreach_mul(evidence, group["ess"]))


def _price(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = ess (h + δ) · (θ − m) · g, by Price's theorem (K&R 11)."""
    estimate = list(torch._foreach_mul(evidence, precision))
    torch._foreach_mul_(estimate, group["ess"])
    return estimate


def _root_magnitude(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = √(h + δ) · |g| + γ (Möllenhoff & Khan, ICLR 2023, Algorithm 1, line 8)."""
    estimate = list(torch._foreach_sqrt(precision))
    torch._foreach_mul_(estimate, evidence)
    torch._foreach_add_(estimate, group["damping"])
    return estimate


def _magnitude(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = |diag ∇²ℓ|, of the minibatch, which keeps h positive (K&R 36)."""
    return list(torch._foreach_abs(evidence))


NO_CURVATURE = HessianEstimate("none", "none")
EXACT = HessianEstimate("exact")
SQUARED_GRADIENT = HessianEstimate("squared minibatch gradient", "gradsq", _as_it_is)
SQUARED_TIMES_ESS = HessianEstimate("squared minibatch gradient · ess", "gradsq", _times_ess)
GAUSS_NEWTON = HessianEstimate("Gauss–Newton: sum of squared gradients", "ggn", _as_it_is)
GENERALISED = HessianEstimate("generalised Gauss–Newton: J Λ J over the outputs")
PRICE = HessianEstimate("reparameterised (Price)", "price", _price)
ROOT_MAGNITUDE = HessianEstimate("√s · |gradient|", "abs", _root_magnitude)
DIAGONAL_MAGNITUDE = HessianEstimate("|diagonal| (Hutchinson)", "hutchinson", _magnitude)
EXACT_OR_GAUSS_NEWTON = HessianEstimate("exact or Gauss–Newton")


def exact(losses: Losses, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient ``[P]`` and Hessian ``[P, P]`` of the summed loss.

    >>> g, h = exact(lambda t: 0.5 * torch.stack([t[0] ** 2, 3 * t[1] ** 2]), torch.ones(2))
    >>> g, h
    (tensor([1., 3.]), tensor([[1., 0.],
            [0., 3.]]))
    """

    def total(t: Tensor) -> Tensor:
        return losses(t).sum()

    hessian = torch.func.hessian(total)(theta)
    return torch.func.grad(total)(theta).detach(), hessian.detach()


def gauss_newton(losses: Losses, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g_i ``[P]`` and Σ g_i g_iᵀ ``[P, P]``, never indefinite (K&R 45 is its diagonal)."""
    gradients = torch.func.jacrev(losses)(theta).detach()
    return gradients.sum(0), gradients.mT @ gradients


def squared_gradient(losses: Losses, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Σ g_i ``[P]`` and its elementwise square ``[P]``: what RMSprop and Adam average.

    Of a minibatch of M examples out of N, drawn without replacement, the square of the mean
    gradient ĝ is biased: E[ĝ²] = w·h + (1 − w)·g² with h = mean(g_i²), g = mean(g_i) and
    w = (N − M) / (M (N − 1)) (Khan et al., ICML 2018, Theorem 1).
    """
    gradient = torch.func.grad(lambda t: losses(t).sum())(theta).detach()
    return gradient, gradient.square()


def reparameterised(
    losses: Losses, theta: Tensor, mean: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient g at a draw θ ~ N(m, S⁻¹), and an unbiased estimate of E_q[∇²ℓ] (K&R 11).

    With precisions ``[P]`` s·(θ − m)·g, of the diagonal; with a matrix S ``[P, P]`` the symmetric
    part of S(θ − m)gᵀ, of the whole.
    """
    gradient = torch.func.grad(lambda t: losses(t).sum())(theta).detach()
    if precision.ndim == 1:
        return gradient, precision * (theta - mean) * gradient
    outer = (precision @ (theta - mean)).unsqueeze(-1) * gradient
    return gradient, 0.5 * (outer + outer.mT)


def hutchinson(
    losses: Losses, theta: Tensor, n: int = 1, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient ``[P]`` and mean of z ∘ (∇²ℓ z) over ``n`` draws of signs: unbiased for the
    Hessian's diagonal, exact where the Hessian is diagonal.

    >>> g, h = hutchinson(lambda t: t ** 3, torch.tensor([1.0, 2.0]))
    >>> h
    tensor([ 6., 12.])
    """
    signs = _signs(theta.expand(n, *theta.shape), generator)
    gradients, diagonals = vmap(partial(_signed, losses, theta))(signs)
    return gradients[0], diagonals.mean(0)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
    return (2 * drawn - 1).to(like.dtype)


def _signed(losses: Losses, theta: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient, and z ∘ (∇²ℓ z)."""
    gradient = torch.func.grad(lambda t: losses(t).sum())
    value, bend = torch.func.jvp(gradient, (theta,), (signs,))[:2]
    return value.detach(), (signs * bend).detach()


Estimate = Callable[[Losses, Tensor, FullGaussian, torch.Generator | None], tuple[Tensor, Tensor]]


def _at_each(one: Callable[[Losses, Tensor], tuple[Tensor, Tensor]]) -> Estimate:
    return lambda losses, points, q, generator: vmap(partial(one, losses))(points)


def _reparameterised(
    losses: Losses, points: Tensor, q: FullGaussian, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    return vmap(lambda t: reparameterised(losses, t, q.mean, q.precision))(points)


def _hutchinson(
    losses: Losses, points: Tensor, q: FullGaussian, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    return vmap(partial(_signed, losses))(points, _signs(points, generator))


ESTIMATES: dict[str, Estimate] = {
    "exact": _at_each(exact),
    "reparameterised": _reparameterised,
    "hutchinson": _hutchinson,
    "gauss_newton": _at_each(gauss_newton),
    "squared_gradient": _at_each(squared_gradient),
}
"""By name, at places ``[S, P]`` of a look: gradients ``[S, P]`` and Hessians, ``[S, P, P]`` or
their diagonals ``[S, P]``."""
