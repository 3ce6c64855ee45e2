"""Local and global parameters, and the messages between them (Khan & Rue, 5.4, Eqs. 58 to 60).

    p(y, z, θ) = Π_g p(θ_g) Π_i p(y_i, z_i | θ),     log p(y_i, z_i | θ) linear in the T_g(θ_g)

Each global node sends the expectation of its statistics, μ_g = E_q[T_g(θ_g)], to every example. The
example takes a local step at ρ = 1, q(z_i) ∝ exp E_q[log p(y_i, z_i | θ)]. Its log-normaliser
A_i(μ) is all that a model has to define: the example's message back to the nodes is the gradient of
A_i, and the global step is a step of the rule.

    λ̃_i = ∇_μ A_i(μ),      λ ← (1 − ρ) λ + ρ (λ_0 + N/B Σ_i λ̃_i),     ELBO = Σ_i A_i − Σ_g KL_g

ρ = 1 over all examples is variational message passing; ρ_t < 1 over minibatches is stochastic
variational inference. Mixtures and chains differ in A_i only.

*Hidden Markov models* have emissions of any conjugate factor. The chain z_1 → … → z_T is an
exponential family, and the forward recursion computes its log-normaliser A:

    α_1 = E log π + e_1,     α_t = log Σ_i exp(α_{t−1,i} + E log P_i) + e_t,     A = log Σ exp α_T

with e_tk = E_q[log p(y_t | θ_k)]. The gradients of A are the expected starts, transitions and
classes, which a backward pass would compute: messages to the Dirichlet nodes and to the emission's
family (Beal, 2003; Khan & Rue, 5.3 and 5.4). A series of length 1 is a mixture.

*Mixtures of Gaussians* have priors on weights and components. The mean field
q(π) Π_k q(m_k, Λ_k) Π_i q(z_i) moves node by node at ρ = 1 (Winn & Bishop, 2005). EM takes θ at its
mean; here θ is averaged over q (K&R 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.utils._pytree import tree_leaves

from blr_analysis.checks import at_least, instance, positive_number
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.gamma import NormalWishart
from blr_analysis.learning_rule.inference.conjugate import Factor, bayes, gaussian, toward, wide
from blr_analysis.learning_rule.inference.em import (
    check_data,
    first_responsibilities,
    paired,
    pooled,
)
from blr_analysis.learning_rule.inference.fitted import (
    Fitted,
    Model,
    Sites,
    answer,
    count,
    minibatch,
    moved,
    rate_at,
    rows,
    until_flat,
)

Nodes = Mapping[str, ExponentialFamily]
Local = Callable[[Mapping[str, Natural], Any], Tensor]
"""(μ by node, data of M examples) → A_i ``[M]``, by torch operations."""


class Messages(Model):
    """Global nodes, and examples that pass messages to them.

    Attributes:
        nodes: the priors of the global nodes by name; a prior may have leading dimensions, such
            as one for the components of a mixture.
        local: (μ, data) → A_i ``[M]``: log Σ_z exp ⟨μ, T(y_i, z)⟩.
        kind: the class of what :meth:`fit` returns.
    """

    kind: ClassVar[type[Fitted[Any]]] = Fitted
    nodes: Any
    local: Any

    def fit(
        self,
        data: Any,
        *,
        start: Nodes | None = None,
        rho: float | Callable[[int], float] = 1.0,
        batch: int | None = None,
        generator: torch.Generator | None = None,
        **stopping: Any,
    ) -> Fitted[Nodes]:
        """Pass messages until the ELBO stands still; with minibatches, ``max_iter`` times.

        Args:
            data: a tensor ``[N, …]`` or a tuple of them.
            start: the nodes before the first step. None: the priors; if these have copies, such as
                the components of a mixture, no two copies may be the same.
            rho: ρ in (0, 1], or t → ρ_t from t = 1.
            batch: B, the size of a minibatch; None takes all examples in each step.
            generator: draws the minibatches.
            stopping: ``max_iter``, ``tol`` (of the ELBO per example) and ``progress`` (whether to
                show a bar; None shows it on a terminal after a second).

        Returns:
            The nodes by name, with sites that are computed at these nodes. With minibatches
            ``history`` is a noisy estimate of the ELBO, and ``converged`` is False.

        Raises:
            InputError: a setting is out of range, or some A_i is not finite.
        """
        data = self.check(data)
        n_data = count(data)
        before = start or self.nodes  # the nodes whose ELBO was computed last
        after = before

        def step(t: int) -> float:
            nonlocal before, after
            before = after
            chosen = minibatch(n_data, batch, generator)
            factor = n_data / len(chosen)
            messages, log_normalisers = self._messages(before, rows(data, chosen))
            scaled = {name: scale(message, factor) for name, message in messages.items()}
            after = self._toward(before, scaled, rate_at(rho, t + 1))
            return factor * float(log_normalisers) - self._divergence(before)

        run = until_flat(step, "ELBO", n_data, noisy=batch is not None, **stopping)
        q = before if run["converged"] else after
        return self.kind(q=q, **run, prior=self.nodes, model=self, data=data)

    def sites(self, q: Nodes, data: Any) -> Sites:
        sites, _ = self._of_examples(q, data)
        return sites

    def step(self, q: Nodes, data: Any) -> Nodes:
        """The nodes after one round of messages from these examples, ρ = 1."""
        messages, _ = self._messages(q, data)
        return self._toward(q, messages, rho=1.0)

    def log_predictive(self, q: Nodes, data: Any) -> Tensor:
        """A lower bound on log ∫ p(y_i | θ) q(θ) dθ, in nats, ``[M]``.

            A_i(μ) + Σ_g KL( q_g(λ) ‖ q_g(λ + λ̃_i) )

        It integrates over θ with q(z_i) held at its local step, and is exact where the hidden
        parts z_i are certain.
        """
        sites, bounds = self._of_examples(q, data)
        after = moved(q, sites, 1.0)
        for name, node in q.items():
            gain = node.kl(after[name])
            bounds = bounds + gain.reshape(len(bounds), -1).sum(1)
        return bounds

    def _toward(self, q: Nodes, messages: Mapping[str, Natural], rho: float) -> Nodes:
        """Every node after a step of size ρ toward its prior plus its message."""
        return {
            name: toward(q[name], prior, messages[name], rho) for name, prior in self.nodes.items()
        }

    def _divergence(self, q: Nodes) -> float:
        """Σ_g KL(q_g ‖ p_g), in nats."""
        return sum(float(q[name].kl(prior).sum()) for name, prior in self.nodes.items())

    def _messages(self, q: Nodes, data: Any) -> tuple[dict[str, Natural], Tensor]:
        """Σ_i λ̃_i for each node, and Σ_i A_i."""
        contract = "local must be a function (mu, data) -> A_i [M], finite and differentiable in mu"
        shape = torch.Size([count(data)])

        def total_of(mu: Mapping[str, Natural]) -> Tensor:
            return answer(contract, shape, self.local, mu, data).sum()

        messages, log_normalisers = grad_and_value(total_of)(_expectations(q))
        depends_on_mu = any(bool(leaf.any()) for leaf in tree_leaves(messages))
        if not bool(log_normalisers.isfinite()) or not depends_on_mu:
            raise InputError(contract)
        return messages, log_normalisers

    def _of_examples(self, q: Nodes, data: Any) -> tuple[Sites, Tensor]:
        """λ̃_i and A_i of every example, with a leading dimension M.

        ``q`` is one set of nodes for all examples, or has a leading dimension M: one set for each.
        """
        name, prior = next(iter(self.nodes.items()))
        is_for_each_example = q[name].log_partition().ndim > prior.log_partition().ndim
        mu_dimension = 0 if is_for_each_example else None

        def local_of(mu: Mapping[str, Natural], example: Any) -> Tensor:
            data_of_one = rows(example, None)  # [1, …]
            return self.local(mu, data_of_one).sum()

        of_each = vmap(grad_and_value(local_of), in_dims=(mu_dimension, 0))
        return of_each(_expectations(q), data)


def _expectations(q: Nodes) -> dict[str, Natural]:
    """μ of every node."""
    return {name: node.expectation for name, node in q.items()}


@dataclass(frozen=True)
class MessagePassing(Messages):
    """A conjugate-exponential model with hidden parts, defined by its local log-normaliser.

    Attributes:
        prior: the priors of the global nodes by name; they may have leading dimensions.
        local: (μ, data) → A_i ``[M]``: log Σ_z exp ⟨μ, T(y_i, z)⟩.

    Raises:
        InputError: a node is no exponential family.

    Example:
        One of two coins, each with probability ½, was thrown ten times. ``local`` sums over the
        coin.

        >>> from blr_analysis.learning_rule.families import Beta
        >>> def local(mu, heads):
        ...     up, down = mu["coin"]["log"], mu["coin"]["log_complement"]
        ...     heads = heads.unsqueeze(1)
        ...     return (heads * up + (10 - heads) * down).logsumexp(1)
        >>> prior = {"coin": Beta(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))}
        >>> heads = torch.tensor([1.0, 2.0, 9.0, 8.0])
        >>> MessagePassing(prior, local).fit(heads, progress=False)["coin"].mean
        tensor([0.1739, 0.8261])
    """

    prior: Nodes
    local: Local

    def __post_init__(self) -> None:
        is_named = isinstance(self.prior, Mapping) and len(self.prior) > 0
        if not (is_named and all(isinstance(q, ExponentialFamily) for q in self.prior.values())):
            raise InputError("prior must be exponential families by name")

    @property
    def nodes(self) -> Nodes:
        return self.prior


@dataclass(frozen=True)
class HiddenMarkov(Messages):
    """A chain of K hidden classes whose observations come from a conjugate factor.

    Attributes:
        n_states: K, two or more.
        emission: a factor such as ``gaussian()``, ``poisson()``, ``bernoulli()``.
        prior: the prior of one class's emission, a member of the factor's family.
        concentration: the concentration of the Dirichlet priors, of the first class and of every
            row of the transition matrix P.

    Raises:
        InputError: a setting is out of range.

    Example:
        >>> from blr_analysis.learning_rule.families import Gamma
        >>> from blr_analysis.learning_rule.inference import poisson
        >>> counts = torch.tensor([[1, 0, 1, 2, 9, 8, 11, 9, 1, 0, 1, 1]])
        >>> model = HiddenMarkov(2, poisson(), Gamma(torch.tensor(1.0), torch.tensor(0.2)))
        >>> fitted = model.fit(counts, generator=torch.Generator().manual_seed(0), progress=False)
        >>> fitted["emission"].expected_point().sort().values.round(decimals=1)
        tensor([1., 9.], dtype=torch.float64)
        >>> fitted.states(counts).amax(-1).min() > 0.9
        tensor(True)
    """

    n_states: int
    emission: Factor
    prior: Any
    concentration: float = 1.0

    def __post_init__(self) -> None:
        at_least(2, "n_states", self.n_states)
        instance("emission", self.emission, Factor, "a Factor such as gaussian()")
        instance("prior", self.prior, self.emission.family, self.emission.family.__name__)
        positive_number("concentration", self.concentration)

    def fit(self, data: Tensor, *, start: Tensor | None = None, **settings: Any) -> FittedMarkov:  # type: ignore[override]
        """Pass messages between the chains and the global nodes; in double precision.

        Args:
            data: S series of T observations, ``[S, T]`` or ``[S, T, D]``; a series is an example.
            start: responsibilities ``[S·T, K]``; None starts from K observations that lie apart.
            settings: those of :meth:`MessagePassing.fit`; ``generator`` draws the start too.

        Returns:
            The nodes ``initial`` (Dirichlet over K classes), ``transition`` (Dirichlet, one for
            each row of P) and ``emission`` (one for each class).

        Raises:
            DataError: the factor does not take these observations.
            InputError: the start has another shape, or a setting is out of range.
        """
        data = self.check(data)
        observations = _flat(data)
        values = observations.reshape(len(observations), -1).double()
        generator = settings.get("generator")
        weights = first_responsibilities(values, self.n_states, start, generator)
        first_message = pooled(weights, self.emission.site(observations))
        first_nodes = dict(self.nodes)
        first_nodes["emission"] = bayes(self.nodes["emission"], first_message)
        return super().fit(data, start=first_nodes, **settings)  # type: ignore[return-value]

    @cached_property
    def nodes(self) -> Nodes:
        """The priors: of the first class, of the K rows of P, and of the K emissions."""
        emission = wide(self.prior)
        some_parameter = next(iter(emission.natural.values()))  # has the prior's device
        concentration = some_parameter.new_full((self.n_states, self.n_states), self.concentration)
        return {
            "initial": Dirichlet(concentration[0]),
            "transition": Dirichlet(concentration),
            "emission": emission.with_natural(_copied(emission.natural, self.n_states)),
        }

    def check(self, data: Any) -> Tensor:
        if not isinstance(data, Tensor) or data.ndim not in (2, 3):
            raise DataError("data must be series, a tensor [S, T] or [S, T, D]")
        return self.emission.check(_flat(data), wide(self.prior)).reshape(data.shape)

    def local(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """The log-normaliser A of every series ``[S]``."""
        return self.forward(mu, self.scores(mu, data))

    def scores(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """E_q[log p(y_t | θ_k)], ``[S, T, K]``."""
        observations = _flat(data)
        scores = paired(self.emission.site(observations), mu["emission"])
        scores = scores + self.emission.constant(observations).unsqueeze(1)
        n_series, n_times = data.shape[:2]
        return scores.reshape(n_series, n_times, -1)

    @staticmethod
    def forward(mu: Mapping[str, Natural], scores: Tensor) -> Tensor:
        """The forward recursion: A of every series ``[S]`` from its scores ``[S, T, K]``."""
        alpha = mu["initial"]["log"] + scores[:, 0]
        for t in range(1, scores.shape[1]):
            from_each_class = alpha.unsqueeze(2) + mu["transition"]["log"]
            alpha = torch.logsumexp(from_each_class, 1) + scores[:, t]
        return torch.logsumexp(alpha, 1)


class FittedMarkov(Fitted[Nodes]):
    """The global nodes of a chain; examples are series."""

    note: ClassVar[str] = "log p of a series is a lower bound, so that losses are upper ones"

    def states(self, data: Tensor) -> Tensor:
        """q(z_t = k) given the whole series, ``[S, T, K]``, of series ``[S, T, …]``.

        Raises:
            DataError: the factor does not take these observations.
        """
        mu = _expectations(self.q)
        scores = self.model.scores(mu, self.model.check(data))

        def log_normaliser(scores: Tensor) -> Tensor:
            return self.model.forward(mu, scores).sum()

        return grad(log_normaliser)(scores)


def _copied(natural: Natural, n_copies: int) -> Natural:
    """Copies of λ along a new leading dimension."""
    return {name: value.expand(n_copies, *value.shape).clone() for name, value in natural.items()}


def _flat(data: Tensor) -> Tensor:
    """Observations of all series, one after the other."""
    return data.reshape(-1, *data.shape[2:])


HiddenMarkov.kind = FittedMarkov


FACTOR = gaussian()  # the likelihood of a component


@dataclass(frozen=True, eq=False)
class BayesianGaussianMixture(Messages):
    """A mixture of Gaussians with priors on its weights and components.

    Attributes:
        weights: the prior of π, over K components.
        component: the prior of the mean and precision of each component.

    Raises:
        InputError: a prior is of another family, or is more than one distribution.

    Example:
        >>> parts = torch.linspace(-6, -5, 10), torch.linspace(4, 6, 20)
        >>> data = torch.cat(parts).unsqueeze(1)
        >>> model = BayesianGaussianMixture.for_data(data, n_components=2)
        >>> fitted = model.fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.q["weights"].concentration.sort().values
        tensor([10.5048, 20.4952], dtype=torch.float64)
    """

    weights: Dirichlet
    component: NormalWishart

    def __post_init__(self) -> None:
        instance("weights", self.weights, Dirichlet, "a Dirichlet distribution")
        instance("component", self.component, NormalWishart, "a Normal–Wishart distribution")
        if self.weights.concentration.ndim != 1 or self.component.mean.ndim != 1:
            raise InputError("the priors must be single distributions, without copies")

    @classmethod
    def for_data(cls, data: Tensor, n_components: int) -> Self:
        """A model with weak priors on the scale of the data.

        They are α = 1/K for the weights, and m = ȳ, κ = 1, ν = D, V⁻¹ = cov(y) for a component.

        Raises:
            DataError: data are misshapen or not finite, or their covariance is singular.
            InputError: there are fewer than two components.
        """
        at_least(2, "n_components", n_components)
        data = check_data(data, n_components)
        n_columns = data.shape[1]
        covariance = torch.cov(data.mT).reshape(n_columns, n_columns)
        _, failure = torch.linalg.cholesky_ex(covariance)
        if int(failure) != 0:
            raise DataError(
                f"the covariance of {len(data)} examples is singular: drop dependent columns"
            )
        kappa = torch.ones(()).to(data)
        nu = n_columns * kappa
        component = NormalWishart(data.mean(0), kappa, nu, covariance)
        concentration = torch.full((n_components,), 1 / n_components).to(data)
        return cls(Dirichlet(concentration), component)

    def fit(self, data: Tensor, *, start: Tensor | None = None, **settings: Any) -> FittedMeanField:  # type: ignore[override]
        """Pass messages until the ELBO stands still; in double precision.

        The second moments y yᵀ of all examples take N·D² numbers of memory. They are taken about
        0: centre data whose mean is thousands of standard deviations away from 0.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``; None starts from K examples that lie apart
                (k-means++).
            settings: those of :meth:`MessagePassing.fit`; ``generator`` draws the start too.

        Returns:
            The mean field of the global nodes, ``q["weights"]`` (Dirichlet) and
            ``q["components"]`` (Normal–Wishart, one for each component), its sites, and the ELBO
            after each iteration (first all z_i, then π and the components).

        Raises:
            DataError: data are not finite, misshapen, or fewer than K.
            InputError: the start has another shape or two equal components, or a setting is out
                of range.
        """
        data = self.check(data)
        n_components = len(self.weights.concentration)
        generator = settings.get("generator")
        responsibilities = first_responsibilities(data, n_components, start, generator)
        messages = {
            "weights": {"log": responsibilities.sum(0)},
            "components": pooled(responsibilities, FACTOR.site(data)),
        }
        nodes = {name: bayes(prior, messages[name]) for name, prior in self.nodes.items()}
        return super().fit(data, start=nodes, **settings)  # type: ignore[return-value]

    @cached_property
    def nodes(self) -> Nodes:
        weights = wide(self.weights)
        component = wide(self.component)
        copies = _copied(component.natural, len(weights.concentration))
        return {"weights": weights, "components": component.with_natural(copies)}

    def check(self, data: Any) -> Tensor:
        return FACTOR.check(check_data(data), wide(self.component))

    def local(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """log Σ_k exp E_q[log π_k + log p(y_i | m_k, Λ_k)]."""
        return self.scores(mu, data).logsumexp(1)

    def scores(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """The message to z_i, E_q[log π_k + log p(y_i | m_k, Λ_k)], ``[N, K]``."""
        scores = paired(FACTOR.site(data), mu["components"])
        return scores + FACTOR.constant(data).unsqueeze(1) + mu["weights"]["log"]

    def log_predictive(self, q: Nodes, data: Tensor) -> Tensor:
        """log Σ_k E[π_k] p_k(y_j), a mixture of Student's t, in nats ``[M]``."""
        components = q["components"]
        weights = q["weights"].expected_point()
        site = {name: value.unsqueeze(1) for name, value in FACTOR.site(data).items()}
        after = components.with_natural(add(components.natural, site))
        gain = after.log_partition() - components.log_partition()
        return torch.logsumexp(weights.log() + gain, -1) + FACTOR.constant(data)


class FittedMeanField(Fitted[Nodes]):
    """The global nodes of a mixture; examples are removed by one message-passing step.

    :meth:`without` subtracts the messages of these examples from the global nodes. The messages of
    the other examples stay as they were, although a new fit would change them a little.

    Example:
        >>> data = torch.cat([torch.linspace(-6, -5, 10), torch.linspace(4, 6, 20)]).unsqueeze(1)
        >>> model = BayesianGaussianMixture.for_data(data, n_components=2)
        >>> fitted = model.fit(data, generator=torch.Generator().manual_seed(0))
        >>> fitted.without(range(10))["weights"].concentration.sort().values
        tensor([ 0.5048, 20.4952], dtype=torch.float64)
        >>> fitted.responsibilities(torch.tensor([[-5.0]])).amax()
        tensor(1.0000, dtype=torch.float64)
    """

    def responsibilities(self, data: Tensor) -> Tensor:
        """E-step: q(z_j = k) of M examples under the fitted nodes, ``[M, K]``.

        Raises:
            DataError: data are misshapen or not finite.
        """
        scores = self.model.scores(_expectations(self.q), self.model.check(data))
        return scores.softmax(1)


BayesianGaussianMixture.kind = FittedMeanField
