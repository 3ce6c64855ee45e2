"""A fitted posterior whose examples see one latent number each: predictions and left-out scores.

With f_i = φ_iᵀθ + e_i every question about an example is one about a Gaussian number: leaving it
out subtracts a pair of numbers from the natural parameters of f_i (the cavity), and predicting is
an integral over f. Nothing of the size of the posterior is copied for an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.data import chosen_indices
from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families.base import Natural, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.cvi import Problem, latent, run, spread, summed
from blr_analysis.learning_rule.inference.factors import real
from blr_analysis.learning_rule.inference.fitted import Fitted, moved, rows
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    check_elementwise,
    checked_targets,
    expected_mean,
    log_predictive,
)

# x [M, D] → the rows φ(x) [M, P], and the variance of f that θ does not explain, [M].
Features = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentFitted(Fitted[FullGaussian]):
    """A :class:`Fitted` posterior over θ with latent numbers f_i = φ_iᵀθ.

    Attributes:
        problem: the prior, the design Φ ``[N, P]``, the targets and the likelihood.
        messages: the sites as Gaussian messages to the f_i, natural parameters ``[N]`` each; in
            the family of ``q`` they are :attr:`sites`.
        features: inputs → their rows of the design.

    Example:
        >>> from blr_analysis.learning_rule.inference import GaussianProcess
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> fitted = GaussianProcess().fit((x, torch.tensor([0.0, 0.0, 1.0])))
        >>> fitted.predict(torch.tensor([[0.5]]))
        tensor([0.4820], dtype=torch.float64)
        >>> fitted.left_out().exp()
        tensor([0.5452, 0.5000, 0.4425], dtype=torch.float64)
    """

    problem: Problem
    messages: Natural
    features: Features

    def latent(self, x: Tensor) -> DiagonalGaussian:
        """The marginals of f at inputs ``[M, D]`` under q."""
        return latent(self.q, *self.features(x))

    def predict(self, x: Tensor) -> Tensor:
        """E_q[E[y|f]] at inputs ``[M, D]``: the probability of y = 1, or the expected count.

        Raises:
            InputError: a likelihood given as a function, which says nothing of E[y|f], or whose
                mean does not work element by element.
        """
        return expected_mean(self.problem.likelihood, self.latent(x))

    def without(self, indices: Any) -> FullGaussian:
        """λ − Σ_{i∈M} λ̃_i; see :meth:`Fitted.without`. Holds one matrix, whatever M is."""
        chosen = torch.tensor(sorted(set(chosen_indices(indices, self.n_data))), dtype=torch.long)
        if not len(chosen):
            return self.q
        design = rows(self.problem.design, chosen)
        return moved(self.q, summed(design, _rows(self.messages, chosen)), -1.0)

    def cavities(self) -> DiagonalGaussian:
        """f_i under the posterior without example i, λ − λ̃_i: ``[N]`` Gaussian numbers."""
        marginals = latent(self.q, self.problem.design)
        return marginals.with_natural(subtract(marginals.natural, self.messages))

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`."""
        return log_predictive(self.problem.likelihood, self.cavities(), self.problem.targets)


@torch.no_grad()
def fit_latent(
    prior: FullGaussian,
    features: Features,
    likelihood: ScalarLikelihood,
    data: tuple[Tensor, Tensor],
    **options: Any,
) -> LatentFitted:
    """Fit q(θ) to checked data by :func:`~blr_analysis.learning_rule.inference.cvi.run`."""
    x, y = data
    design, _ = features(x)
    problem = Problem(prior, design, y, likelihood, options.pop("expectation", None))
    state, history, converged = run(problem, **options)

    def predictive(q: FullGaussian, new: Any) -> Tensor:
        inputs, targets = checked_pair(new, prior.mean, likelihood)
        return log_predictive(likelihood, latent(q, *features(inputs)), targets)

    def site_of(indices: Tensor) -> Natural:
        return spread(rows(design, indices), _rows(state.sites, indices))

    return LatentFitted(
        q=state.q,
        history=history,
        objective="ELBO",
        prior=prior,
        n_data=len(y),
        site_of=site_of,
        predictive=predictive,
        data=(x, y),
        converged=converged,
        problem=problem,
        messages=state.sites,
        features=features,
    )


def checked_pair(data: Any, like: Tensor, likelihood: ScalarLikelihood) -> tuple[Tensor, Tensor]:
    """(x ``[N, D]``, y ``[N]``) in a dtype and on a device.

    Raises:
        DataError: no such pair, numbers that are not finite, targets outside the support.
        InputError: a likelihood that does not work element by element.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("the data are a pair (x [N, D], y [N])")
    x, y = real("x", data[0], like, 2), real("y", data[1], like, 1)
    if len(x) != len(y):
        raise DataError(f"x and y must have the same length, got {len(x)} and {len(y)}")
    y = checked_targets(likelihood, y)
    check_elementwise(likelihood, y)
    return x, y


def _rows(sites: Natural, chosen: Tensor) -> Natural:
    return {name: value[chosen.to(value.device)] for name, value in sites.items()}
