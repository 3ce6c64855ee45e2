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
Nothing of the size of the posterior is copied for an example. All is in double precision.

*Non-conjugate message passing* (Knowles & Minka, 2011; K&R 5.3): a factor of its own for every
coefficient. A likelihood that is not conjugate still sends each node a message in its own family,
λ̃_ij = ∇_μ_j E_q[log p(y_i | x_iᵀθ)], and the nodes move in turn, each to the sum of its messages.

A likelihood is asked for nothing but log p(y|f): its derivatives are those of an expectation, which
closed forms or Gauss–Hermite quadrature and autograd provide,

    E_q[g(f)] ≈ Σ_k w_k g(m + √v z_k),

with nodes a third of √v apart where q has its mass: good for functions of f that bend no faster,
as log p(y|f) of the likelihoods here for √v up to 3. The density p(y|f) itself, of a large count
for example, may be far narrower than q, and far from its mean: its integral is over a grid of
√v / 50.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from blr_analysis.checks import share
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.expectations import places
from blr_analysis.learning_rule.families.base import Natural, add, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.conjugate import columns, pairs, wide
from blr_analysis.learning_rule.inference.fitted import Fitted, Model, answer, rows, until_flat
from blr_analysis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson

NODES = 100
Function = Callable[[Tensor], Tensor]
"""Places ``[K, N]`` → as many values, element by element."""
Integral = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(y, m, v) → an integral over f ~ N(m, v), element by element."""


def expected(f: DiagonalGaussian, function: Function) -> Tensor:
    """E_q[function(f_i)] of each number, ``[N]``; differentiable in mean and precision of ``f``.

    >>> expected(DiagonalGaussian(torch.zeros(2), torch.tensor([1.0, 0.01])), torch.square)
    tensor([  1., 100.])
    """
    at, weights = places(f, "quadrature", NODES)
    return weights @ function(at)


def log_expected(f: DiagonalGaussian, log_function: Function) -> Tensor:
    """log E_q[exp(log_function(f_i))] of each number, ``[N]``; safe where the integral underflows.

    >>> log_expected(DiagonalGaussian(torch.zeros(1), torch.ones(1)), lambda t: 2 * t)
    tensor([2.])
    """
    z = torch.linspace(-16, 16, 1601, dtype=torch.float64).to(f.mean).unsqueeze(1)
    parts = (
        (log_function(f.mean + part * f.precision.rsqrt()) - 0.5 * part.square()).logsumexp(0)
        for part in z.split(NODES)
    )
    return reduce(torch.logaddexp, parts) - (-0.5 * z.square()).logsumexp(0)


@dataclass(frozen=True)
class ScalarLikelihood:
    """p(y_i | f_i) with one number f_i for each example.

    Attributes:
        name: for messages.
        log_prob: (y ``[N]``, f ``[N]`` or ``[K, N]``) → log p(y|f), element by element and
            broadcast, in nats; differentiable.
        mean: f → E[y|f], the probability of y = 1 for labels; None where nobody asks for it.
        targets: the likelihood of the package whose targets these are, for checks; None: any.
        expected: E_q[log p(y|f)] in closed form; None: by quadrature.
        predictive: log E_q[p(y|f)] in closed form; None: by quadrature.

    Example:
        >>> logistic = scalar_likelihood("bernoulli")
        >>> logistic.log_prob(torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([-0.6931])
    """

    name: str
    log_prob: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor] | None = None
    targets: Likelihood | None = None
    expected: Integral | None = None
    predictive: Integral | None = None


def from_package(likelihood: Likelihood) -> ScalarLikelihood:
    """A likelihood of :mod:`blr_analysis.likelihoods` with one output, its constant included."""
    if isinstance(likelihood, Poisson):
        likelihood = Poisson()
    elif isinstance(likelihood, Gaussian):
        likelihood = Gaussian(likelihood.variance)

    def log_prob(y: Tensor, f: Tensor) -> Tensor:
        return -likelihood.nll(f.unsqueeze(-1), y.expand_as(f).unsqueeze(-1))

    known = likelihood.mean, likelihood, *_closed(likelihood)  # element by element
    return ScalarLikelihood(likelihood.name, log_prob, *known)


def _closed(likelihood: Likelihood) -> tuple[Integral | None, Integral | None]:
    """``expected`` and ``predictive``, where they are known."""
    if isinstance(likelihood, Poisson):
        return lambda y, m, v: y * m - (m + 0.5 * v).exp() - torch.lgamma(y + 1), None
    if isinstance(likelihood, Gaussian):
        given = likelihood.variance
        noise = given[0] if isinstance(given, tuple) else given  # f is one number
        return (
            lambda y, m, v: _log_normal(y - m, torch.full_like(v, noise)) - 0.5 * v / noise,
            lambda y, m, v: _log_normal(y - m, v + noise),
        )
    return None, None


def _log_normal(gap: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (gap.square() / variance + (2 * math.pi * variance).log())


NAMED = {known.name: from_package(known) for known in (Bernoulli(), Poisson(), Gaussian())}
NAMED["probit"] = ScalarLikelihood(
    "probit",
    lambda y, f: torch.special.log_ndtr((2 * y - 1) * f),
    torch.special.ndtr,
    Bernoulli(),
    predictive=lambda y, m, v: torch.special.log_ndtr((2 * y - 1) * m * (1 + v).rsqrt()),
)


def scalar_likelihood(
    likelihood: str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor],
) -> ScalarLikelihood:
    """The likelihood of this name, of this object, or of a function log p(y|f).

    Raises:
        InputError: none of these, or a likelihood of many outputs.
    """
    if isinstance(likelihood, ScalarLikelihood):
        return likelihood
    if isinstance(likelihood, Bernoulli | Poisson | Gaussian):
        return from_package(likelihood)
    if isinstance(likelihood, str) and likelihood in NAMED:
        return NAMED[likelihood]
    if callable(likelihood) and not isinstance(likelihood, type | Likelihood):
        return ScalarLikelihood(getattr(likelihood, "__name__", "given"), likelihood)
    named = ", ".join(map(repr, NAMED))
    raise InputError(f"likelihood must be one of {named}, or (y, f) -> log p(y|f)")


def checked_targets(likelihood: ScalarLikelihood, y: Tensor) -> Tensor:
    """Targets ``[N]`` as the likelihood takes them; its log p(y|f) is tried on them.

    Raises:
        DataError: targets outside the support, or not finite.
        InputError: log p(y|f) is no number for each example that torch can differentiate in f.
    """
    if likelihood.targets is not None:
        y = likelihood.targets.prepare_targets(y, y.new_zeros(y.shape).unsqueeze(-1)).squeeze(-1)
    if not bool(torch.isfinite(y).all()):
        raise DataError("the targets contain NaN or inf; drop or mend those examples")
    wanted = (
        f"likelihood {likelihood.name!r} must be a function (y [N], f [K, N]) -> log p(y|f), "
        "differentiable in f"
    )
    with torch.enable_grad():
        f = y.new_zeros(2, len(y)).requires_grad_()
        if not answer(wanted, f.shape, likelihood.log_prob, y, f).requires_grad:
            raise InputError(wanted)
    return y


def expected_log_prob(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """E_q[log p(y_i|f_i)] of each example, ``[N]``, in nats; differentiable in q.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> expected_log_prob(scalar_likelihood("poisson"), f, torch.ones(1))
    tensor([-1.6487])
    """
    if likelihood.expected is not None:
        return likelihood.expected(y, f.mean, 1 / f.precision)
    return expected(f, lambda at: likelihood.log_prob(y, at))


def expected_mean(likelihood: ScalarLikelihood, f: DiagonalGaussian) -> Tensor:
    """E_q[E[y_i|f_i]], ``[N]``.

    Raises:
        InputError: a likelihood without a mean.

    >>> f = DiagonalGaussian(torch.ones(1), torch.ones(1))
    >>> expected_mean(scalar_likelihood("probit"), f)
    tensor([0.7602])
    """
    if likelihood.mean is None:
        raise InputError("the likelihood has no mean: give ScalarLikelihood(name, log_prob, mean)")
    return expected(f, likelihood.mean)


def log_predictive(likelihood: ScalarLikelihood, f: DiagonalGaussian, y: Tensor) -> Tensor:
    """log ∫ p(y|f) q(f) df of each example, ``[N]``, in nats; safe where p underflows.

    >>> f = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    >>> log_predictive(scalar_likelihood("bernoulli"), f, torch.ones(1)).exp()
    tensor([0.5000])
    """
    if likelihood.predictive is not None:
        return likelihood.predictive(y, f.mean, 1 / f.precision)
    return log_expected(f, lambda at: likelihood.log_prob(y, at))


HALVINGS = 20
Q = TypeVar("Q", FullGaussian, DiagonalGaussian)


NOTHING = torch.zeros(0)
# x [M, D] → the rows φ(x) [M, P], and the variance of f that θ does not explain, [M].
Features = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Problem(Model, Generic[Q]):
    """A Gaussian prior, and examples that see one number of θ each, f_i = φ_iᵀθ + e_i.

    Attributes:
        prior: p(θ), over P numbers.
        likelihood: log p(y_i|f_i).
        features: inputs → their rows of the design, and Var(e_i).
        design: Φ ``[N, P]``, whose rows are φ_i.
        residual: Var(e_i) ``[N]``, where θ does not explain f_i wholly.
        targets: y ``[N]``.
    """

    prior: Q
    likelihood: ScalarLikelihood
    features: Features
    design: Tensor = NOTHING
    residual: Tensor = NOTHING
    targets: Tensor = NOTHING

    @property
    def nodes(self) -> Sequence[Any]:
        """What moves in turn: all of θ at once."""
        return [1.0]

    def posterior(self, sites: Natural) -> Q:
        """λ_prior + Σ_i λ̃_i as a distribution."""
        return self.prior.with_natural(add(self.prior.natural, summed(self.design, sites)))

    def told(self, theta: Tensor, of_f: Natural) -> Natural:
        """λ̃_i from ∇_μ E_q[log p(y_i|f_i)] of f_i, at a q whose mean is ``theta``."""
        return of_f

    def aims(self, q: Q) -> tuple[Natural, Tensor]:
        """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves ``[N]``."""
        marginals = latent(q, self.design, self.residual)
        of_f, values = aims(marginals, self.targets, self.likelihood)
        return self.told(q.mean, of_f), values

    def check(self, data: Any) -> tuple[Tensor, Tensor]:
        x, y = pairs(data, self.prior.mean)
        return x, checked_targets(self.likelihood, y)

    def log_predictive(self, q: Q, data: Any) -> Tensor:
        x, y = data
        return log_predictive(self.likelihood, latent(q, *self.features(x)), y)

    def step(self, q: Q, data: Any) -> Q:
        """λ_prior + Σ_i ∇_μ E_q[log p(y_i|f_i)] of these examples."""
        there = self.on(data)
        return there.posterior(there.aims(q)[0])

    def on(self, data: Any) -> Self:
        """The same for other examples."""
        design, residual = self.features(data[0])
        return replace(self, design=design, residual=residual, targets=data[1])


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


def latent(q: Any, design: Tensor, residual: Tensor | float = 0.0) -> DiagonalGaussian:
    """The marginals of f_i = φ_iᵀθ + e_i, Var(e_i) = ``residual``, under q.

    With N copies in ``q``, each goes with its own row of the design ``[N, P]``; where f_i is 0 for
    sure (φ_i = 0) its variance is ε.
    """
    if isinstance(q, DiagonalGaussian):
        variance = (design.square() / q.precision).sum(-1)
    else:
        factor = torch.linalg.cholesky(q.precision)
        columns = design.mT if q.mean.ndim == 1 else design.unsqueeze(-1)
        roots = torch.linalg.solve_triangular(factor, columns, upper=False)
        variance = roots.square().sum(-2).reshape(len(design))
    variance = (variance + residual).clamp(min=torch.finfo(design.dtype).eps)
    return DiagonalGaussian((design * q.mean).sum(-1), 1 / variance)


def summed(design: Tensor, sites: Natural) -> Natural:
    """Σ_i λ̃_i in the family of q(θ), from the sites' pairs of numbers."""
    square = design.mT @ (sites["square"].unsqueeze(-1) * design)
    return {"linear": design.mT @ sites["linear"], "square": square}


def aims(
    marginals: DiagonalGaussian, targets: Tensor, likelihood: ScalarLikelihood
) -> tuple[Natural, Tensor]:
    """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves, for each example.

    The derivatives in the mean and the variance are those of the expectation as it is computed
    (∂/∂v E = ½ E[∂²], Price), so that a fixed point of the rule is a stationary point of the ELBO
    to rounding.
    """
    mean = marginals.mean.detach().requires_grad_()
    variance = (1 / marginals.precision).detach().requires_grad_()
    with torch.enable_grad():
        values = expected_log_prob(likelihood, DiagonalGaussian(mean, 1 / variance), targets)
        slope, half_bend = torch.autograd.grad(values.sum(), (mean, variance))
    return marginals.pull_back(slope, 2 * half_bend), values.detach()


def look(problem: Problem[Q], sites: Natural) -> State[Q]:
    """The state of these sites: their posterior, its ELBO, and where the sites should go.

    Raises:
        InputError: the sites make no positive definite precision.
    """
    q = problem.posterior(sites)
    goal, values = problem.aims(q)
    return State(sites, q, goal, float(values.sum() - q.kl(problem.prior)))


def step(problem: Problem[Q], state: State[Q], rho: float, node: Tensor | float = 1.0) -> State[Q]:
    """One step of the rule in its site form (Khan & Rue, Eq. 60), of one node of a mean field."""
    moves = {k: v + rho * node * (state.aims[k] - v) for k, v in state.sites.items()}
    return look(problem, moves)


def halved(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, with ρ halved until its ELBO is not below that of ``state``.

    A departure from the rule; what leaves the family counts as a fall. Where even the whole step
    changes the ELBO by rounding only, ``state`` is the fixed point and is returned.

    Raises:
        InputError: no step improves the ELBO: log p(y|f) or its derivatives are not finite.
    """
    size, rests = 1 + abs(state.elbo), False
    for k in range(HALVINGS):
        try:
            after = attempt(rho / 2**k)
        except InputError:  # a precision that is not positive definite
            continue
        if after.elbo >= state.elbo - 1e-14 * size:
            return after
        rests = rests or (k == 0 and after.elbo >= state.elbo - 1e-7 * size)
    if rests:
        return state
    raise InputError(
        f"no step along the natural gradient improves the ELBO ({state.elbo:.6g} nats): scale the "
        "inputs, take a narrower prior, or turn the sign of a loss given for log p(y|f)"
    )


def near_the_mode(problem: Problem[Q]) -> Natural:
    """Sites of examples near the mode of log p(y|f) + log p(θ), seen through f no wider than 1.

    Where a prior leaves f wide, E_q[e^f] and its like are so large that from the prior itself the
    first step gives precisions from which there is no way back in floating point. So: Newton's
    method with the smoothed derivatives that the sites are made of, its steps halved until the
    mode is nearer; the last of them gains less than a nat.
    """

    def height(theta: Tensor) -> float:
        fit = problem.likelihood.log_prob(problem.targets, problem.design @ theta).sum()
        return float(fit + problem.prior.log_prob(theta))

    q, theta, sites = problem.prior, problem.prior.mean, {}
    best = height(theta)
    for _ in range(50):
        widths = latent(q, problem.design).precision.clamp_min(1.0)
        narrow = DiagonalGaussian(problem.design @ theta, widths)
        sites = problem.told(theta, aims(narrow, problem.targets, problem.likelihood)[0])
        q = problem.posterior(sites)
        tried = (theta + 0.5**k * (q.mean - theta) for k in range(HALVINGS))
        theta = next((t for t in tried if height(t) > best), theta)
        before, best = best, height(theta)
        if best - before < 1:
            break
    return sites


def start(problem: Problem[Q]) -> State[Q]:
    """The state near the mode, or where there is none the prior, with sites of zero."""
    try:
        state = look(problem, near_the_mode(problem))
        if math.isfinite(state.elbo):
            return state
    except InputError:  # a precision that is not positive definite, or values out of range
        pass
    none = torch.zeros_like(problem.targets)
    return look(problem, problem.told(problem.prior.mean, {"linear": none, "square": none}))


def swept(problem: Problem[Q], state: State[Q], rho: float) -> State[Q]:
    """One step for each node."""
    for node in problem.nodes:
        state = halved(partial(step, problem, state, node=node), state, rho)
    return state


@dataclass(frozen=True, eq=False, repr=False)
class LatentFitted(Fitted[FullGaussian]):
    """A :class:`Fitted` posterior over θ with latent numbers f_i = φ_iᵀθ.

    Attributes:
        model: the :class:`Problem`: prior, design Φ ``[N, P]``, targets and likelihood.
        messages: the sites as Gaussian messages to the f_i, natural parameters ``[N]`` each; in
            the family of ``q`` they are :attr:`sites`.

    Example:
        >>> from blr_analysis.learning_rule.inference import GaussianProcess
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> fitted = GaussianProcess().fit((x, torch.tensor([0.0, 0.0, 1.0])))
        >>> fitted.predict(torch.tensor([[0.5]]))
        tensor([0.4820], dtype=torch.float64)
        >>> fitted.left_out().exp()
        tensor([0.5452, 0.5000, 0.4425], dtype=torch.float64)
    """

    def site_of(self, chosen: Tensor) -> Natural:
        design, sites = rows((self.model.design, self.messages), chosen)
        square = torch.einsum("n,np,nq->npq", sites["square"], design, design)
        return {"linear": sites["linear"].unsqueeze(1) * design, "square": square}

    def _told(self, chosen: Tensor) -> Natural:
        """Σ_{i∈M} λ̃_i, in one matrix, whatever M is."""
        return summed(*rows((self.model.design, self.messages), chosen))

    def latent(self, x: Tensor) -> DiagonalGaussian:
        """The marginals of f at inputs ``[M, D]`` under q."""
        return latent(self.q, *self.model.features(x))

    def predict(self, x: Tensor) -> Tensor:
        """E_q[E[y|f]] at inputs ``[M, D]``: the probability of y = 1, or the expected count.

        Raises:
            InputError: a likelihood given as a function, which says nothing of E[y|f].
        """
        return expected_mean(self.model.likelihood, self.latent(x))

    def perturbation(self) -> tuple[Tensor, Tensor, Tensor]:
        """e_i, Λ_i and V_i, ``[N]`` each: −∂/∂m_i and −∂²/∂m_i² of the site of f_i at its mean m_i
        under q, and Var_q[f_i]. At a fixed point e_i = E_q[∂ℓ_i/∂f_i] and Λ_i = E_q[∂²ℓ_i/∂f_i²]
        (K&R 60)."""
        marginals = latent(self.q, self.model.design)
        curvature = -2 * self.messages["square"]
        error = curvature * marginals.mean - self.messages["linear"]
        return error, curvature, 1 / marginals.precision

    def cavities(self) -> DiagonalGaussian:
        """f_i under the posterior without example i, λ − λ̃_i: ``[N]`` Gaussian numbers."""
        marginals = latent(self.q, self.model.design)
        without = marginals.with_natural(subtract(marginals.natural, self.messages))
        widened = 1 + self.model.residual * without.precision
        return DiagonalGaussian(without.mean, without.precision / widened)

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`."""
        return log_predictive(self.model.likelihood, self.cavities(), self.model.targets)


class LatentModel:
    """A Gaussian θ, and a likelihood that sees one number f_i = φ_iᵀθ + e_i of it.

    Attributes:
        problem: data → the prior, the likelihood and the features.
        kind: of the fit.
    """

    problem: Any
    kind: ClassVar[type[Fitted[Any]]] = LatentFitted

    @torch.no_grad()
    def fit(self, data: tuple[Tensor, Tensor], *, rho: float = 1.0, **stopping: Any) -> Any:
        """The Gaussian that maximises the ELBO, by the rule in its site form (K&R 60).

        Args:
            data: (x ``[N, D]``, y ``[N]``). For regression put a column of ones for an intercept.
            rho: ρ in (0, 1], the first that is tried in each step; it is halved until the ELBO does
                not fall.
            stopping: ``max_iter``, ``tol`` (of the ELBO, in nats) and ``progress`` (whether to
                show a bar; None: on a terminal after a second).

        Returns:
            The posterior: ``history`` is the ELBO in nats, ``sites`` are those of the rule.

        Raises:
            DataError: examples that are misshapen, not finite, or outside the support.
            InputError: no step improves the ELBO, settings out of range, a likelihood that does
                not work element by element, or a kernel that is none.
        """
        share("rho", rho)
        problem = self.problem(data)
        data = problem.check(data)
        problem = problem.on(data)
        state = start(problem)

        def sweep(t: int) -> float:
            nonlocal state
            state = swept(problem, state, rho)
            return state.elbo

        run = until_flat(sweep, "ELBO", **stopping)
        known = {"prior": problem.prior, "model": problem, "messages": state.sites}
        return self.kind(q=state.q, **run, **known, data=data)


AnyLikelihood = str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor]


class Regression(LatentModel):
    """p(y_i | x_iᵀθ) and a Gaussian prior p(θ)."""

    family: ClassVar[type]
    problems: ClassVar[type[Problem[Any]]] = Problem
    prior: Any
    likelihood: Any

    def __post_init__(self) -> None:
        if not isinstance(self.prior, self.family) or self.prior.mean.ndim != 1:
            wanted = self.family.__name__
            raise InputError(f"the prior must be a {wanted} over θ [P], without copies")
        scalar_likelihood(self.likelihood)

    def problem(self, data: Any) -> Problem[Any]:
        prior = wide(self.prior)

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            x = columns(x, prior.mean, len(prior.mean))
            return x, x.new_zeros(len(x))

        return self.problems(prior, scalar_likelihood(self.likelihood), features)


@dataclass(frozen=True)
class GeneralizedLinear(Regression):
    """p(y_i | x_iᵀθ), θ ~ N(m_0, S_0⁻¹), with a full Gaussian posterior (K&R, section 5.4).

    Attributes:
        prior: p(θ).
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
    likelihood: AnyLikelihood = "bernoulli"
    family: ClassVar[type] = FullGaussian


class MeanField(Problem[DiagonalGaussian]):
    """Sites λ̃_ij of every example and node, ``[N, P]`` each; the nodes move in turn."""

    @property
    def nodes(self) -> Sequence[Tensor]:
        return [*torch.eye(self.design.shape[1]).to(self.design)]

    def posterior(self, sites: Natural) -> DiagonalGaussian:
        told = {name: site.sum(0) for name, site in sites.items()}
        return self.prior.with_natural(add(self.prior.natural, told))

    def told(self, theta: Tensor, of_f: Natural) -> Natural:
        bend = 2 * of_f["square"]
        slope = of_f["linear"] + bend * (self.design @ theta)
        here = DiagonalGaussian(theta, torch.ones_like(theta))
        steep, bent = slope.unsqueeze(1) * self.design, bend.unsqueeze(1) * self.design.square()
        return here.pull_back(steep, bent)

    def step(self, q: DiagonalGaussian, data: Any) -> DiagonalGaussian:
        """A sweep through the nodes, each to the messages of these examples."""
        there, n = self.on(data), len(data[1])
        gap = subtract(q.natural, self.prior.natural)
        evenly = {name: (value / n).expand(n, -1) for name, value in gap.items()}
        return swept(there, look(there, evenly), 1.0).q


@dataclass(frozen=True)
class MeanFieldRegression(Regression):
    """p(y_i | x_iᵀθ) with a mean-field Gaussian posterior.

    Attributes:
        prior: p(θ), one Gaussian for each coefficient.
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
    likelihood: AnyLikelihood = "poisson"
    family: ClassVar[type] = DiagonalGaussian
    problems: ClassVar[type[Problem[Any]]] = MeanField
    kind: ClassVar[type[Fitted[Any]]] = Fitted
