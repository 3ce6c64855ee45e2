"""Non-conjugate variational message passing (Knowles & Minka, 2011; Khan & Rue, section 5.3).

Regression with a link, p(y_i | x_iᵀθ), and a factor of its own for every coefficient. A likelihood
that is not conjugate still sends each node a message in the node's own family, the gradient of
its expectation,

    λ̃_ij = ∇_μ_j E_q[log p(y_i | x_iᵀθ)],

and the nodes move in turn, each to the sum of its messages: the rule, coordinate by coordinate,
at ρ = 1, halved where that overshoots. With f_i = x_iᵀθ Gaussian under the mean field, an
expectation is over one number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import share
from blr_analysis.learning_rule.families.base import Natural, add, scale, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.learning_rule.inference.cvi import (
    State,
    above_zero,
    aims,
    check_prior,
    checked_inputs,
    checked_pair,
    halved,
    plain,
)
from blr_analysis.learning_rule.inference.fitted import Fitted, indexed, rows, until_flat
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    checked_targets,
    log_predictive,
    scalar_likelihood,
)
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.likelihoods import Likelihood


@dataclass(frozen=True)
class MeanFieldRegression:
    """p(y_i | x_iᵀθ) with a mean-field Gaussian posterior.

    Attributes:
        prior: p(θ), one Gaussian for each coefficient; its dtype and device are those of the
            computation (double is wise).
        likelihood: ``"bernoulli"`` (logistic regression, y in 0 and 1), ``"probit"``,
            ``"poisson"`` (log-rates), a likelihood object, or a function (y, f) → log p(y|f).

    Raises:
        InputError: a prior that is no DiagonalGaussian, or an unknown likelihood.

    Example:
        >>> prior = DiagonalGaussian(torch.zeros(2).double(), torch.ones(2).double())
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 2.0, 7.0])
        >>> MeanFieldRegression(prior, "poisson").fit((x, y)).q.mean
        tensor([0.0418, 0.8411], dtype=torch.float64)
    """

    prior: DiagonalGaussian
    likelihood: str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor] = "poisson"

    def __post_init__(self) -> None:
        check_prior(self.prior, DiagonalGaussian)
        scalar_likelihood(self.likelihood)

    @torch.no_grad()
    def fit(
        self,
        data: tuple[Tensor, Tensor],
        *,
        rho: float = 1.0,
        halving: bool = True,
        max_iter: int = 1000,
        tol: float = 1e-9,
        progress: bool | None = None,
    ) -> Fitted[DiagonalGaussian]:
        """Sweep through the nodes until the ELBO rests.

        Args:
            data: (x ``[N, P]``, y ``[N]``); put a column of ones for an intercept.
            rho: ρ in (0, 1], with ``halving`` the first that is tried at each node. The messages of
                a non-conjugate factor depend on the node they go to, so that 1 may overshoot.
            halving: halve ρ, node by node, until the ELBO does not fall; False for the rule as it
                is written.
            max_iter: the most sweeps.
            tol: stop when the ELBO changes by no more than this, in nats.
            progress: whether to show a bar; None shows it on a terminal after a second.

        Returns:
            The mean field, its ELBO after each sweep, and its sites: λ_prior + Σ_i λ̃_i is q.

        Raises:
            DataError: examples that are misshapen, not finite, or outside the support.
            InputError: no step improves the ELBO, or without ``halving`` a step leaves the family;
                settings out of range; a likelihood that does not work element by element.
        """
        share("rho", rho)
        likelihood = scalar_likelihood(self.likelihood)
        x, y = self._checked(data, likelihood)
        sites = {name: torch.zeros_like(x) for name in self.prior.natural}
        state = _look(self.prior, sites, self.prior, x, y, likelihood)

        def sweep(t: int) -> float:
            nonlocal state
            for j in range(x.shape[1]):
                column = {name: site[:, j : j + 1] for name, site in sites.items()}
                before = replace(state, sites=column)
                attempt = partial(_visit, before, self.prior, j, x, y, likelihood)
                state = (halved if halving else plain)(attempt, before, rho)
                for name, site in sites.items():
                    site[:, j : j + 1] = state.sites[name]
            return state.elbo

        run = until_flat(sweep, "ELBO", max_iter=max_iter, tol=tol, progress=progress)

        def predictive(q: DiagonalGaussian, new: Any) -> Tensor:
            x, y = self._checked(new, likelihood)
            return log_predictive(likelihood, latent(q, x), y)

        return Fitted(
            q=state.q,
            **run,
            prior=self.prior,
            n_data=len(y),
            site_of=indexed(sites),
            predictive=predictive,
            data=(x, y),
            step=partial(self._step, likelihood),
        )

    def _step(
        self, likelihood: ScalarLikelihood, q: DiagonalGaussian, data: Any, kept: Tensor
    ) -> DiagonalGaussian:
        """A sweep through the nodes, each to the messages of these examples."""
        x, y = rows(data, kept)
        y = checked_targets(likelihood, y)  # of examples that were added, too
        state = _look(q, {}, self.prior, x, y, likelihood)
        for j in range(x.shape[1]):
            column = {name: x.new_zeros(len(y), 1) for name in self.prior.natural}
            before = replace(state, sites=column)
            state = halved(partial(_visit, before, self.prior, j, x, y, likelihood), before, 1.0)
        return state.q

    def _checked(self, data: Any, likelihood: ScalarLikelihood) -> tuple[Tensor, Tensor]:
        x, y = checked_pair(data, self.prior.mean, likelihood)
        return checked_inputs(x, x, len(self.prior.mean)), y


def latent(q: DiagonalGaussian, x: Tensor) -> DiagonalGaussian:
    """The marginals of f_i = x_iᵀθ, ``[N]``; with N copies in ``q``, each with its own row."""
    variance = (x.square() / q.precision).sum(-1)
    return DiagonalGaussian((x * q.mean).sum(-1), 1 / above_zero(variance))


def messages(q: DiagonalGaussian, j: int, x: Tensor, of_f: Natural) -> Natural:
    """λ̃_ij of all examples to node j, ``[N, 1]``, from ∇_μ E_q[log p(y_i|f_i)] of f_i."""
    bend = 2 * of_f["square"]
    slope = of_f["linear"] + bend * latent(q, x).mean
    own = x[:, j]
    node = DiagonalGaussian(q.mean[j : j + 1], q.precision[j : j + 1])
    return node.pull_back((own * slope).unsqueeze(1), (own.square() * bend).unsqueeze(1))


def _look(
    q: DiagonalGaussian,
    sites: Natural,
    prior: DiagonalGaussian,
    x: Tensor,
    y: Tensor,
    likelihood: ScalarLikelihood,
) -> State[DiagonalGaussian]:
    """q with its ELBO, and ∇_μ E_q[log p(y_i|f_i)] of every f_i."""
    of_f, values = aims(latent(q, x), y, likelihood)
    return State(sites, q, of_f, float(values.sum() - q.kl(prior)))


def _visit(
    state: State[DiagonalGaussian],
    prior: DiagonalGaussian,
    j: int,
    x: Tensor,
    y: Tensor,
    likelihood: ScalarLikelihood,
    rho: float,
) -> State[DiagonalGaussian]:
    """One step of the rule for node j; ``sites`` are its column, ``[N, 1]``, and move with it."""
    q, here = state.q, slice(j, j + 1)
    told = messages(q, j, x, state.aims)
    node, first = (DiagonalGaussian(p.mean[here], p.precision[here]) for p in (q, prior))
    gradient = scale(add(first.natural, {k: v.sum(0) for k, v in told.items()}), -1.0)
    node = blr_step(node, subtract(gradient, node.base_gradient()), rho)
    column = add(scale(state.sites, 1 - rho), scale(told, rho))
    mean, precision = q.mean.clone(), q.precision.clone()
    mean[here], precision[here] = node.mean, node.precision
    return _look(DiagonalGaussian(mean, precision), column, prior, x, y, likelihood)
