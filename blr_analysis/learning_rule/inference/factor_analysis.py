"""Factor analysis and probabilistic PCA: EM with hidden numbers (Rubin & Thayer, 1982).

    y = m + W z + e,     z ~ N(0, I),     e ~ N(0, Ψ)

with Ψ diagonal, or σ² I (probabilistic PCA; Tipping & Bishop, 1999), and θ = (W, m, Ψ). As in
:mod:`.em` the two steps are steps of the rule at ρ = 1:

    E-step   q(z_i) = N(G Wᵀ Ψ⁻¹ (y_i − m), G),   G⁻¹ = I + Wᵀ Ψ⁻¹ W      conjugate Bayes
    M-step   [W, m] = E[y z̃ᵀ] E[z̃ z̃ᵀ]⁻¹,   Ψ = diag(E[y yᵀ] − [W, m] E[z̃ yᵀ]),     z̃ = (z, 1)

The site of an example is its expected statistics (y z̃ᵀ, z̃ z̃ᵀ, y∘y). Everything is computed in
double precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families.base import Natural
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.families.matrices import outer
from blr_analysis.learning_rule.inference.em import FittedEM, check_data
from blr_analysis.learning_rule.inference.fitted import Model, until_flat

NO_NOISE = 1e-10  # share of a column's variance; noise below it is rounding error
SMALLEST_FIRST_NOISE = 1e-3  # variance in squared units of the data, so that EM can start


@dataclass(frozen=True, eq=False)
class Factors:
    """The parameters of y = m + W z + e, a Gaussian whose covariance is W Wᵀ + Ψ.

    Tensors may have leading dimensions: one factor model for each of their entries.

    Attributes:
        loadings: W ``[D, factors]``, up to a rotation.
        mean: m ``[D]``.
        noise: the diagonal of Ψ ``[D]``.
    """

    loadings: Tensor
    mean: Tensor
    noise: Tensor

    @property
    def marginal(self) -> FullGaussian:
        """N(m, W Wᵀ + Ψ)."""
        covariance = self.loadings @ self.loadings.mT + torch.diag_embed(self.noise)
        return FullGaussian(self.mean, torch.linalg.inv(covariance))

    def hidden(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """E[z_i] of every example, ``[N, factors]``, and the covariance that all z_i share."""
        weighted = self.loadings / self.noise.unsqueeze(-1)
        identity = torch.eye(weighted.shape[1]).to(y)
        precision = identity + self.loadings.mT @ weighted
        covariance = torch.linalg.inv(precision)
        means = (y - self.mean) @ weighted @ covariance
        return means, covariance


@dataclass(frozen=True)
class FactorAnalysis(Model):
    """Maximum likelihood of a Gaussian whose covariance is W Wᵀ + Ψ.

    Attributes:
        n_factors: columns of W.
        noise: ``"diagonal"`` for Ψ of factor analysis, ``"spherical"`` for σ² I of probabilistic
            PCA.

    Raises:
        InputError: the number of factors is not positive, or the noise has another name.

    Example:
        >>> x = torch.tensor([[-2.0, -2.1], [-1.0, -0.8], [1.0, 1.2], [2.0, 1.7]])
        >>> fitted = FactorAnalysis(1, noise="spherical").fit(x, progress=False)
        >>> fitted.loadings.abs().round(decimals=2)
        tensor([[1.5700],
                [1.5200]], dtype=torch.float64)
    """

    n_factors: int
    noise: str = "diagonal"

    def __post_init__(self) -> None:
        positive_int("n_factors", self.n_factors)
        one_of("noise", self.noise, ("diagonal", "spherical"))

    def fit(self, data: Tensor, **stopping: Any) -> FittedFactors:
        """EM from the leading principal directions.

        Args:
            data: ``[N, D]``, with more columns D than factors.
            stopping: ``max_iter``, ``tol`` and ``progress`` of :meth:`GaussianMixtureEM.fit`.

        Returns:
            W, m and Ψ as ``q``, and log p(y) at each E-step as ``history``.

        Raises:
            DataError: data are misshapen or not finite, have too few columns or examples, or
                have a column that the factors explain without noise.
        """
        data = check_data(data, fewest=2)
        if data.shape[1] <= self.n_factors:
            raise DataError(f"{self.n_factors} factors need more columns, got {data.shape[1]}")
        smallest_noise = NO_NOISE * data.var(0, correction=0)
        q = self._principal_directions(data)

        def step(t: int) -> float:
            nonlocal q
            log_likelihood = float(q.marginal.log_prob(data).sum())
            q = self.step(q, data)
            if bool((q.noise <= smallest_noise).any()):
                raise DataError("the factors explain a column wholly: leave it out")
            return log_likelihood

        run = until_flat(step, "log-likelihood", len(data), **stopping)
        return FittedFactors(q=q, **run, model=self, data=data)

    def _principal_directions(self, data: Tensor) -> Factors:
        """Factors that explain half of the variance along the leading principal directions."""
        covariance = torch.cov(data.mT, correction=0)
        eigenvalues, directions = torch.linalg.eigh(covariance)  # in ascending order
        variances = eigenvalues[-self.n_factors :] / 2
        loadings = directions[:, -self.n_factors :] * variances.clamp(min=0).sqrt()
        explained = loadings.square().sum(1)
        noise = data.var(0, correction=0) - explained
        return Factors(loadings, data.mean(0), noise.clamp(min=SMALLEST_FIRST_NOISE))

    def check(self, data: Any) -> Tensor:
        return check_data(data)

    def sites(self, q: Factors, data: Tensor) -> Natural:
        return _expected_statistics(q, data)

    def step(self, q: Factors, data: Tensor) -> Factors:
        """The factors after one E-step and one M-step."""
        return self.maximise(_expected_totals(q, data))

    def log_predictive(self, q: Factors, data: Tensor) -> Tensor:
        """log N(y | m, W Wᵀ + Ψ)."""
        return q.marginal.log_prob(data)

    def maximise(self, totals: Natural) -> Factors:
        """The M-step: W, m and Ψ from summed statistics, one model for each leading entry."""
        solution = torch.linalg.solve(totals["zz"], totals["yz"].mT)
        coefficients = solution.mT  # the matrix [W, m]
        explained = (coefficients * totals["yz"]).sum(-1)
        n_data = totals["zz"][..., -1, -1:]  # the last entry of z̃ is 1, so its square sums to N
        noise = (totals["yy"] - explained) / n_data
        if self.noise == "spherical":
            noise = noise.mean(-1, keepdim=True).expand_as(noise)
        loadings = coefficients[..., :-1]
        mean = coefficients[..., -1]
        return Factors(loadings, mean, noise)


class FittedFactors(FittedEM):
    """A fitted factor model: it has the attributes of its ``q``, a :class:`Factors`."""

    def factors(self, data: Tensor) -> Tensor:
        """E[z | y] of M examples, ``[M, factors]``.

        Raises:
            DataError: data are misshapen or not finite.
        """
        data = check_data(data, columns=len(self.q.mean))
        means, _ = self.q.hidden(data)
        return means


def _expected_statistics(q: Factors, y: Tensor) -> Natural:
    """E[(y z̃ᵀ, z̃ z̃ᵀ, y∘y)] of every example."""
    z, covariance = _hidden_with_one(q, y)
    return {
        "yz": outer(y, z),
        "zz": outer(z, z) + covariance,
        "yy": y.square(),
    }


def _expected_totals(q: Factors, y: Tensor) -> Natural:
    """The sums of :func:`_expected_statistics` over all examples."""
    z, covariance = _hidden_with_one(q, y)
    return {
        "yz": y.mT @ z,
        "zz": z.mT @ z + len(y) * covariance,
        "yy": y.square().sum(0),
    }


def _hidden_with_one(q: Factors, y: Tensor) -> tuple[Tensor, Tensor]:
    """E[z̃_i] of every example, with z̃ = (z, 1), and the covariance of z̃."""
    z, covariance = q.hidden(y)
    ones = torch.ones_like(z[:, :1])
    with_one = torch.cat([z, ones], 1)
    return with_one, pad(covariance, (0, 1, 0, 1))
