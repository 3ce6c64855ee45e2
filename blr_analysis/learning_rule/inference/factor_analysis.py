"""Factor analysis and probabilistic PCA by EM (Khan & Rue, 5.2; Rubin & Thayer, 1982).

    y = m + W z + e,     z ~ N(0, I),     e ~ N(0, Ψ)

Ψ is diagonal (factor analysis) or σ² I (probabilistic PCA; Tipping & Bishop, 1999). The steps are
coordinate-wise steps of the rule at ρ = 1, with the delta method on θ = (W, m, Ψ):

    E-step   q(z_i) = N(G Wᵀ Ψ⁻¹ (y_i − m), G),   G⁻¹ = I + Wᵀ Ψ⁻¹ W      conjugate Bayes
    M-step   [W, m] = E[y z̃ᵀ] E[z̃ z̃ᵀ]⁻¹,   Ψ = diag(E[y yᵀ] − [W, m] E[z̃ yᵀ]),     z̃ = (z, 1)

What an example tells θ are its expected statistics (y z̃ᵀ, z̃ z̃ᵀ, y∘y).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import one_of, positive_int, tolerance
from blr_analysis.data import chosen_indices
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, subtract
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.fitted import Fitted, Sites, total, until_flat
from blr_analysis.learning_rule.inference.mixture_model import check_data
from blr_analysis.progress import track

Theta = tuple[Tensor, Tensor, Tensor]
"""W, m counted from the data's mean, and the diagonal of Ψ."""
ROUNDING = 1e-10  # of a column's variance: less noise than that is none


@dataclass(frozen=True)
class FactorAnalysis:
    """Maximum likelihood of a Gaussian whose covariance is W Wᵀ + Ψ.

    Attributes:
        n_factors: columns of W.
        noise: ``"diagonal"``, Ψ of factor analysis, or ``"spherical"``, σ² I of probabilistic PCA.

    Raises:
        InputError: no positive number of factors, or another noise.

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

    def fit(
        self,
        data: Tensor,
        *,
        max_iter: int = 2000,
        tol: float = 1e-9,
        progress: bool | None = None,
    ) -> FittedFactors:
        """EM from the leading principal directions; in double precision.

        Args:
            data: ``[N, D]``, D above the number of factors.
            max_iter: iterations at most.
            tol: stop when the log-likelihood per example changes by no more than this.
            progress: whether to show a bar.

        Returns:
            The Gaussian of y (``q``), W, Ψ, and log p(y) at each E-step.

        Raises:
            DataError: data that are misshapen or not finite, too few columns or examples, or
                a column that the factors explain wholly (no noise is left).
        """
        positive_int("max_iter", max_iter)
        tolerance("tol", tol)
        data = check_data(data, 2)
        if data.shape[1] <= self.n_factors:
            raise DataError(f"{self.n_factors} factors need more columns, got {data.shape[1]}")
        origin = data.mean(0)
        y = data - origin
        variance = y.square().mean(0)
        values, vectors = torch.linalg.eigh(y.mT @ y / len(y))
        w = vectors[:, -self.n_factors :] * (values[-self.n_factors :] / 2).clamp(min=0).sqrt()
        theta = (w, torch.zeros_like(origin), (variance - w.square().sum(1)).clamp(min=1e-3))
        told: Natural = {}

        def steps() -> Iterator[float]:
            nonlocal theta, told
            for _ in track(range(max_iter), label="EM", show=progress):
                told = _total(theta, y)
                value = float(_density(theta).log_prob(y).sum())
                theta = self.maximise(told, variance)
                yield value

        history, converged = until_flat(steps(), tol=tol * len(y), what="the log-likelihood")

        def site_of(chosen: Tensor) -> Sites:
            return _statistics(theta, y[chosen.to(y.device)])

        w, mean, psi = theta
        return FittedFactors(
            q=_density((w, mean + origin, psi)),
            history=history,
            objective="log-likelihood",
            n_data=len(y),
            site_of=site_of,
            predictive=lambda q, new: q.log_prob(check_data(new, 1, len(origin))),
            data=data,
            converged=converged,
            model=self,
            loadings=w,
            noise=psi,
            origin=origin,
            totals=_total(theta, y),
        )

    def maximise(self, totals: Natural, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The M-step: W, m, Ψ from summed statistics; leading dimensions are copies.

        Raises:
            DataError: a column without noise, beside its ``variance``.
        """
        zz, yz = totals["zz"], totals["yz"]
        joint = torch.linalg.solve(zz, yz.mT).mT
        psi = (totals["yy"] - (joint * yz).sum(-1)) / zz[..., -1, -1:]
        if self.noise == "spherical":
            psi = psi.mean(-1, keepdim=True).expand_as(psi)
        if bool((psi <= ROUNDING * variance).any()):
            raise DataError(
                "the factors explain a column wholly: leave it out, or take fewer factors"
            )
        return joint[..., :-1], joint[..., -1], psi


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedFactors(Fitted[FullGaussian]):
    """A factor model; ``q`` is the Gaussian of y. Taking examples out is an M-step without them.

    Attributes:
        model: what was fitted.
        loadings: W ``[D, factors]``, up to a rotation.
        noise: the diagonal of Ψ ``[D]``.
        origin: from where statistics are counted ``[D]``.
        totals: Σ_i of the sites.
    """

    model: FactorAnalysis
    loadings: Tensor
    noise: Tensor
    origin: Tensor
    totals: Natural

    def factors(self, data: Tensor) -> Tensor:
        """E[z | y] of M examples, ``[M, factors]``.

        Raises:
            DataError: data that are misshapen or not finite.
        """
        y = check_data(data, 1, len(self.origin))
        return _posterior((self.loadings, self.q.mean, self.noise), y)[0]

    def refitted(
        self, remove: Any = (), *, add: Any = None, steps: int = 1
    ) -> Iterator[FullGaussian]:
        """An M-step without what is taken out, then steps of EM; see :meth:`Fitted.refitted`."""
        chosen = torch.tensor(sorted(set(chosen_indices(remove, self.n_data))), dtype=torch.long)
        data, kept = self._changed(remove, add)
        y = check_data(data, 1, len(self.origin))[kept.to(data.device)] - self.origin
        theta = (self.loadings, self.q.mean - self.origin, self.noise)
        if len(chosen):
            theta = self._without(total(self._site_of(), chosen))
        yield self._shown(theta)
        for _ in range(steps):
            theta = self.model.maximise(_total(theta, y), self.noise)
            yield self._shown(theta)

    def _without(self, sites: Sites) -> Theta:
        return self.model.maximise(subtract(self.totals, sites), self.noise)  # type: ignore[arg-type]

    def _shown(self, theta: Theta) -> FullGaussian:
        w, mean, psi = theta
        return _density((w, mean + self.origin, psi))

    def _less(self, sites: Sites) -> FullGaussian:
        return self._shown(self._without(sites))


def _posterior(theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``[M, K]`` and the covariance ``[K, K]`` of q(z_i)."""
    w, mean, psi = theta
    weighted = w / psi.unsqueeze(-1)
    inverse = torch.eye(w.shape[1]).to(w) + w.mT @ weighted
    covariance = torch.linalg.inv(inverse)
    return (y - mean) @ weighted @ covariance, covariance


def _statistics(theta: Theta, y: Tensor) -> Natural:
    """(y z̃ᵀ, z̃ z̃ᵀ, y∘y) of every example, expected."""
    z, covariance = _posterior(theta, y)
    joined = torch.cat([z, torch.ones_like(z[:, :1])], 1)
    square = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
    return {
        "yz": y.unsqueeze(2) * joined.unsqueeze(1),
        "zz": joined.unsqueeze(2) * joined.unsqueeze(1) + square,
        "yy": y.square(),
    }


def _total(theta: Theta, y: Tensor) -> Natural:
    z, covariance = _posterior(theta, y)
    joined = torch.cat([z, torch.ones_like(z[:, :1])], 1)
    square = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
    return {
        "yz": y.mT @ joined,
        "zz": joined.mT @ joined + len(y) * square,
        "yy": y.square().sum(0),
    }


def _density(theta: Theta) -> FullGaussian:
    """N(m, W Wᵀ + Ψ)."""
    w, mean, psi = theta
    try:
        return FullGaussian(mean, torch.linalg.inv(w @ w.mT + torch.diag_embed(psi)))
    except (InputError, RuntimeError) as error:
        raise DataError(f"the covariance is singular: scale the data ({error})") from error
