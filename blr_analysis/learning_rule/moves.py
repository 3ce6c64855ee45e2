"""How optimizers depart from the rule: the departures by name, and one step with any of them.

For a diagonal Gaussian with S = ess·(h + δ) the rule is

    h ← (1 − ρ) h + ρ ĥ,        m ← m − ρ (ĝ + δ m) / (h + δ),

where ĝ and ĥ are the gradient and the Hessian of the mean loss, and δ = weight_decay comes from the
prior. In an optimizer's group, ρ is ``lr`` for m and 1 − ``beta2`` for h. The optimizers of deep
learning depart from the rule in a few ways, which recur; :class:`Move` names them. Without a
departure, one :func:`step` is one :func:`~blr_analysis.learning_rule.rule.blr_step`.
:func:`natural_momentum` (Khan & Rue, App. F) is the rule with momentum, for any family.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from blr_analysis.checks import tolerance
from blr_analysis.learning_rule.expectations import HessianEstimate, Tensors
from blr_analysis.learning_rule.families.base import ExponentialFamily, add, scale, subtract
from blr_analysis.learning_rule.rule import blr_step

Q = TypeVar("Q", bound=ExponentialFamily)


@dataclass(frozen=True)
class Move:
    """How one optimizer of the table departs from the rule. The defaults are the rule itself.

    Attributes:
        power: the step is divided by this power of the precision; ½ is the square root of Adam.
        momentum: ``"none"``; ``"heavy ball"``, u ← β₁u + ĝ; ``"average"``, u ← β₁u + (1 − β₁)ĝ;
            ``"natural"``, γ (λ − λ_previous), for any family (:func:`natural_momentum`).
        debias: u is divided by 1 − β₁ᵗ, because it starts at 0.
        debias_hess: the step divides by h / (1 − β₂ᵗ) in the place of h, if h starts at 0. The
            posterior keeps h itself.
        damping: what the step is divided by: ``"prior"``, (h + δ)^power; ``"eps inside"``,
            (h + eps)^power; ``"after root"``, h^power + δ; ``"eps"``, h^power + eps.
        decay: where δm enters. ``"step"``: it is added to the direction of the step.
            ``"momentum"``: it is added to ĝ, which the momentum averages. ``"gradient"``: the same,
            and squared gradients contain it too, as with an L2 penalty. ``"decoupled"``:
            m ← (1 − lr·δ) m.
        positive: h moves along a geodesic (a retraction), so that one step never takes h + δ below
            half of its value.
        entropy: the rule has its entropy term; without it λ does not decay (binary weights).
        memory: h is an ``"average"`` that forgets, or the ``"sum"`` of all ĥ, so that steps shrink.
        rescaled: the step is multiplied by √(average of its earlier squares + eps), so that it has
            the units of θ.
    """

    power: float = 1.0
    momentum: str = "none"
    debias: bool = False
    debias_hess: bool = False
    damping: str = "prior"
    decay: str = "step"
    positive: bool = False
    entropy: bool = True
    memory: str = "average"
    rescaled: bool = False

    @property
    def departures(self) -> list[str]:
        """The departures in words; an empty list if the step is the rule's.

        >>> Move(power=0.5, momentum="average").departures
        ['square root', 'momentum (average)']
        """
        power = "square root" if self.power == 0.5 else f"power {self.power:g}"
        is_departure = {
            power: self.power != 1,
            f"momentum ({self.momentum})": self.momentum != "none",
            "debiased momentum": self.debias,
            "debiased precision": self.debias_hess,
            "damping by eps": self.damping == "eps",
            "damping by eps inside the root": self.damping == "eps inside",
            "prior added after the root": self.damping == "after root",
            "L2 penalty in the gradient": self.decay == "gradient",
            "decay in the momentum": self.decay == "momentum",
            "decoupled decay": self.decay == "decoupled",
            "precision kept positive (retraction)": self.positive,
            "no entropy": not self.entropy,
            "sum instead of an average": self.memory == "sum",
            "scaled by its earlier steps": self.rescaled,
        }
        return [phrase for phrase, departs in is_departure.items() if departs]


@dataclass(frozen=True)
class Block:
    """The tensors of some parameters that one step reads and changes.

    The k-th tensor of every list belongs to the k-th parameter. A list is empty where the optimizer
    does not need it.

    Attributes:
        theta: the parameters; the step changes them.
        grad: ĝ.
        evidence: what the estimate ĥ of the Hessian is computed from.
        hess: h; the step changes it.
        momentum: u; the step changes it.
        moved: the average squares of earlier steps, for ``rescaled``; the step changes them.
        decay: δ of every weight, in the place of ``weight_decay``; only with ``decay="step"``.
        center: m₀, the prior's mean, to which this δ pulls.
    """

    theta: Tensors
    grad: Tensors
    evidence: Tensors = field(default_factory=list)
    hess: Tensors = field(default_factory=list)
    momentum: Tensors = field(default_factory=list)
    moved: Tensors = field(default_factory=list)
    decay: Tensors = field(default_factory=list)
    center: Tensors = field(default_factory=list)


def step(
    block: Block, curvature: HessianEstimate, move: Move, group: Mapping[str, Any], count: int
) -> None:
    """One step of the algorithm with this curvature and this move, in place.

    Args:
        group: the settings ``lr``, ``beta1``, ``beta2``, ``weight_decay``, and those that
            ``curvature`` and ``move`` need. ``clip_radius``, if it is there, bounds each element
            of the step before ``lr``.
        count: t, the number of this step, from 1.
    """
    grad = block.grad
    weight_decay = group["weight_decay"]
    if move.decay in ("gradient", "momentum") and weight_decay:
        grad = _plus(grad, block.theta, weight_decay)
    if block.hess and curvature.estimate is not None:
        _move_hess(block, grad, curvature, move, group)
    # The stored momentum must not change, so its debiasing multiplies the whole step.
    direction, debiasing = _direction(block, grad, move, group, count)
    direction = _with_decay(direction, block, move, weight_decay, debiasing)
    lr = float(group["lr"])
    if move.decay == "decoupled" and weight_decay:
        torch._foreach_mul_(block.theta, 1 - lr * weight_decay)
    divisors: Tensors = []
    if block.hess:
        divisors = _divisors(block.hess, move, group, count, block.decay)
    if block.moved:
        direction = _rescaled(direction, divisors, block.moved, group)
        divisors = []  # the rescaled direction is divided already
    clip = group.get("clip_radius", math.inf) / debiasing
    _walk(block.theta, direction, divisors, lr * debiasing, clip)


def _with_decay(
    direction: Tensors, block: Block, move: Move, weight_decay: float, debiasing: float
) -> Tensors:
    """The direction plus the δ(m − m₀) of a decay that belongs to the step.

    The whole step will be multiplied by the debiasing, from which this term is exempt.
    """
    if block.decay:
        pull = _pull_to_center(block)
        return list(torch._foreach_add(direction, pull, alpha=1 / debiasing))
    if move.decay == "step" and weight_decay:
        return _plus(direction, block.theta, weight_decay / debiasing)
    return direction


def _move_hess(
    block: Block,
    grad: Tensors,
    curvature: HessianEstimate,
    move: Move,
    group: Mapping[str, Any],
) -> None:
    """Move h toward the estimate ĥ.

    Args:
        grad: ĝ, plus the decay δm if it belongs to the gradient or to the momentum.
    """
    assert curvature.estimate is not None
    evidence = block.evidence
    if curvature.method == "gradsq" and not evidence:
        has_penalty = move.decay == "gradient"  # the squares contain δm
        evidence = _squares(grad if has_penalty else block.grad)
    decay = block.decay or group["weight_decay"]
    precision = list(torch._foreach_add(block.hess, decay))
    if move.positive and move.memory == "average":
        gap = curvature.gap(block.hess, evidence, precision, group)
        _retract(block.hess, gap, precision, 1.0 - group["beta2"])
    else:
        _advance(block.hess, curvature.estimate(evidence, precision, group), move, group)


def _rescaled(
    direction: Tensors, divisors: Tensors, moved: Tensors, group: Mapping[str, Any]
) -> Tensors:
    """The step Δ = √(v + eps) · direction / divisors, with v = ``moved``.

    Afterwards v ← v + (1 − β₂)(Δ² − v), in place.
    """
    delta = torch._foreach_add(moved, group["eps"])
    torch._foreach_sqrt_(delta)
    torch._foreach_mul_(delta, direction)
    torch._foreach_div_(delta, divisors)
    torch._foreach_lerp_(moved, _squares(list(delta)), 1.0 - group["beta2"])
    return list(delta)


def _walk(theta: Tensors, direction: Tensors, divisors: Tensors, lr: float, clip: float) -> None:
    """θ ← θ − lr · clip(direction / divisors); without divisors, nothing is divided."""
    is_clipped = not math.isinf(clip)
    has_one_dtype = theta[0].dtype == direction[0].dtype
    if divisors and has_one_dtype and not is_clipped:
        torch._foreach_addcdiv_(theta, direction, divisors, value=-lr)
        return
    if divisors:
        direction = list(torch._foreach_div(direction, divisors))
    if is_clipped:
        direction = list(torch._foreach_clamp_min(direction, -clip))
        torch._foreach_clamp_max_(direction, clip)
    torch._foreach_add_(theta, direction, alpha=-lr)


def _advance(hess: Tensors, estimate: Tensors, move: Move, group: Mapping[str, Any]) -> None:
    """h ← h + ρ(ĥ − h) with ρ = 1 − β₂; if h is a ``"sum"``, h ← h + ĥ."""
    if move.memory == "sum":
        torch._foreach_add_(hess, estimate)
    else:
        torch._foreach_lerp_(hess, estimate, 1.0 - group["beta2"])


def _retract(hess: Tensors, gap: Tensors, precision: Tensors, rho: float) -> None:
    """h ← h − ρ gap + ρ² gap² / (2 precision), with gap = h − ĥ and precision = h + δ.

    The tensors of ``precision`` are overwritten.
    """
    torch._foreach_div_(precision, gap)
    ratio = precision
    torch._foreach_add_(hess, gap, alpha=-rho)
    # gap / ratio is gap² / precision; the square itself could overflow.
    torch._foreach_addcdiv_(hess, gap, ratio, value=0.5 * rho**2)


def _divisors(
    hess: Tensors, move: Move, group: Mapping[str, Any], count: int, decays: Tensors
) -> Tensors:
    """The numbers that divide the step: a power of h, damped before or after the power.

    Args:
        decays: δ of every weight; if the list is empty, δ is ``weight_decay``.
    """
    if move.debias_hess and group["hess_init"] == 0:
        hess = list(torch._foreach_div(hess, 1 - group["beta2"] ** count))
    before_power: float | Tensors = 0.0  # a damping that is added to h
    after_power = 0.0  # a damping that is added to the power of h
    match move.damping:
        case "prior":
            before_power = decays or group["weight_decay"]
        case "eps inside":
            before_power = group.get("eps", 0.0)
        case "after root":
            after_power = group["weight_decay"]
        case "eps":
            after_power = group.get("eps", 0.0)
    precision = torch._foreach_add(hess, before_power)
    if move.power == 0.5:
        torch._foreach_sqrt_(precision)
    elif move.power != 1:
        torch._foreach_pow_(precision, move.power)
    if after_power:
        torch._foreach_add_(precision, after_power)
    return list(precision)


def _direction(
    block: Block, grad: Tensors, move: Move, group: Mapping[str, Any], count: int
) -> tuple[Tensors, float]:
    """The direction of the step, and the factor that debiases it.

    The direction is the gradient, or the momentum once it has taken this gradient in.
    """
    if not block.momentum:
        return grad, 1.0
    beta1 = group["beta1"]
    if move.momentum == "heavy ball":
        torch._foreach_mul_(block.momentum, beta1)
        torch._foreach_add_(block.momentum, grad)
    else:
        torch._foreach_lerp_(block.momentum, grad, 1.0 - beta1)
    debiasing = 1.0
    if move.debias:
        debiasing = 1 / (1 - beta1**count)
    return block.momentum, debiasing


def _pull_to_center(block: Block) -> Tensors:
    """δ (m − m₀) of every weight, with the prior's mean m₀."""
    means = [m.to(center.dtype) for m, center in zip(block.theta, block.center, strict=True)]
    gap = torch._foreach_sub(means, block.center)
    return list(torch._foreach_mul(gap, block.decay))


def _plus(left: Tensors, right: Tensors, factor: float) -> Tensors:
    """left + factor · right, in the dtype of ``left``."""
    right = [r.to(x.dtype) for r, x in zip(right, left, strict=True)]
    return list(torch._foreach_add(left, right, alpha=factor))


def _squares(tensors: Tensors) -> Tensors:
    """The squares of all entries."""
    return list(torch._foreach_mul(tensors, tensors))


def natural_momentum(
    q: Q, previous: Q, loss_gradient: Mapping[str, Tensor], rho: float, gamma: float
) -> Q:
    """The rule with momentum along the posterior's own geometry (Khan & Rue, Eq. 80).

        λ ← (1 − ρ) λ − ρ ∇_μ E_q[ℓ̄ + log h] + γ (λ − λ_previous)

    For a Gaussian of fixed covariance this is Polyak's heavy ball (K&R 75).

    Args:
        q: the present posterior.
        previous: the posterior one step before. At the first step it is ``q`` itself.
        loss_gradient: ∇_μ E_q[ℓ̄], statistic by statistic.
        rho: ρ in (0, 1].
        gamma: γ, the fraction of the last move that is repeated; 0 or more.

    Raises:
        InputError: a ρ or γ out of range, or λ leaves the family's domain.

    Example:
        >>> from blr_analysis.learning_rule.families import FixedGaussian
        >>> one = torch.ones(1)
        >>> previous = FixedGaussian(torch.zeros(1), one)
        >>> q = FixedGaussian(one, one)
        >>> natural_momentum(q, previous, {"linear": torch.tensor([2.0])}, 0.1, 0.5).mean
        tensor([1.3000])
    """
    tolerance("gamma", gamma)
    after = blr_step(q, loss_gradient, rho)
    drift = scale(subtract(q.natural, previous.natural), gamma)
    return q.with_natural(add(after.natural, drift))
