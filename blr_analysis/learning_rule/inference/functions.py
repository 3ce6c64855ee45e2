"""The rule as an optimiser: q is a Gaussian, or a mixture of them, over the arguments of a loss.

    m ← m − ρ S⁻¹ E_q[∇ℓ],      S ← (1 − ρ) S + ρ E_q[∇²ℓ]          (Khan & Rue, Eq. 12)

minimises E_q[ℓ] − T·H(q) if it is applied to the loss ℓ/T. Where ℓ curves downwards, S could cease
to be positive definite. The step ρ G, G = E_q[∇²ℓ] − S, is therefore taken along the manifold of
positive definite matrices (Lin et al., ICML 2020):

    S ← S + ρ G + ½ ρ² G S⁻¹ G

*Several minima in one run.* q is a mixture Σ_k π_k N(θ | m_k, S_k⁻¹) with fixed π. Every component
k takes the step (Khan & Rue, Eqs. 29, 30; Lin et al., ICML 2019)

    m_k ← m_k − ρ S_k⁻¹ E_{q_k}[∇ℓ/T + ∇ log q],      S_k ← S_k + ρ E_{q_k}[∇²ℓ/T + ∇² log q]

The term ∇ log q pushes a component away from the others. Without it every component would follow
Newton's method by itself.
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
from blr_analysis.learning_rule.families.matrices import symmetric
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.fitted import Fitted, answer, until_flat
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.progress import track

Loss = Callable[[Tensor], Tensor]
OBJECTIVE = "E_q[loss]/T − entropy"
AT_REST = 1e-10  # a descent ends when no coordinate of its Newton step is larger
SHORTEST = 1e-8  # share of a Newton step, below which it is not halved again
SMALLEST_CURVATURE = 1e-6  # of a Newton step, as a share of the Hessian's largest eigenvalue


@dataclass(frozen=True)
class VariationalNewton:
    """Variational online Newton on a loss of few variables.

    With ``look="mean"`` (the delta method) and ρ = 1 it is Newton's method. With an expectation it
    prefers minima in wide valleys (K&R, Fig. 1).

    Args:
        look: how E_q is computed: "quadrature" (Gauss–Hermite, for one variable only), "samples",
            or "mean" (the value at the mean of q).
        samples: the number of draws per step, in pairs m ± ε, or of nodes of the quadrature.
        rho: ρ in (0, 1].
        temperature: T; a smaller one gives a narrower q.

    Raises:
        InputError: a setting is out of range.

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
            generator: draws the samples, for "samples".
            stopping: ``max_iter``, ``tol`` (which "samples" ignore: they make all steps), and
                ``progress`` (whether to show a bar).

        Raises:
            InputError: the loss is no number, or not finite; the start is more than one Gaussian,
                or has several variables with "quadrature".
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
        InputError: ℓ is no number, not finite at a point, or not differentiable by torch.

    Example:
        >>> derivatives(lambda t: t[0] ** 3, torch.tensor([[1.0], [2.0]]))
        (tensor([1., 8.]), tensor([[ 3.],
                [12.]]), tensor([[[ 6.]],
        <BLANKLINE>
                [[12.]]]))
    """
    contract = "loss must be a function (vector [P]) -> a number, differentiable by torch.func"
    checked_loss = partial(answer, contract, torch.Size([]), loss)
    with told_as(InputError, contract):
        gradients, values = vmap(grad_and_value(checked_loss))(points)
        hessians = vmap(hessian(checked_loss))(points)
    values = values.detach().to(points)
    gradients = gradients.detach().to(points)
    hessians = hessians.detach().to(points)
    if not all(bool(result.isfinite().all()) for result in (values, gradients, hessians)):
        raise InputError("the loss or its slopes are not finite: begin elsewhere, or lower rho")
    return values, gradients, hessians


def newton_step(q: FullGaussian, gradient: Tensor, change: Tensor, rho: float) -> FullGaussian:
    """q after S ← S + ρ G + ½ ρ² G S⁻¹ G and m ← m − ρ S⁻¹ g.

    It is a step of the rule for the Hessian S + G + ½ ρ G S⁻¹ G, whose last term keeps S positive
    definite. At ρ = 1 the rule replaces S by the Hessian; there the term is left out, unless the
    Hessian is not positive definite.

    Args:
        q: one Gaussian, or several with a leading dimension.
        gradient: g ``[…, P]``.
        change: G ``[…, P, P]``.
        rho: ρ in (0, 1].
    """
    hessian = q.precision + change
    _, failures = torch.linalg.cholesky_ex(q.precision + rho * change)
    is_positive_definite = bool((failures == 0).all())
    if rho < 1 or not is_positive_definite:
        hessian = hessian + 0.5 * rho * change @ torch.linalg.solve(q.precision, change)
    loss_gradient = q.pull_back(gradient, symmetric(hessian))
    return blr_step(q, loss_gradient, rho)


@dataclass(frozen=True)
class MultimodalOptimisation:
    """Locate many minima of a loss at once.

    Args:
        rho: ρ in (0, 1].
        temperature: T at the first and at the last step, with geometric steps between. A high T
            spreads the components, a low T moves them to minima.
        look: "samples", or "mean", the delta method of Table 1, which takes derivatives of ℓ and
            log q at each component's mean.
        samples: the number of draws of each component per step, in pairs m ± ε.
        n_iter: the number of steps.

    Raises:
        InputError: a setting is out of range.

    Example:
        Two components start close together between two wells, and each finds one:

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
        """Run the rule; ``history`` estimates E_q[ℓ]/T − H(q) before each step, in nats.

        Args:
            loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
            starts: the first means of K components, ``[K, P]``, all different.
            precision: the first precision of every component; a low one makes them overlap.
            generator: draws the samples.
            progress: whether to show a bar.

        Raises:
            InputError: starts are no matrix or coincide, the precision is not positive, or the
                loss is not finite.
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
        n_components, n_variables = components.mean.shape
        points, weights = places(components, self.look, self.samples, generator=generator)
        points = points.flatten(0, 1)  # [S·K, P], of S draws and K components
        values, gradients, hessians = derivatives(loss, points)
        values = values / temperature + q.marginal.log_prob(points)
        gradients = gradients / temperature + q.marginal.score(points)
        hessians = hessians / temperature + q.marginal.hessian(points)
        objectives = weights @ values.view(-1, n_components)
        gradient = torch.tensordot(weights, gradients.view(-1, n_components, n_variables), 1)
        hessians = hessians.view(-1, n_components, n_variables, n_variables)
        change = torch.tensordot(weights, hessians, 1)
        after = newton_step(components, gradient, change, self.rho)
        objective = float((q.weights * objectives).sum())
        return GaussianMixture(q.weights, after), objective


def _components_at(starts: Tensor, precision: float) -> GaussianMixture:
    """A mixture of K components of equal weight at these means ``[K, P]``.

    The precision of each is ``precision`` times the identity.
    """
    if len(torch.unique(starts, dim=0)) < len(starts):
        raise InputError("two components start at the same place: move one a little")
    n_components, n_variables = starts.shape
    matrix = precision * torch.eye(n_variables).to(starts)
    precisions = matrix.expand(n_components, n_variables, n_variables).contiguous()
    weights = starts.new_full((n_components,), 1 / n_components)
    return GaussianMixture(weights, FullGaussian(starts, precisions))


def minima(loss: Loss, starts: Tensor, *, tolerance: float = 1e-3, max_iter: int = 100) -> Tensor:
    """The different minima that descents from ``starts`` lead to, ``[M, P]``.

    A descent is Newton's method with the absolute values of the Hessian's eigenvalues; a step is
    halved until the loss does not rise. The end of a descent is left out if it is no strict
    minimum, if the descent is still moving, or if another descent ended at the same minimum.

    Args:
        loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
        starts: where the descents begin, ``[K, P]``.
        tolerance: two ends at most this far apart are the same minimum, and a descent whose last
            Newton step is at most this long has ended.
        max_iter: the largest number of steps of each descent.

    Raises:
        InputError: starts are no matrix of numbers, or the loss is no number or not finite along
            the way.

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
    """Where the descent from ``point`` ends, and whether it ended at a strict minimum."""
    step_size = math.inf
    for _ in range(max_iter):
        value, gradient, curvature = _derivatives_at(loss, point)
        newton_step = _newton_direction(gradient, curvature)
        fraction = 1.0
        while not loss(point - fraction * newton_step) <= value and fraction > SHORTEST:
            fraction /= 2
        point = point - fraction * newton_step
        step_size = float(newton_step.abs().amax())
        if step_size < AT_REST:
            break
    _, _, curvature = _derivatives_at(loss, point)
    smallest_eigenvalue = torch.linalg.eigvalsh(curvature)[0]
    is_strict_minimum = bool(smallest_eigenvalue > 0)
    return point, is_strict_minimum and step_size <= tolerance


def _newton_direction(gradient: Tensor, curvature: Tensor) -> Tensor:
    """|H|⁻¹ g, with the absolute values of the Hessian's eigenvalues, bounded away from 0."""
    eigenvalues, axes = torch.linalg.eigh(curvature)
    sizes = eigenvalues.abs()
    floor = (SMALLEST_CURVATURE * sizes.amax()).clamp(min=torch.finfo(sizes.dtype).tiny)
    along_axes = axes.mT @ gradient
    return axes @ (along_axes / sizes.maximum(floor))


def _derivatives_at(loss: Loss, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, ∇ℓ and ∇²ℓ at one point."""
    values, gradients, hessians = derivatives(loss, point.unsqueeze(0))
    return values[0], gradients[0], hessians[0]


def _checked(starts: Tensor) -> Tensor:
    """The starts ``[K, P]``, detached from autograd; an InputError for anything but a matrix."""
    finite("starts", starts)
    if starts.ndim != 2 or not starts.numel():
        raise InputError(f"starts must be a matrix of rows, got {tuple(starts.shape)}")
    return starts.detach()
