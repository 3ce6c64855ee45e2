"""Local and global parameters, and the messages between them (Khan & Rue, 5.4, Eqs. 58 to 60).

    p(y, z, θ) = Π_g p(θ_g) Π_i p(y_i, z_i | θ),     log p(y_i, z_i | θ) linear in the T_g(θ_g)

The global nodes send what they expect, μ_g = E_q[T_g(θ_g)]. An example takes its local step at
ρ = 1, q(z_i) ∝ exp E_q[log p(y_i, z_i | θ)], whose log-normaliser A_i(μ) is all that has to be
written down of it. What the example answers is its gradient, and the global step is the rule's:

    λ̃_i = ∇_μ A_i(μ),      λ ← (1 − ρ) λ + ρ (λ_0 + N/B Σ_i λ̃_i),     ELBO = Σ_i A_i − Σ_g KL_g

ρ = 1 over all examples is variational message passing, ρ_t < 1 over minibatches is SVI. Mixtures
and chains differ in A_i alone.

*Hidden Markov models*, with emissions of any conjugate factor. The chain z_1 → … → z_T is an
exponential family, and forward recursion is its log-normaliser:

    α_1 = E log π + e_1,     α_t = log Σ_i exp(α_{t−1,i} + E log P_i) + e_t,     A = log Σ exp α_T

with e_tk = E_q[log p(y_t | θ_k)]. Its gradients are what the backward pass would give, expected
starts, transitions and classes: messages to Dirichlet nodes, and to the emissions' own family
(Beal, 2003; Khan & Rue, 5.3 and 5.4). A series of length 1 is a mixture.

*Mixtures of Gaussians* with priors on weights and components: the mean field
q(π) Π_k q(m_k, Λ_k) Π_i q(z_i) moves node by node at ρ = 1 (Winn & Bishop, 2005). As in EM, but
θ is averaged over where EM looks at its mean (K&R 5.2).
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
        nodes: the priors of the global nodes by name, with copies or without.
        local: (μ, data) → A_i ``[M]``: log Σ_z exp ⟨μ, T(y_i, z)⟩.
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
        """Pass messages until the lower bound rests; over minibatches, ``max_iter`` times.

        Args:
            data: a tensor ``[N, …]`` or a tuple of them.
            start: the nodes at first; None: the prior, which has to tell its copies apart.
            rho: ρ in (0, 1], or t → ρ_t from t = 1.
            batch: B examples at each step, drawn with ``generator``; None: all of them.
            generator: of the minibatches.
            stopping: ``max_iter``, ``tol`` (of the ELBO per example) and ``progress`` (whether to
                show a bar; None: on a terminal after a second).

        Returns:
            The nodes by name; of minibatches ``history`` is the scaled, noisy ELBO, and
            ``converged`` is False. The sites are those at the last nodes.

        Raises:
            InputError: settings out of range, or an A_i that is not finite.
        """
        data = self.check(data)
        n_data = count(data)
        q = start or self.nodes
        after = q

        def step(t: int) -> float:
            nonlocal q, after
            q = after
            chosen = minibatch(n_data, batch, generator)
            factor = n_data / len(chosen)
            messages, local = self._messages(q, rows(data, chosen))
            scaled = {name: scale(message, factor) for name, message in messages.items()}
            after = self._toward(q, scaled, rate_at(rho, t + 1))
            return factor * float(local) - self._divergence(q)

        run = until_flat(step, "ELBO", n_data, noisy=batch is not None, **stopping)
        last = q if run["converged"] else after
        return self.kind(q=last, **run, prior=self.nodes, model=self, data=data)

    def sites(self, q: Nodes, data: Any) -> Sites:
        sites, _ = self._of_examples(q, data)
        return sites

    def step(self, q: Nodes, data: Any) -> Nodes:
        messages, _ = self._messages(q, data)
        return self._toward(q, messages, 1.0)

    def log_predictive(self, q: Nodes, data: Any) -> Tensor:
        """A lower bound on log ∫ p(y_i | θ) q(θ) dθ, in nats, ``[M]``.

            A_i(μ) + Σ_g KL( q_g(λ) ‖ q_g(λ + λ̃_i) ),

        θ averaged over for the q(z_i) that answers μ; equal to it where the hidden parts are
        certain.
        """
        sites, local = self._of_examples(q, data)
        after = moved(q, sites, 1.0)
        for name, node in q.items():
            gain = node.kl(after[name])
            local = local + gain.reshape(len(local), -1).sum(1)
        return local

    def _toward(self, q: Nodes, messages: Mapping[str, Natural], rho: float) -> Nodes:
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

        messages, local = grad_and_value(total_of)(_expectations(q))
        depends_on_mu = any(bool(leaf.any()) for leaf in tree_leaves(messages))
        if not bool(local.isfinite()) or not depends_on_mu:
            raise InputError(contract)
        return messages, local

    def _of_examples(self, q: Nodes, data: Any) -> tuple[Sites, Tensor]:
        """λ̃_i and A_i of every example, with a leading dimension M."""
        name, prior = next(iter(self.nodes.items()))
        has_copies = q[name].log_partition().ndim > prior.log_partition().ndim

        def local_of(mu: Mapping[str, Natural], example: Any) -> Tensor:
            alone = rows(example, None)
            return self.local(mu, alone).sum()

        of_each = vmap(grad_and_value(local_of), in_dims=(0 if has_copies else None, 0))
        return of_each(_expectations(q), data)


def _expectations(q: Nodes) -> dict[str, Natural]:
    """μ of every node."""
    return {name: node.expectation for name, node in q.items()}


@dataclass(frozen=True)
class MessagePassing(Messages):
    """A conjugate-exponential model with hidden parts, by its local log-normaliser.

    Attributes:
        prior: the global nodes by name, with copies or without.
        local: (μ, data) → A_i ``[M]``: log Σ_z exp ⟨μ, T(y_i, z)⟩.

    Raises:
        InputError: a node that is no exponential family.

    Example:
        Which of two coins was thrown ten times? Sums over the coin, weights (½, ½) held fixed.

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
        if not is_named or not all(isinstance(q, ExponentialFamily) for q in self.prior.values()):
            raise InputError("prior must be exponential families by name")

    @property
    def nodes(self) -> Nodes:
        return self.prior


@dataclass(frozen=True)
class HiddenMarkov(Messages):
    """A chain of K hidden classes, seen through a conjugate factor.

    Attributes:
        n_states: K, two or more.
        emission: a factor such as ``gaussian()``, ``poisson()``, ``bernoulli()``.
        prior: of one class's emission, a member of the factor's family.
        concentration: of the Dirichlet priors of the first class and of every row of P.

    Raises:
        InputError: settings out of range.

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
            start: responsibilities ``[S·T, K]``; None: from K observations that lie apart.
            generator: for the start, and minibatches of series.
            settings: those of :meth:`MessagePassing.fit`.

        Returns:
            The nodes ``initial`` (Dirichlet), ``transition`` (Dirichlet, K copies), ``emission``
            (K copies).

        Raises:
            DataError: observations that the factor does not take.
            InputError: a start or settings that do not fit.
        """
        data = self.check(data)
        flat = _flat(data)
        values = flat.reshape(len(flat), -1).double()
        generator = settings.get("generator")
        weights = first_responsibilities(values, self.n_states, start, generator)
        emission = bayes(self.nodes["emission"], pooled(weights, self.emission.site(flat)))
        first = {**self.nodes, "emission": emission}
        return super().fit(data, start=first, **settings)  # type: ignore[return-value]

    @cached_property
    def nodes(self) -> Nodes:
        emission = wide(self.prior)
        like = next(iter(emission.natural.values()))
        concentration = like.new_full((self.n_states, self.n_states), self.concentration)
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
        """A of every series ``[S]``."""
        return self.forward(mu, self.scores(mu, data))

    def scores(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """E_q[log p(y_t | θ_k)], ``[S, T, K]``."""
        flat = _flat(data)
        scores = paired(self.emission.site(flat), mu["emission"])
        scores = scores + self.emission.constant(flat).unsqueeze(1)
        return scores.reshape(*data.shape[:2], -1)

    @staticmethod
    def forward(mu: Mapping[str, Natural], scores: Tensor) -> Tensor:
        """The recursion, ``[S]``."""
        alpha = mu["initial"]["log"] + scores[:, 0]
        for t in range(1, scores.shape[1]):
            ahead = torch.logsumexp(alpha.unsqueeze(2) + mu["transition"]["log"], 1)
            alpha = ahead + scores[:, t]
        return torch.logsumexp(alpha, 1)


class FittedMarkov(Fitted[Nodes]):
    """The global nodes of a chain; examples are series."""

    note: ClassVar[str] = "log p of a series is a lower bound, so that losses are upper ones"

    def states(self, data: Tensor) -> Tensor:
        """q(z_t = k) of series ``[S, T, …]``, smoothed, ``[S, T, K]``.

        Raises:
            DataError: observations that the factor does not take.
        """
        mu = _expectations(self.q)
        scores = self.model.scores(mu, self.model.check(data))
        return grad(lambda s: self.model.forward(mu, s).sum())(scores)


def _copied(natural: Natural, n: int) -> Natural:
    """The same λ n times, along a new leading dimension."""
    return {name: value.expand(n, *value.shape).clone() for name, value in natural.items()}


def _flat(data: Tensor) -> Tensor:
    """Observations of all series, one after the other."""
    return data.reshape(-1, *data.shape[2:])


HiddenMarkov.kind = FittedMarkov


FACTOR = gaussian()


@dataclass(frozen=True, eq=False)
class BayesianGaussianMixture(Messages):
    """A mixture of Gaussians with priors on its weights and components.

    Attributes:
        weights: the prior of π, over K components.
        component: the prior of the mean and precision of each component.

    Raises:
        InputError: a prior of another family, or with copies.

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
        """Weak priors on the scale of the data: α = 1/K, m = ȳ, κ = 1, ν = D, V⁻¹ = cov(y).

        Raises:
            DataError: data that are misshapen or not finite, or whose covariance is singular.
            InputError: fewer than two components.
        """
        at_least(2, "n_components", n_components)
        data = check_data(data, n_components)
        size = data.shape[1]
        covariance = torch.cov(data.mT, correction=min(1, len(data) - 1)).reshape(size, size)
        _, failure = torch.linalg.cholesky_ex(covariance)
        if int(failure) != 0:
            raise DataError(
                f"the covariance of {len(data)} examples is singular: drop dependent columns"
            )
        kappa = torch.ones(()).to(data)
        component = NormalWishart(data.mean(0), kappa, size * kappa, covariance)
        concentration = torch.full((n_components,), 1 / n_components).to(data)
        return cls(Dirichlet(concentration), component)

    def fit(self, data: Tensor, *, start: Tensor | None = None, **settings: Any) -> FittedMeanField:  # type: ignore[override]
        """Pass messages until the lower bound rests; in double precision.

        It holds the second moments of all examples, N·D² numbers, counted from 0: centre data
        whose mean is thousands of standard deviations away from it.

        Args:
            data: ``[N, D]``.
            start: responsibilities ``[N, K]``, or None to start from K examples that lie apart
                (k-means++).
            settings: those of :meth:`MessagePassing.fit`.

        Returns:
            The mean field of the global nodes, ``q["weights"]`` (Dirichlet) and
            ``q["components"]`` (Normal–Wishart, K copies), its sites, and the ELBO after each
            iteration (z, then π and the components).

        Raises:
            DataError: data that are not finite, misshapen, or fewer than K.
            InputError: a start that does not fit, or whose components are not apart; settings
                out of range.
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
        """The message to z_i, ``[N, K]``."""
        scores = paired(FACTOR.site(data), mu["components"])
        return scores + FACTOR.constant(data).unsqueeze(1) + mu["weights"]["log"]

    def log_predictive(self, q: Nodes, data: Tensor) -> Tensor:
        """log Σ_k E[π_k] p_k(y_j), a mixture of Student's t."""
        components = q["components"]
        weights = q["weights"].expected_point()
        site = {name: value.unsqueeze(1) for name, value in FACTOR.site(data).items()}
        after = components.with_natural(add(components.natural, site))
        gain = after.log_partition() - components.log_partition()
        return torch.logsumexp(weights.log() + gain, -1) + FACTOR.constant(data)


class FittedMeanField(Fitted[Nodes]):
    """The global nodes of a mixture; taking examples out is one message-passing step.

    :meth:`without` subtracts the messages of these examples to the global nodes; those of the other
    examples stay as they were, although each would now be assigned a little differently.

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
            DataError: data that are misshapen or not finite.
        """
        scores = self.model.scores(_expectations(self.q), self.model.check(data))
        return scores.softmax(1)


BayesianGaussianMixture.kind = FittedMeanField
