"""Several minima in one run: a mixture of Gaussians, whose entropy keeps its components apart.

For every component k of q(θ) = Σ_k π_k N(θ | m_k, S_k⁻¹), with fixed π (Khan & Rue, Eqs. 29, 30;
Lin et al., ICML 2019),

    m_k ← m_k − ρ S_k⁻¹ E_{q_k}[∇ℓ/T + ∇ log q],      S_k ← S_k + ρ E_{q_k}[∇²ℓ/T + ∇² log q]

∇ log q pushes components away from where others are. Without it (``entropy=False``) each is a
Newton method of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.checks import one_of, positive_int, positive_number, share
from blr_analysis.checks import tolerance as check_tolerance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import places
from blr_analysis.learning_rule.families.domain import finite
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.families.mixture import GaussianMixture
from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.learning_rule.inference.functions import (
    Loss,
    derivatives,
    newton_step,
)
from blr_analysis.progress import track


@dataclass(frozen=True)
class MultimodalOptimisation:
    """Locate many minima of a loss at once.

    Args:
        rho: ρ in (0, 1].
        temperature: T: a number, or two, from which it falls to which: high ones spread the
            components, low ones settle them.
        look: "samples", or "mean", the delta method of Table 1: ∇ log q and ∇² log q are then those
            at each component's mean.
        samples: draws of each component per step, taken in pairs m ± ε.
        n_iter: steps.
        entropy: whether the entropy has its share; without it components end up together.

    Raises:
        InputError: settings out of range.

    Example:
        Two wells, from two components that start nearly on one another between them.

        >>> starts = torch.tensor([[-0.1], [0.1]])
        >>> rule = MultimodalOptimisation(temperature=0.5)
        >>> generator = torch.Generator().manual_seed(0)
        >>> wells = lambda t: (t[0] ** 2 - 4) ** 2 / 8
        >>> fitted = rule.fit(wells, starts, generator=generator, progress=False)
        >>> minima(wells, fitted.q.components.mean).sort(0).values.round(decimals=3)
        tensor([[-2.],
                [ 2.]])
    """

    rho: float = 0.1
    temperature: float | tuple[float, float] = 1.0
    look: str = "samples"
    samples: int = 12
    n_iter: int = 200
    entropy: bool = True

    def __post_init__(self) -> None:
        share("rho", self.rho)
        one_of("look", self.look, ("samples", "mean"))
        positive_int("samples", self.samples)
        positive_int("n_iter", self.n_iter)
        ends = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,) * 2
        if len(ends) != 2:
            raise InputError(f"temperature must be one number or two, got {self.temperature!r}")
        for end in ends:
            positive_number("temperature", end)

    def fit(
        self,
        loss: Loss,
        starts: Tensor,
        *,
        precision: float = 0.5,
        weights: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted[GaussianMixture]:
        """Run the rule; ``history`` is E_q[ℓ]/T − H(q) before each step, in nats, by the draws.

        Args:
            loss: ℓ, from a vector ``[P]`` to a number, by torch operations.
            starts: the components' first means, ``[K, P]``; no two of them the same.
            precision: of every component before the first step; low, so that they overlap.
            weights: π ``[K]``; equal if None.
            generator: of the draws.
            progress: a progress bar.

        Raises:
            InputError: starts that are no matrix or coincide, a precision that is not positive,
                weights that are no probabilities, or a loss that is not finite.
        """
        starts = _checked(starts)
        if len(torch.unique(starts, dim=0)) < len(starts):
            raise InputError("two components start at the same place: move one a little")
        precision = positive_number("precision", precision)
        count, size = starts.shape
        pi = starts.new_full((count,), 1 / count) if weights is None else weights
        eye = torch.eye(size, dtype=starts.dtype, device=starts.device)
        parts = FullGaussian(starts, (precision * eye).expand(count, size, size).contiguous())
        history = []
        for k in track(range(self.n_iter), label="multimodal", show=progress):
            temperature = self._temperature(k)
            q = GaussianMixture(pi, parts)
            points, shares = places(parts, self.look, self.samples, generator=generator)
            flat, marginal = points.flatten(0, 1), q.marginal  # [S · K, P]
            values, gradients, hessians = derivatives(loss, flat)
            logs = marginal.log_prob(flat)
            objective = shares @ (values / temperature + logs).view(-1, count)
            history.append(float((pi * objective).sum()))
            gradients, hessians = gradients / temperature, hessians / temperature
            if self.entropy:
                gradients = gradients + marginal.score(flat)
                hessians = hessians + marginal.hessian(flat)
            gradient = torch.tensordot(shares, gradients.view(-1, count, size), 1)
            change = torch.tensordot(shares, hessians.view(-1, count, size, size), 1)
            parts = newton_step(parts, gradient, change, self.rho)
        return Fitted(GaussianMixture(pi, parts), history, "E_q[loss]/T − entropy")

    def _temperature(self, k: int) -> float:
        if not isinstance(self.temperature, tuple):
            return float(self.temperature)
        first, last = self.temperature
        return first * (last / first) ** (k / max(1, self.n_iter - 1))


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

    Returns:
        The minima in the order found, with M = 0 if there are none.

    Raises:
        InputError: starts that are no matrix of numbers, settings out of range, or a loss that is
            no number or not finite along the way.

    Example:
        >>> minima(lambda t: (t[0] ** 2 - 1) ** 2, torch.tensor([[-0.5], [0.4], [0.0]]))
        tensor([[-1.0000],
                [ 1.0000]])
    """
    starts, tolerance = _checked(starts), check_tolerance("tolerance", tolerance)
    positive_int("max_iter", max_iter)
    lowest: list[Tensor] = []
    for point in starts:
        size = math.inf
        for _ in range(max_iter):
            value, gradient, curvature = (t[0] for t in derivatives(loss, point.unsqueeze(0)))
            sizes, axes = torch.linalg.eigh(curvature)
            sizes = sizes.abs()
            floor = torch.maximum(
                1e-6 * sizes.amax(), sizes.new_tensor(torch.finfo(sizes.dtype).tiny)
            )
            step = axes @ ((axes.mT @ gradient) / sizes.maximum(floor))
            length = 1.0
            while not loss(point - length * step) <= value and length > 1e-8:
                length /= 2
            point = point - length * step
            size = float(step.abs().amax())
            if size < 1e-10:
                break
        strict = bool(torch.linalg.eigvalsh(derivatives(loss, point.unsqueeze(0))[2][0])[0] > 0)
        new = all(float((point - other).norm()) > tolerance for other in lowest)
        if strict and new and size <= tolerance:
            lowest.append(point)
    return torch.stack(lowest) if lowest else starts[:0]


def _checked(starts: Tensor) -> Tensor:
    """The starts ``[K, P]`` without their history, or what is wrong with them."""
    finite("starts", starts)
    if starts.ndim != 2 or not starts.numel():
        raise InputError(
            f"starts must be a matrix with a row per component, got {tuple(starts.shape)}"
        )
    return starts.detach()
