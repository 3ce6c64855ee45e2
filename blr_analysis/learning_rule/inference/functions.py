"""The rule on a function: a Gaussian, or a mixture of them, over the arguments of a loss.

    m ← m − ρ S⁻¹ E_q[∇ℓ],      S ← (1 − ρ) S + ρ E_q[∇²ℓ]          (Khan & Rue, Eq. 12)

minimises E_q[ℓ] − T·H(q) for the loss ℓ/T. Where ℓ curves downwards S could leave the positive
matrices; the step ρ G, G = E_q[∇²ℓ] − S, is then taken on their manifold (Lin et al., ICML 2020):

    S ← S + ρ G + ½ ρ² G S⁻¹ G

*Several minima in one run.* For every component k of a mixture q(θ) = Σ_k π_k N(θ | m_k, S_k⁻¹),
with fixed π (Khan & Rue, Eqs. 29, 30; Lin et al., ICML 2019),

    m_k ← m_k − ρ S_k⁻¹ E_{q_k}[∇ℓ/T + ∇ log q],      S_k ← S_k + ρ E_{q_k}[∇²ℓ/T + ∇² log q]

∇ log q pushes components away from where others are. Without it each would be a Newton method of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, hessian, vmap

from blr_analysis.checks import instance, one_of, positive_int, positive_number, share
from blr_analysis.errors import InputError, told_as
from blr_analysis.learning_rule.expectations import LOOKS, places
from blr_analysis.learning_rule.families.domain import finite
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.fitted import Fitted, answer, until_flat
from blr_analysis.progress import track

Loss = Callable[[Tensor], Tensor]
OBJECTIVE = "E_q[loss]/T − entropy"


@dataclass(frozen=True)
class VariationalNewton:
    """Variational online Newton on a loss of few variables.

    With ``look="mean"`` (the delta method) and ρ = 1 it is Newton's method; with an expectation
    it prefers minima that stay low all around (K&R, Fig. 1).

    Args:
        look: "quadrature" (Gauss–Hermite, one variable only), "samples" or "mean".
        samples: draws per step, taken in pairs m ± ε; or the nodes of the quadrature.
        rho: ρ in (0, 1].
        temperature: T; smaller ones give narrower posteriors.

    Raises:
        InputError: settings out of range.

    Example:
        >>> start = FullGaussian(torch.zeros(1), torch.eye(1))
        >>> rule = VariationalNewton(look="mean", rho=1.0)
        >>> rule.fit(lambda t: 2 * (t[0] - 3) ** 2, start, progress=False).q
        FullGaussian(mean=tensor([3.]), precision=tensor([[4.]]))
    """

    look: str = "quadrature"
    samples: int = 20
    rho: float = 0.1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        one_of("look", self.look, LOOKS)
        positive_int("samples", self.samples)
        share("rho", self.rho)
        positive_number("temperature", self.temperature)

    def fit(
        self,
        loss: Loss,
        start: FullGaussian,
        *,
        generator: torch.Generator | None = None,
        **stopping: Any,
    ) -> Fitted[FullGaussian]:
        """Run the rule from ``start``; ``history`` is E_q[ℓ]/T − H(q) before each step, in nats.

        Args:
            loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
            start: q before the first step.
            generator: of the draws, for "samples".
            stopping: ``max_iter`` and ``tol`` (what is random never stands still, and all steps are
                made), and ``progress`` (whether to show a bar).

        Raises:
            InputError: a loss that is no such number, or not finite where it is looked at; a start
                with copies, or of several variables for a quadrature.
        """
        instance("start", start, FullGaussian, "a FullGaussian")
        if start.mean.ndim != 1:
            raise InputError(f"start must be one Gaussian, got copies {[*start.mean.shape[:-1]]}")
        q, noisy = start, self.look == "samples"

        def step(t: int) -> float:
            nonlocal q
            points, shares = places(q, self.look, self.samples, generator=generator)
            values, gradients, hessians = derivatives(loss, points)
            objective = shares @ values / self.temperature - q.entropy()
            mean = torch.tensordot(shares, gradients, 1) / self.temperature
            curved = torch.tensordot(shares, hessians, 1) / self.temperature
            q = newton_step(q, mean, curved - q.precision, self.rho)
            return float(objective)

        run = until_flat(step, OBJECTIVE, noisy=noisy, **stopping)
        return Fitted(q, run["history"], OBJECTIVE, converged=run["converged"] or noisy)


def derivatives(loss: Loss, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, ∇ℓ and ∇²ℓ at points ``[S, P]``: ``[S]``, ``[S, P]``, ``[S, P, P]``.

    Raises:
        InputError: ℓ is no number, not finite there, or taken out of torch.

    Example:
        >>> derivatives(lambda t: t[0] ** 3, torch.tensor([[1.0], [2.0]]))
        (tensor([1., 8.]), tensor([[ 3.],
                [12.]]), tensor([[[ 6.]],
        <BLANKLINE>
                [[12.]]]))
    """
    wanted = "loss must be a function (vector [P]) -> a number, differentiable by torch.func"
    number = partial(answer, wanted, torch.Size([]), loss)
    with told_as(InputError, wanted):
        gradients, values = vmap(grad_and_value(number))(points)
        found = values, gradients, vmap(hessian(number))(points)
    values, gradients, hessians = (x.detach().to(points) for x in found)
    if not all(bool(x.isfinite().all()) for x in (values, gradients, hessians)):
        raise InputError("the loss or its slopes are not finite: begin elsewhere, or lower rho")
    return values, gradients, hessians


def newton_step(q: FullGaussian, gradient: Tensor, change: Tensor, rho: float) -> FullGaussian:
    """S ← S + ρ G + ½ ρ² G S⁻¹ G, m ← m − ρ S⁻¹ g; leading dimensions are copies.

    The last term is left out at ρ = 1, where the rule forgets S, unless S would not be positive.
    """
    precision = q.precision + rho * change
    if rho < 1 or bool((torch.linalg.cholesky_ex(precision)[1] != 0).any()):
        precision = precision + 0.5 * rho**2 * change @ torch.linalg.solve(q.precision, change)
    precision = 0.5 * (precision + precision.mT)
    step = torch.linalg.solve(precision, gradient.unsqueeze(-1)).squeeze(-1)
    return FullGaussian(q.mean - rho * step, precision)


@dataclass(frozen=True)
class MultimodalOptimisation:
    """Locate many minima of a loss at once.

    Args:
        rho: ρ in (0, 1].
        temperature: T at first and at last: high ones spread the components, low ones settle them.
        look: "samples", or "mean", the delta method of Table 1: ∇ log q and ∇² log q are then those
            at each component's mean.
        samples: draws of each component per step, taken in pairs m ± ε.
        n_iter: steps.

    Raises:
        InputError: settings out of range.

    Example:
        Two wells, from two components that start nearly on one another between them.

        >>> starts = torch.tensor([[-0.1], [0.1]])
        >>> rule = MultimodalOptimisation(temperature=(0.5, 0.5))
        >>> generator = torch.Generator().manual_seed(0)
        >>> wells = lambda t: (t[0] ** 2 - 4) ** 2 / 8
        >>> fitted = rule.fit(wells, starts, generator=generator, progress=False)
        >>> minima(wells, fitted.q.components.mean).sort(0).values.round(decimals=3)
        tensor([[-2.],
                [ 2.]])
    """

    rho: float = 0.1
    temperature: tuple[float, float] = (1.0, 1.0)
    look: str = "samples"
    samples: int = 12
    n_iter: int = 200

    def __post_init__(self) -> None:
        share("rho", self.rho)
        one_of("look", self.look, ("samples", "mean"))
        positive_int("samples", self.samples)
        positive_int("n_iter", self.n_iter)
        for end in self.temperature:
            positive_number("temperature", end)

    def fit(
        self,
        loss: Loss,
        starts: Tensor,
        *,
        precision: float = 0.5,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted[GaussianMixture]:
        """Run the rule; ``history`` is E_q[ℓ]/T − H(q) before each step, in nats, by the draws.

        Args:
            loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
            starts: the components' first means, ``[K, P]``; no two of them the same.
            precision: of every component before the first step; low, so that they overlap.
            generator: of the draws.
            progress: a progress bar.

        Raises:
            InputError: starts that are no matrix or coincide, a precision that is not positive,
                or a loss that is not finite.
        """
        starts = _checked(starts)
        if len(torch.unique(starts, dim=0)) < len(starts):
            raise InputError("two components start at the same place: move one a little")
        count, size = starts.shape
        pi = starts.new_full((count,), 1 / count)
        narrow = positive_number("precision", precision) * torch.eye(size).to(starts)
        parts = FullGaussian(starts, narrow.expand(count, size, size).contiguous())
        history, falling = [], np.geomspace(*self.temperature, self.n_iter).tolist()
        for temperature in track(falling, label="multimodal", show=progress):
            points, shares = places(parts, self.look, self.samples, generator=generator)
            flat, marginal = points.flatten(0, 1), GaussianMixture(pi, parts).marginal
            values, gradients, hessians = derivatives(loss, flat)
            logs = marginal.log_prob(flat)
            objective = shares @ (values / temperature + logs).view(-1, count)
            history.append(float((pi * objective).sum()))
            gradients = gradients / temperature + marginal.score(flat)
            hessians = hessians / temperature + marginal.hessian(flat)
            gradient = torch.tensordot(shares, gradients.view(-1, count, size), 1)
            change = torch.tensordot(shares, hessians.view(-1, count, size, size), 1)
            parts = newton_step(parts, gradient, change, self.rho)
        return Fitted(GaussianMixture(pi, parts), history, OBJECTIVE)


def minima(loss: Loss, starts: Tensor, *, tolerance: float = 1e-3, max_iter: int = 100) -> Tensor:
    """The different minima that descents from ``starts`` lead to, ``[M, P]``.

    Newton's method with the absolute values of the Hessian's eigenvalues and halved steps; what
    is no strict minimum, has not come to rest, or is found already within ``tolerance``, is left
    out.

    Args:
        loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
        starts: where to begin, ``[K, P]``.
        tolerance: two minima are the same that are no farther apart; a descent has come to rest
            when its Newton step is no longer.
        max_iter: the most steps of each descent.

    Raises:
        InputError: starts that are no matrix of numbers, or a loss that is no number or not
            finite along the way.

    Example:
        >>> minima(lambda t: (t[0] ** 2 - 1) ** 2, torch.tensor([[-0.5], [0.4], [0.0]]))
        tensor([[-1.0000],
                [ 1.0000]])
    """
    starts = _checked(starts)
    positive_int("max_iter", max_iter)
    lowest: list[Tensor] = []
    for point in starts:
        point, strict = _descent(loss, point, tolerance, max_iter)
        if strict and all(float((point - other).norm()) > tolerance for other in lowest):
            lowest.append(point)
    return torch.stack(lowest) if lowest else starts[:0]


def _descent(loss: Loss, point: Tensor, tolerance: float, most: int) -> tuple[Tensor, bool]:
    """Where it ends, and whether it has come to rest at a strict minimum."""
    size = math.inf
    for _ in range(most):
        value, gradient, curvature = (t[0] for t in derivatives(loss, point.unsqueeze(0)))
        sizes, axes = torch.linalg.eigh(curvature)
        floor = (1e-6 * sizes.abs().amax()).clamp(min=torch.finfo(sizes.dtype).tiny)
        step = axes @ ((axes.mT @ gradient) / sizes.abs().maximum(floor))
        length = 1.0
        while not loss(point - length * step) <= value and length > 1e-8:
            length /= 2
        point, size = point - length * step, float(step.abs().amax())
        if size < 1e-10:
            break
    curvature = derivatives(loss, point.unsqueeze(0))[2][0]
    return point, size <= tolerance and bool(torch.linalg.eigvalsh(curvature)[0] > 0)


def _checked(starts: Tensor) -> Tensor:
    """The starts ``[K, P]`` without their history, or what is wrong with them."""
    finite("starts", starts)
    if starts.ndim != 2 or not starts.numel():
        raise InputError(f"starts must be a matrix, a row each, got {tuple(starts.shape)}")
    return starts.detach()
