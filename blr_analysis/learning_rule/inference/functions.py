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
from blr_analysis.learning_rule.families.special import symmetric
from blr_analysis.learning_rule.inference.fitted import Fitted, answer, until_flat
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.progress import track

Loss = Callable[[Tensor], Tensor]
OBJECTIVE = "E_q[loss]/T − entropy"
AT_REST = 1e-10  # a Newton step below which a descent stops


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
        q = start
        is_noisy = self.look == "samples"

        def step(t: int) -> float:
            nonlocal q
            points, weights = places(q, self.look, self.samples, generator=generator)
            values, gradients, hessians = derivatives(loss, points)
            objective = weights @ values / self.temperature - q.entropy()
            gradient = torch.tensordot(weights, gradients, 1) / self.temperature
            hessian = torch.tensordot(weights, hessians, 1) / self.temperature
            q = newton_step(q, gradient, hessian - q.precision, self.rho)
            return float(objective)

        run = until_flat(step, OBJECTIVE, noisy=is_noisy, **stopping)
        converged = run["converged"] or is_noisy
        return Fitted(q, run["history"], OBJECTIVE, converged=converged)


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
    contract = "loss must be a function (vector [P]) -> a number, differentiable by torch.func"
    number = partial(answer, contract, torch.Size([]), loss)
    with told_as(InputError, contract):
        gradients, values = vmap(grad_and_value(number))(points)
        hessians = vmap(hessian(number))(points)
    results = [result.detach().to(points) for result in (values, gradients, hessians)]
    if not all(bool(result.isfinite().all()) for result in results):
        raise InputError("the loss or its slopes are not finite: begin elsewhere, or lower rho")
    return results[0], results[1], results[2]


def newton_step(q: FullGaussian, gradient: Tensor, change: Tensor, rho: float) -> FullGaussian:
    """S ← S + ρ G + ½ ρ² G S⁻¹ G, m ← m − ρ S⁻¹ g; leading dimensions are copies.

    It is a step of the rule for the Hessian S + G + ½ ρ G S⁻¹ G, whose last term keeps S positive.
    That term is left out at ρ = 1, where the rule forgets S, unless S would not be positive.
    """
    hessian = q.precision + change
    _, failures = torch.linalg.cholesky_ex(q.precision + rho * change)
    if rho < 1 or bool((failures != 0).any()):
        hessian = hessian + 0.5 * rho * change @ torch.linalg.solve(q.precision, change)
    return blr_step(q, q.pull_back(gradient, symmetric(hessian)), rho)


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
        q = _components_at(_checked(starts), positive_number("precision", precision))
        history = []
        temperatures = np.geomspace(*self.temperature, self.n_iter).tolist()
        for temperature in track(temperatures, label="multimodal", show=progress):
            q, objective = self._step(loss, q, temperature, generator)
            history.append(objective)
        return Fitted(q, history, OBJECTIVE)

    def _step(
        self,
        loss: Loss,
        q: GaussianMixture,
        temperature: float,
        generator: torch.Generator | None,
    ) -> tuple[GaussianMixture, float]:
        """q after one step, and the objective before it."""
        components = q.components
        assert isinstance(components, FullGaussian)
        count, size = components.mean.shape
        points, weights = places(components, self.look, self.samples, generator=generator)
        points = points.flatten(0, 1)  # of every draw and component
        values, gradients, hessians = derivatives(loss, points)
        values = values / temperature + q.marginal.log_prob(points)
        gradients = gradients / temperature + q.marginal.score(points)
        hessians = hessians / temperature + q.marginal.hessian(points)
        objectives = weights @ values.view(-1, count)
        gradient = torch.tensordot(weights, gradients.view(-1, count, size), 1)
        change = torch.tensordot(weights, hessians.view(-1, count, size, size), 1)
        after = newton_step(components, gradient, change, self.rho)
        return GaussianMixture(q.weights, after), float((q.weights * objectives).sum())


def _components_at(starts: Tensor, precision: float) -> GaussianMixture:
    """Round components of equal weight at these means ``[K, P]``."""
    if len(torch.unique(starts, dim=0)) < len(starts):
        raise InputError("two components start at the same place: move one a little")
    count, size = starts.shape
    matrix = precision * torch.eye(size).to(starts)
    components = FullGaussian(starts, matrix.expand(count, size, size).contiguous())
    return GaussianMixture(starts.new_full((count,), 1 / count), components)


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
    different: list[Tensor] = []
    for start in starts:
        point, is_minimum = _descent(loss, start, tolerance, max_iter)
        distances = [float((point - minimum).norm()) for minimum in different]
        if is_minimum and all(distance > tolerance for distance in distances):
            different.append(point)
    return torch.stack(different) if different else starts[:0]


def _descent(loss: Loss, point: Tensor, tolerance: float, max_iter: int) -> tuple[Tensor, bool]:
    """Where it ends, and whether it has come to rest at a strict minimum."""
    step_size = math.inf
    for _ in range(max_iter):
        value, gradient, curvature = _derivatives_at(loss, point)
        step = _newton_direction(gradient, curvature)
        length = 1.0
        while not loss(point - length * step) <= value and length > 1e-8:
            length /= 2
        point = point - length * step
        step_size = float(step.abs().amax())
        if step_size < AT_REST:
            break
    _, _, curvature = _derivatives_at(loss, point)
    is_strict = bool(torch.linalg.eigvalsh(curvature)[0] > 0)
    return point, is_strict and step_size <= tolerance


def _newton_direction(gradient: Tensor, curvature: Tensor) -> Tensor:
    """The gradient divided by the absolute values of the Hessian's eigenvalues."""
    eigenvalues, axes = torch.linalg.eigh(curvature)
    largest = eigenvalues.abs().amax()
    floor = (1e-6 * largest).clamp(min=torch.finfo(eigenvalues.dtype).tiny)
    return axes @ ((axes.mT @ gradient) / eigenvalues.abs().maximum(floor))


def _derivatives_at(loss: Loss, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, ∇ℓ and ∇²ℓ at one point."""
    values, gradients, hessians = derivatives(loss, point.unsqueeze(0))
    return values[0], gradients[0], hessians[0]


def _checked(starts: Tensor) -> Tensor:
    """The starts ``[K, P]`` without their history, or what is wrong with them."""
    finite("starts", starts)
    if starts.ndim != 2 or not starts.numel():
        raise InputError(f"starts must be a matrix of rows, got {tuple(starts.shape)}")
    return starts.detach()
