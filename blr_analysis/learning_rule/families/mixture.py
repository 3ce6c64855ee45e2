"""Finite mixtures of Gaussians with fixed weights (Khan & Rue, section 3.2 and App. E).

The rule moves the joint distribution q(θ, z = k) = π_k N(θ | m_k, S_k⁻¹) of a point and its
component, because the joint's Fisher information is regular. The objective E_q[ℓ̄] − H(q(θ)) has
the entropy of the marginal. One step is (K&R 28)

    λ_k ← λ_k − ρ ∇_μ_k E_q[ℓ̄ + log q(θ)]

and its fixed point minimises the objective. In code a step is
``q.with_natural(subtract(q.natural, scale(gradient, rho)))``. It has no factor (1 − ρ), which the
entropy of the joint would bring.

:meth:`GaussianMixture.pull_back` gives ∇_μ_k E_q[f] from E_{q_k}[∇f] and E_{q_k}[∇²f], in which the
weights π_k cancel. For f = log q the two are expectations of :meth:`Marginal.score` and
:meth:`Marginal.hessian`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import above, points, same_dtype
from blr_analysis.learning_rule.families.drawing import many, uniform
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.families.matrices import times

ROUNDING = 1e-5  # by which the weights may sum to another number than 1


@dataclass(frozen=True, eq=False)
class GaussianMixture(ExponentialFamily):
    """The joint of a point and its component: π_k N(θ | m_k, S_k⁻¹), π fixed (K&R 27).

        λ_k = (S_k m_k, −S_k/2)
        T_k = (1_{z=k} θ, 1_{z=k} θθᵀ)
        μ_k = π_k (m_k, S_k⁻¹ + m_k m_kᵀ)
        A(λ) = Σ_k π_k A(λ_k)

    Points are dictionaries with ``theta`` ``[..., P]`` and ``component`` ``[...]``, the number of
    the component. Entropy, KL and log-probability here are the joint's, in closed form;
    :attr:`marginal` has those of q(θ).

    Attributes:
        weights: π ``[..., K]``, above 0, of sum 1.
        components: K Gaussians, full or diagonal, with means ``[..., K, P]``.

    Raises:
        InputError: the weights are not positive with a sum of 1, or not one for each component.

    Example:
        >>> parts = DiagonalGaussian(torch.tensor([[-2.0], [2.0]]), torch.ones(2, 1))
        >>> q = GaussianMixture(torch.tensor([0.25, 0.75]), parts)
        >>> q.expectation["linear"]
        tensor([[-0.5000],
                [ 1.5000]])
        >>> q.marginal.responsibilities(torch.tensor([0.0]))
        tensor([0.2500, 0.7500])
    """

    weights: Tensor
    components: FullGaussian | DiagonalGaussian

    def __post_init__(self) -> None:
        if not isinstance(self.components, FullGaussian | DiagonalGaussian):
            raise InputError("components must be a FullGaussian or DiagonalGaussian")
        above("weights", self.weights, rank=1, advice="")
        distance_from_one = (self.weights.sum(-1) - 1).abs()
        if bool((distance_from_one > ROUNDING).any()):
            raise InputError("the weights of a mixture must sum to 1")
        if self.weights.shape != self.components.mean.shape[:-1]:
            raise InputError("a mixture needs one weight for each component")
        same_dtype(weights=self.weights, components=self.components.mean)

    @property
    def ranks(self) -> Mapping[str, int]:  # type: ignore[override]
        return {name: rank + 1 for name, rank in self.components.ranks.items()}

    @property
    def marginal(self) -> Marginal:
        """q(θ) = Σ_k π_k N(θ | m_k, S_k⁻¹)."""
        return Marginal(self.weights, self.components)

    @property
    def natural(self) -> Natural:
        return self.components.natural

    @property
    def expectation(self) -> Natural:
        return {
            name: _aligned(self.weights, value) * value
            for name, value in self.components.expectation.items()
        }

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return self._with_components(self.components.with_natural(natural))

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        of_components = {
            name: value / _aligned(self.weights, value) for name, value in expectation.items()
        }
        return self._with_components(self.components.with_expectation(of_components))

    def statistics(self, theta: Mapping[str, Tensor]) -> Natural:
        is_component = self._indicators(theta)
        statistics = self.components.statistics(theta["theta"].unsqueeze(-2))
        return {name: _aligned(is_component, value) * value for name, value in statistics.items()}

    def log_partition(self) -> Tensor:
        return (self.weights * self.components.log_partition()).sum(-1)

    def expected_log_base(self) -> Tensor:
        """E[log h] = Σ π_k log π_k; the log-partitions in :meth:`log_base` cancel on average."""
        return (self.weights * self.weights.log()).sum(-1)

    def log_base(self, theta: Mapping[str, Tensor]) -> Tensor:
        """log h = log π_z + A(λ) − A(λ_z), because a component's density has A(λ_z), not A(λ)."""
        log_base_of_components = self.weights.log() - self.components.log_partition()
        of_point = (self._indicators(theta) * log_base_of_components).sum(-1)
        return of_point + self.log_partition()

    def _kl(self, other: Self) -> Tensor:
        """The KL divergence of the joints, Σ π_k KL_k, an upper bound of the marginals'."""
        if not torch.equal(self.weights, other.weights):
            raise InputError("the KL divergence of two mixtures needs the same weights for both")
        return (self.weights * self.components.kl(other.components)).sum(-1)  # type: ignore[arg-type]

    def pull_back(self, gradient: Tensor, hessian: Tensor) -> Natural:
        """∇_μ_k E_q[f] from E_{q_k}[∇f] and E_{q_k}[∇²f] of every component.

        Args:
            gradient: E_{q_k}[∇f], ``[..., K, P]``.
            hessian: E_{q_k}[∇²f], ``[..., K, P, P]``; for diagonal components its diagonal,
                ``[..., K, P]``.
        """
        return self.components.pull_back(gradient, hessian)

    def expected_point(self) -> dict[str, Tensor]:
        raise InputError("component numbers have no mean: average components.mean by the weights")

    def sample(
        self, n: int | None = None, *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``{"theta": θ, "component": z}``, ``[n, ..., P]`` and ``[n, ...]``."""
        cumulative = many(self.weights.detach().cumsum(-1), n)
        uniform_draws = uniform(cumulative[..., :1], generator)
        component = (uniform_draws > cumulative[..., :-1]).sum(-1)
        of_each_component = self.components.sample(n, generator=generator)
        *copies, _, n_parameters = of_each_component.shape
        index = component[..., None, None].expand(*copies, 1, n_parameters)
        theta = of_each_component.gather(-2, index).squeeze(-2)
        return {"theta": theta, "component": component}

    def _with_components(self, components: FullGaussian | DiagonalGaussian) -> Self:
        """The mixture of other components with the same weights."""
        return type(self)(self.weights.to(components.mean), components)

    def _indicators(self, theta: Mapping[str, Tensor]) -> Tensor:
        """1 for the point's component and 0 for the others, ``[..., K]``."""
        self._check_point(theta, ("theta", "component"))
        component = theta["component"]
        n_components = self.weights.shape[-1]
        points(component, self.weights[..., 0], 0, "component")
        points(theta["theta"], self.components.mean[..., 0, :], 1, "theta")
        if theta["theta"].shape[:-1] != component.shape:
            raise InputError("theta needs a component for each point")
        is_in_range = (component >= 0) & (component < n_components)
        if component.is_floating_point() or not bool(is_in_range.all()):
            raise InputError(f"components must be integers from 0 to {n_components - 1}")
        return one_hot(component.long(), n_components).to(self.weights.dtype)


@dataclass(frozen=True, eq=False)
class Marginal:
    """q(θ) = Σ_k π_k N(θ | m_k, S_k⁻¹), with its derivatives (K&R, App. E).

    θ is ``[..., P]`` in every method. Its leading dimensions are broadcast against the mixture's.

    Example:
        >>> parts = DiagonalGaussian(torch.tensor([[0.0], [4.0]]), torch.ones(2, 1))
        >>> q = GaussianMixture(torch.tensor([0.5, 0.5]), parts).marginal
        >>> q.score(torch.tensor([2.0])), q.hessian(torch.tensor([2.0]))
        (tensor([0.]), tensor([[3.]]))
    """

    weights: Tensor
    components: FullGaussian | DiagonalGaussian

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(θ), in nats."""
        return torch.logsumexp(self._log_joint(theta), -1)

    def responsibilities(self, theta: Tensor) -> Tensor:
        """r_k(θ) = q(z = k | θ), ``[..., K]`` (K&R 71)."""
        return torch.softmax(self._log_joint(theta), -1)

    def score(self, theta: Tensor) -> Tensor:
        """∇ log q(θ) = Σ_k r_k S_k (m_k − θ), ``[..., P]`` (K&R 69)."""
        responsibilities = self.responsibilities(theta).unsqueeze(-1)
        return (responsibilities * self._pulls(theta)).sum(-2)

    def hessian(self, theta: Tensor) -> Tensor:
        """∇² log q(θ) ``[..., P, P]`` (K&R 70).

        Computed as Σ r_k (s_k − s)(s_k − s)ᵀ − Σ r_k S_k with s_k = S_k (m_k − θ), s = Σ r_k s_k,
        which equals the paper's formula, and in which no large terms cancel.
        """
        responsibilities = self.responsibilities(theta).unsqueeze(-1)
        pulls = self._pulls(theta)
        mean_pull = (responsibilities * pulls).sum(-2, keepdim=True)
        deviations = pulls - mean_pull
        precision = self.components.precision
        if isinstance(self.components, DiagonalGaussian):
            precision = torch.diag_embed(precision)
        mean_precision = (responsibilities.unsqueeze(-1) * precision).sum(-3)
        return (responsibilities * deviations).mT @ deviations - mean_precision

    def _log_joint(self, theta: Tensor) -> Tensor:
        """log π_k + log N(θ | m_k, S_k⁻¹), ``[..., K]``; no large terms cancel as in ⟨λ, T⟩."""
        points(theta, self.components.mean[..., 0, :], 1)
        offsets = self.components.mean - theta.unsqueeze(-2)
        square_distance = (offsets * self._pulls(theta)).sum(-1)  # in the metric S_k
        log_prob_at_mean = self.components.log_prob(self.components.mean)
        return self.weights.log() + log_prob_at_mean - 0.5 * square_distance

    def _pulls(self, theta: Tensor) -> Tensor:
        """S_k (m_k − θ), ``[..., K, P]``."""
        offsets = self.components.mean - theta.unsqueeze(-2)
        if isinstance(self.components, DiagonalGaussian):
            return self.components.precision * offsets
        return times(self.components.precision, offsets)


def _aligned(weights: Tensor, values: Tensor) -> Tensor:
    """Weights ``[..., K]`` with trailing dimensions of 1, so that they multiply values of the
    components ``[..., K, ...]``."""
    n_trailing = values.ndim - weights.ndim
    ones = [1] * n_trailing
    return weights.reshape(*weights.shape, *ones)
