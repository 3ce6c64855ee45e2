"""What the Hessian is taken to be.

A row of Table 1 puts some estimate in the place of E_q[∇²ℓ]. For networks it is elementwise and
made of what the draws since the last step have gathered: a :class:`Curvature` names that
evidence (``method``) and turns it into the estimate ĥ of the Hessian of the mean loss. For small
models the functions below take a loss per example and give gradient and Hessian in full.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor]
Losses = Callable[[Tensor], Tensor]
"""θ ``[P]`` → the loss of every example ``[N]``."""


@dataclass(frozen=True)
class Curvature:
    """An estimate of the Hessian.

    Attributes:
        name: as the table says it.
        method: the evidence that is averaged over draws: ``"none"``, ``"gradsq"`` (squared
            minibatch gradients ḡ²), ``"ggn"`` (means over examples of g_i²), ``"price"``
            (noise · gradient), ``"abs"`` (|ḡ|). Empty: not an elementwise estimate.
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
    found = list(torch._foreach_mul(evidence, precision))
    torch._foreach_mul_(found, group["ess"])
    return found


def _root_magnitude(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = √(h + δ) · |g| + γ (Möllenhoff & Khan, ICLR 2023, Algorithm 1, line 8)."""
    found = list(torch._foreach_sqrt(precision))
    torch._foreach_mul_(found, evidence)
    torch._foreach_add_(found, group["damping"])
    return found


NO_CURVATURE = Curvature("none", "none")
EXACT = Curvature("exact")
SQUARED_GRADIENT = Curvature("squared minibatch gradient", "gradsq", _as_it_is)
SQUARED_TIMES_ESS = Curvature("squared minibatch gradient · ess", "gradsq", _times_ess)
GAUSS_NEWTON = Curvature("Gauss–Newton: sum of squared gradients", "ggn", _as_it_is)
PRICE = Curvature("reparameterised (Price)", "price", _price)
ROOT_MAGNITUDE = Curvature("√s · |gradient|", "abs", _root_magnitude)
EXACT_OR_GAUSS_NEWTON = Curvature("exact or Gauss–Newton")


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
    """Gradient at a draw θ ~ N(m, 1/s), and s·(θ − m)·g: unbiased for E_q[diag ∇²ℓ] (K&R 11)."""
    gradient = torch.func.grad(lambda t: losses(t).sum())(theta).detach()
    return gradient, precision * (theta - mean) * gradient


def hutchinson(
    losses: Losses, theta: Tensor, n: int = 1, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient ``[P]`` and mean of z ∘ (∇²ℓ z) over ``n`` draws of signs: unbiased for the
    Hessian's diagonal, exact where the Hessian is diagonal.

    >>> g, h = hutchinson(lambda t: t ** 3, torch.tensor([1.0, 2.0]))
    >>> h
    tensor([ 6., 12.])
    """
    gradient = torch.func.grad(lambda t: losses(t).sum())
    found = torch.zeros_like(theta)
    for _ in range(n):
        signs = torch.randint(0, 2, theta.shape, generator=generator, device=theta.device) * 2 - 1
        signs = signs.to(theta.dtype)
        found += signs * torch.func.jvp(gradient, (theta,), (signs,))[1]
    return gradient(theta).detach(), (found / n).detach()
