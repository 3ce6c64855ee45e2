"""Non-conjugate variational inference: the rule site by site (Khan & Rue, section 5.4).

    q(θ) ∝ p(θ) Π_i exp⟨λ̃_i, T(θ)⟩,
    λ̃_i ← (1 − ρ) λ̃_i + ρ ∇_μ E_q[log p(y_i|θ)]              (K&R 60; Khan & Lin, 2017)

for a Gaussian q(θ) and likelihoods that see one number of θ each, f_i = φ_iᵀθ: regression with a
link, and Gaussian processes (:mod:`~blr_analysis.learning_rule.inference.gp`). A site is then a
pair of numbers, the natural parameters of a Gaussian message to f_i, and its share of λ is of rank
one: (a_i φ_i, −½ b_i φ_i φ_iᵀ). What the likelihood gives is an expectation over one Gaussian
number, by quadrature.

Every question about an example is one about a Gaussian number, too: leaving it out subtracts a pair
of numbers from the natural parameters of f_i (the cavity), and predicting is an integral over f.
Nothing of the size of the posterior is copied for an example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from blr_analysis.checks import share
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.factors import real
from blr_analysis.learning_rule.inference.fitted import Fitted, answer, rows, rows_of, until_flat
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    check_elementwise,
    checked_targets,
    expected_log_prob,
    expected_mean,
    log_predictive,
    scalar_likelihood,
)
from blr_analysis.likelihoods import Likelihood

# E_q[·] of a function of the latent numbers, element by element, such as at_samples.
Expectation = Callable[[DiagonalGaussian, Callable[[Tensor], Tensor]], Tensor]
HALVINGS = 20
STARTS = 50
Q = TypeVar("Q", FullGaussian, DiagonalGaussian)


@dataclass(frozen=True, eq=False)
class Problem:
    """A Gaussian prior, and examples that see one number of θ each.

    Attributes:
        prior: p(θ), over P numbers.
        design: Φ ``[N, P]``, whose rows are φ_i.
        targets: y ``[N]``.
        likelihood: log p(y_i|f_i).
        expectation: how E_q[log p(y_i|f_i)] is taken; None: in closed form or by quadrature.
        residual: Var(e_i) of f_i = φ_iᵀθ + e_i, where θ does not explain f_i wholly, ``[N]``.
    """

    prior: FullGaussian
    design: Tensor
    targets: Tensor
    likelihood: ScalarLikelihood
    expectation: Expectation | None = None
    residual: Tensor | float = 0.0

    def posterior(self, sites: Natural) -> FullGaussian:
        """λ_prior + Σ_i λ̃_i as a distribution, from ``[N]`` sites."""
        return self.prior.with_natural(add(self.prior.natural, summed(self.design, sites)))


@dataclass(frozen=True, eq=False)
class State(Generic[Q]):
    """One iterate.

    Attributes:
        sites: λ̃_i, natural parameters of Gaussian messages to f_i: ``{"linear", "square"}``,
            ``[N]`` each.
        q: λ_prior + Σ λ̃_i.
        aims: ∇_μ E_q[log p(y_i|f_i)] at q, toward which the sites move.
        elbo: Σ_i E_q[log p(y_i|f_i)] − KL(q ‖ prior), in nats.
    """

    sites: Natural
    q: Q
    aims: Natural
    elbo: float


def latent(q: FullGaussian, design: Tensor, residual: Tensor | float = 0.0) -> DiagonalGaussian:
    """The marginals of f_i = φ_iᵀθ + e_i, Var(e_i) = ``residual``, under q.

    With N copies in ``q``, each goes with its own row of the design ``[N, P]``.
    """
    factor = torch.linalg.cholesky(q.precision)
    if q.mean.ndim == 1:
        roots = torch.linalg.solve_triangular(factor, design.mT, upper=False).mT
    else:
        roots = torch.linalg.solve_triangular(factor, design.unsqueeze(-1), upper=False).squeeze(-1)
    variance = roots.square().sum(-1) + residual
    return DiagonalGaussian((design * q.mean).sum(-1), 1 / above_zero(variance))


def above_zero(variance: Tensor) -> Tensor:
    """Var(f_i), or ε where f_i is 0 for sure: φ_i = 0, as for an example without any feature."""
    return torch.where(variance > 0, variance, torch.finfo(variance.dtype).eps)


def summed(design: Tensor, sites: Natural) -> Natural:
    """Σ_i λ̃_i in the family of q(θ), from the sites' pairs of numbers."""
    square = design.mT @ (sites["square"].unsqueeze(-1) * design)
    return {"linear": design.mT @ sites["linear"], "square": square}


def spread(design: Tensor, sites: Natural) -> Natural:
    """λ̃_i in the family of q(θ), one by one: ``[N, P]`` and ``[N, P, P]``."""
    outer = design.unsqueeze(-1) * design.unsqueeze(-2)
    return {
        "linear": sites["linear"].unsqueeze(-1) * design,
        "square": sites["square"].unsqueeze(-1).unsqueeze(-1) * outer,
    }


def aims(
    marginals: DiagonalGaussian,
    targets: Tensor,
    likelihood: ScalarLikelihood,
    expectation: Expectation | None = None,
) -> tuple[Natural, Tensor]:
    """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves, for each example.

    The derivatives in the mean and the variance are those of the expectation as it is computed
    (∂/∂v E = ½ E[∂²], Price), so that a fixed point of the rule is a stationary point of the ELBO
    to rounding.

    Returns:
        Natural parameters of the sites, ``[N]`` each, and E_q[log p(y_i|f_i)] ``[N]``.

    Raises:
        InputError: an ``expectation`` that is no such function, or says nothing of the variance.
    """
    mean = marginals.mean.detach().requires_grad_()
    variance = (1 / marginals.precision).detach().requires_grad_()
    with torch.enable_grad():
        there = DiagonalGaussian(mean, 1 / variance)
        if expectation is None:
            values = expected_log_prob(likelihood, there, targets)
        else:
            wanted = "expectation must be a function (marginals of f, function) -> E of it, [N]"
            told = partial(likelihood.log_prob, targets)
            values = answer(wanted, mean.shape, expectation, there, told)
            if not values.requires_grad:
                raise InputError(f"{wanted}, differentiable in the marginals")
        slope, half_bend = torch.autograd.grad(values.sum(), (mean, variance), allow_unused=True)
    if slope is None or half_bend is None:
        raise InputError("expectation must depend on mean and variance of f, not on the mean alone")
    return marginals.pull_back(slope, 2 * half_bend), values.detach()


def look(problem: Problem, sites: Natural) -> State[FullGaussian]:
    """The state of these sites: their posterior, its ELBO, and where the sites should go.

    Raises:
        InputError: the sites make no positive definite precision.
    """
    q = problem.posterior(sites)
    marginals = latent(q, problem.design, problem.residual)
    goal, values = aims(marginals, problem.targets, problem.likelihood, problem.expectation)
    return State(sites, q, goal, float(values.sum() - q.kl(problem.prior)))


def step(problem: Problem, state: State[FullGaussian], rho: float) -> State[FullGaussian]:
    """One step of the rule in its site form (Khan & Rue, Eq. 60)."""
    return look(problem, add(scale(state.sites, 1 - rho), scale(state.aims, rho)))


def plain(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, the rule as it is written.

    Raises:
        InputError: it leaves the family.
    """
    try:
        return attempt(rho)
    except InputError as error:
        raise InputError(
            f"a step of rho={rho:g} leaves the Gaussians: take a smaller rho or halving=True "
            f"({suspicion(state.aims, state.elbo)})"
        ) from error


def rounding(state: State[Any]) -> float:
    """What is lost in the last digit of an ELBO."""
    return torch.finfo(state.q.mean.dtype).eps * (1 + abs(state.elbo))


def halved(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, with ρ halved until its ELBO is not below that of ``state``.

    A departure from the rule; what leaves the family counts as a fall. Where even the whole step
    changes q and its ELBO by rounding only, ``state`` is the fixed point and is returned.

    Raises:
        InputError: no step improves the ELBO: log p(y|f) or its derivatives are not finite.
    """
    slack = 64 * rounding(state)
    small = torch.finfo(state.q.mean.dtype).eps ** 0.45
    resting = False
    for k in range(HALVINGS):
        try:
            after = attempt(rho / 2**k)
        except InputError:  # a precision that is not positive definite
            continue
        if after.elbo >= state.elbo - slack:
            return after
        if k == 0 and after.elbo >= state.elbo - small * (1 + abs(state.elbo)):
            resting = float(after.q.kl(state.q)) <= small
    if resting:
        return state
    raise InputError(
        f"no step along the natural gradient improves the ELBO ({state.elbo:.6g} nats): "
        f"{suspicion(state.aims, state.elbo)}"
    )


def suspicion(aims: Natural, elbo: float) -> str:
    """What is likely wrong where no step succeeds."""
    upward = int((aims["square"] > 0).sum())
    if not math.isfinite(elbo):
        return "E_q[log p(y|f)] is not finite: scale the inputs, or take a narrower prior"
    if upward:
        return (
            f"log p(y|f) curves upward in f at {upward} of {len(aims['square'])} examples: was a "
            "loss given for it, with the wrong sign?"
        )
    return "scale the inputs, or where expectations are random take halving=False with a small rho"


def start(problem: Problem, *, near: bool) -> State[FullGaussian]:
    """Sites of zero, so that q is the prior; with ``near`` those of a q near the mode.

    Where a prior leaves f wide, E_q[e^f] and its like are so large that the first step gives
    precisions from which there is no way back in floating point.
    """
    if near:
        try:
            state = look(problem, _near_the_mode(problem))
        except InputError:  # a precision that is not positive definite, or values out of range
            pass
        else:
            if math.isfinite(state.elbo):
                return state
    return look(problem, _no_sites(problem))


def _no_sites(problem: Problem) -> Natural:
    return dict.fromkeys(("linear", "square"), torch.zeros_like(problem.targets))


def _near_the_mode(problem: Problem) -> Natural:
    """Sites of examples near the mode of log p(y|f) + log p(θ), seen through f no wider than 1.

    Newton's method with the smoothed derivatives that the sites are made of, its steps halved
    until the mode is nearer; the last of them gains less than a nat.
    """

    def height(theta: Tensor) -> float:
        fit = problem.likelihood.log_prob(problem.targets, problem.design @ theta).sum()
        return float(fit + problem.prior.log_prob(theta))

    q, theta = problem.prior, problem.prior.mean
    best, sites = height(theta), _no_sites(problem)
    for _ in range(STARTS):
        widths = latent(q, problem.design).precision.clamp_min(1.0)
        narrow = DiagonalGaussian(problem.design @ theta, widths)
        sites, _ = aims(narrow, problem.targets, problem.likelihood, problem.expectation)
        q = problem.posterior(sites)
        tried = (theta + 0.5**k * (q.mean - theta) for k in range(HALVINGS))
        higher = next((t for t in tried if height(t) > best), theta)
        before, theta = best, higher
        best = height(theta)
        if best - before < 1:
            break
    return sites


# x [M, D] → the rows φ(x) [M, P], and the variance of f that θ does not explain, [M].
Features = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
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

    def _told(self, chosen: Tensor) -> Natural:
        """Σ_{i∈M} λ̃_i, in one matrix, whatever M is."""
        return summed(rows(self.problem.design, chosen), rows_of(self.messages, chosen))

    def cavities(self) -> DiagonalGaussian:
        """f_i under the posterior without example i, λ − λ̃_i: ``[N]`` Gaussian numbers."""
        marginals = latent(self.q, self.problem.design)
        without = marginals.with_natural(subtract(marginals.natural, self.messages))
        residual = self.problem.residual
        return DiagonalGaussian(
            without.mean, without.precision / (1 + residual * without.precision)
        )

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`."""
        return log_predictive(self.problem.likelihood, self.cavities(), self.problem.targets)


@dataclass(frozen=True)
class LatentModel(ABC):
    """A Gaussian θ, and a likelihood that sees one number f_i = φ_iᵀθ + e_i of it."""

    @property
    def _sparse(self) -> bool:
        """Whether θ leaves part of f unexplained at the examples themselves."""
        return False

    @abstractmethod
    def _told(self, data: Any) -> tuple[FullGaussian, Features, Tensor, Tensor]:
        """The prior, what makes rows of the design, and the examples x, y, checked."""

    @torch.no_grad()
    def fit(
        self,
        data: tuple[Tensor, Tensor],
        *,
        rho: float = 1.0,
        halving: bool = True,
        tol: float = 1e-10,
        max_iter: int = 500,
        expectation: Expectation | None = None,
        progress: bool | None = None,
    ) -> LatentFitted:
        """The Gaussian that maximises the ELBO, by the rule in its site form (K&R 60).

        Args:
            data: (x ``[N, D]``, y ``[N]``). For regression put a column of ones for an intercept;
                of a process, the dtype of x, single or double, is that of the computation (double
                is wise, and taken for all others).
            rho: ρ in (0, 1], with ``halving`` the first that is tried in each step.
            halving: halve ρ, step by step, until the ELBO does not fall; False for random
                expectations, or for the rule as it is written.
            tol: stop when the ELBO changes by at most this many nats.
            max_iter: at most this many steps.
            expectation: (marginals of f, function) → E of it, element by element; in closed form
                or by quadrature to 1e-9 by default;
                ``partial(at_samples, n=100, generator=generator)`` is Monte Carlo.
            progress: True shows a bar, False does not, None on a terminal when it takes long.

        Returns:
            The posterior: ``history`` is the ELBO in nats, ``sites`` are those of the rule.

        Raises:
            DataError: examples that are misshapen, not finite, or outside the support.
            InputError: no step improves the ELBO, settings out of range, a likelihood or an
                expectation that does not work element by element, or a kernel that is none.
        """
        share("rho", rho)
        likelihood = scalar_likelihood(self.likelihood)  # type: ignore[attr-defined]
        prior, features, x, y = self._told(data)
        design, residual = features(x)
        left = residual if self._sparse else 0.0
        problem = Problem(prior, design, y, likelihood, expectation, left)
        state = start(problem, near=halving)

        def elbo(t: int) -> float:
            nonlocal state
            attempt = partial(step, problem, state)
            state = (halved if halving else plain)(attempt, state, rho)
            return state.elbo

        run = until_flat(
            elbo,
            "ELBO",
            max_iter=max_iter,
            tol=tol,
            rounding=lambda: 4 * rounding(state),
            progress=progress,
        )

        def predictive(q: FullGaussian, new: Any) -> Tensor:
            inputs, targets = checked_pair(new, prior.mean, likelihood)
            return log_predictive(likelihood, latent(q, *features(inputs)), targets)

        def site_of(indices: Tensor) -> Natural:
            return spread(rows(design, indices), rows_of(state.sites, indices))

        return LatentFitted(
            q=state.q,
            **run,
            prior=prior,
            n_data=len(y),
            site_of=site_of,
            predictive=predictive,
            data=(x, y),
            step=partial(_step, problem, features),
            problem=problem,
            messages=state.sites,
            features=features,
        )


def _step(
    problem: Problem, features: Features, q: FullGaussian, data: Any, kept: Tensor
) -> FullGaussian:
    """λ_prior + Σ_i ∇_μ E_q[log p(y_i|f_i)] of these examples."""
    x, y = checked_pair(rows(data, kept), problem.prior.mean, problem.likelihood)
    design, residual = features(x)
    left = residual if isinstance(problem.residual, Tensor) else 0.0
    there = replace(problem, design=design, targets=y, residual=left)
    told, _ = aims(latent(q, design, left), y, problem.likelihood, problem.expectation)
    return there.posterior(told)


def check_prior(prior: Any, kind: type) -> None:
    """Raise unless a prior over coefficients is one member of this family."""
    if not isinstance(prior, kind) or prior.mean.ndim != 1:
        raise InputError(
            f"the prior must be a {kind.__name__} over θ [P], without copies, got "
            f"{type(prior).__name__}"
        )


def checked_inputs(x: Any, like: Tensor, columns: int) -> Tensor:
    """Inputs ``[M, D]`` in the dtype and on the device of ``like``.

    Raises:
        DataError: not finite, or another number of columns.
    """
    x = real("x", x, like, 2)
    if x.shape[-1] != columns:
        raise DataError(f"x has {x.shape[-1]} columns; the model takes {columns}")
    return x


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


@dataclass(frozen=True)
class GeneralizedLinear(LatentModel):
    """p(y_i | x_iᵀθ), θ ~ N(m_0, S_0⁻¹), with a full Gaussian posterior (K&R, section 5.4).

    Attributes:
        prior: p(θ); its dtype and device are those of the computation (double is wise).
        likelihood: ``"bernoulli"`` (logistic regression, y in 0 and 1), ``"probit"``,
            ``"poisson"`` (log-rates), ``"gaussian"``, a likelihood object, or a function
            (y, f) → log p(y|f), element by element.

    Raises:
        InputError: a prior that is no FullGaussian, or an unknown likelihood.

    Example:
        >>> import torch
        >>> prior = FullGaussian(torch.zeros(1).double(), torch.eye(1).double())
        >>> x, y = torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([1.0, 1.0, 0.0])
        >>> fitted = GeneralizedLinear(prior).fit((x, y))
        >>> fitted.q.mean, fitted.predict(torch.tensor([[1.0]]))
        (tensor([0.9757], dtype=torch.float64), tensor([0.7057], dtype=torch.float64))
    """

    prior: FullGaussian
    likelihood: str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor] = (
        "bernoulli"
    )

    def __post_init__(self) -> None:
        check_prior(self.prior, FullGaussian)
        scalar_likelihood(self.likelihood)

    def _told(self, data: Any) -> tuple[FullGaussian, Features, Tensor, Tensor]:
        like = self.prior.mean

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            x = checked_inputs(x, like, len(like))
            return x, x.new_zeros(len(x))

        return (
            self.prior,
            features,
            *checked_pair(data, like, scalar_likelihood(self.likelihood)),
        )
