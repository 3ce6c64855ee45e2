"""Where an algorithm evaluates the loss, and how it estimates the Hessian.

An algorithm of Table 1 approximates expectations under q. The delta method takes f(E_q[θ]) for
E_q[f(θ)]. Other algorithms evaluate the loss at draws, at nodes of a quadrature, at relaxed draws
of discrete weights, or at an adversary near the mean. A :class:`Look` names this choice;
:func:`places` gives the points and their weights for a Gaussian.

A row of Table 1 also has some estimate in the place of E_q[∇²ℓ]. For networks the estimate is
elementwise. It is computed from evidence, such as squared gradients, which is averaged over the
draws since the last step. A :class:`HessianEstimate` names its evidence (``method``), and turns it
into the estimate ĥ of the Hessian of the mean loss.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian

Tensors = list[Tensor]  # one for each parameter

LOOKS = ("quadrature", "samples", "mean")
MAX_NODES = 370  # the weights of Gauss–Hermite rules with more nodes are not finite


@dataclass(frozen=True)
class Look:
    """Where an algorithm evaluates the loss.

    Attributes:
        name: how the table describes it.
        noisy: whether these places are random, so that gradients are taken at perturbed weights.
    """

    name: str
    noisy: bool = False


EXACTLY = Look("in closed form")
AT_MEAN = Look("at the mean (delta method)")
AT_MODE_OF_PARAMETERS = Look("in closed form over z, at the mode of θ (delta method)")
AT_SAMPLES = Look("at samples of q", noisy=True)
AT_NEIGHBOUR = Look("at the mean (delta method), then at its adversary")
AT_ADVERSARY = Look("at samples of q, then at their adversary near the mean", noisy=True)
AT_DROPPED_OUT_MEAN = Look("at the mean, units dropped out", noisy=True)
AT_SIGN = Look("at the sign of the mean (delta method, zero temperature)")
AT_RELAXED_SAMPLES = Look("at relaxed samples of q", noisy=True)
BY_NODES = Look("by quadrature")


def places(
    q: FullGaussian | DiagonalGaussian,
    look: str,
    n: int = 20,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The places at which a loss is evaluated under a Gaussian, and the weight of each.

    Args:
        q: the Gaussian. Its mean is ``[P]``, or ``[..., P]`` for several Gaussians.
        look: ``"mean"``; ``"samples"``, at least n of them in pairs m ± ε; or ``"quadrature"``, n
            nodes of Gauss–Hermite for each variable's marginal.
        n: draws or nodes.
        generator: of the draws.

    Returns:
        Places ``[S, ..., P]`` and weights ``[S]`` of sum 1: E_q[f] ≈ Σ_s w_s f(θ_s).

    Raises:
        InputError: another look, an n that is not positive, more than 370 nodes, or a quadrature
            for several variables that are not independent.

    >>> places(DiagonalGaussian(torch.tensor([2.0]), torch.tensor([4.0])), "quadrature", 2)
    (tensor([[1.5000],
            [2.5000]]), tensor([0.5000, 0.5000]))
    """
    one_of("look", look, LOOKS)
    positive_int("samples", n)
    if look == "mean":
        return q.mean.unsqueeze(0), q.mean.new_ones(1)
    if look == "samples":
        draws = q.sample(math.ceil(n / 2), generator=generator)
        opposite = 2 * q.mean - draws
        points = torch.cat([draws, opposite])
        return points, points.new_full((len(points),), 1 / len(points))
    has_correlations = isinstance(q, FullGaussian) and q.mean.shape[-1] > 1
    if has_correlations:
        raise InputError("quadrature is for one variable: take look='samples'")
    if n > MAX_NODES:
        raise InputError(f"quadrature takes at most {MAX_NODES} nodes, got {n}")
    nodes, weights = (torch.as_tensor(values).to(q.mean) for values in hermegauss(n))
    std = q.precision.rsqrt().reshape(q.mean.shape)
    nodes_as_rows = nodes.view(-1, *[1] * q.mean.ndim)
    return q.mean + nodes_as_rows * std, weights / weights.sum()


@dataclass(frozen=True)
class HessianEstimate:
    """An estimate of the Hessian.

    Attributes:
        name: how the table describes it.
        method: the evidence that is averaged over draws: ``"none"``, ``"gradsq"`` (squared
            minibatch gradients ḡ²), ``"ggn"`` (means over examples of g_i²), ``"price"``
            ((θ − m) · gradient), ``"abs"`` (|ḡ|), ``"hessian"`` (the diagonal itself). Empty if the
            estimate is not elementwise.
        estimate: a function (evidence, h + δ, group) → ĥ on lists of tensors, with the settings of
            the optimizer's group; None if there is no such function.
    """

    name: str
    method: str = ""
    estimate: Callable[[Tensors, Tensors, Mapping[str, Any]], Tensors] | None = None

    def gap(
        self, hess: Tensors, evidence: Tensors, precision: Tensors, group: Mapping[str, Any]
    ) -> Tensors:
        """h − ĥ. Price's estimate takes one pass over memory in place of three."""
        if self.estimate is _price:
            ess = float(group["ess"])
            return list(torch._foreach_addcmul(hess, evidence, precision, value=-ess))
        assert self.estimate is not None
        return list(torch._foreach_sub(hess, self.estimate(evidence, precision, group)))


def _as_it_is(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ is the evidence itself."""
    return evidence


def _times_ess(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = ess · ḡ²: the squared gradient as IVON scales it."""
    return list(torch._foreach_mul(evidence, group["ess"]))


def _times_batch_size(evidence: Tensors, precision: Tensors, group: Mapping[str, Any]) -> Tensors:
    """ĥ = B · ḡ²: B times the squared gradient of a mean over B examples, the Fisher diagonal."""
    return list(torch._foreach_mul(evidence, group["batch_size"]))


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


NO_CURVATURE = HessianEstimate("none", "none")
EXACT = HessianEstimate("exact")
FIXED_PRECONDITIONER = HessianEstimate("a fixed preconditioner", "none")
HESSIAN_DIAGONAL = HessianEstimate("exact", "hessian", _as_it_is)
BY_DRAWS = HessianEstimate("gradients of draws")
SQUARED_GRADIENT = HessianEstimate("squared minibatch gradient", "gradsq", _as_it_is)
SQUARED_TIMES_ESS = HessianEstimate("squared minibatch gradient · ess", "gradsq", _times_ess)
FISHER = HessianEstimate("squared minibatch gradient · batch size", "gradsq", _times_batch_size)
GAUSS_NEWTON = HessianEstimate("Gauss–Newton: sum of squared gradients", "ggn", _as_it_is)
GENERALISED = HessianEstimate("generalised Gauss–Newton: J Λ J over the outputs")
PRICE = HessianEstimate("reparameterised (Price)", "price", _price)
ROOT_MAGNITUDE = HessianEstimate("√s · |gradient|", "abs", _root_magnitude)
EXACT_OR_GAUSS_NEWTON = HessianEstimate("exact or Gauss–Newton")
