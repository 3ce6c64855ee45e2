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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, positive_number, share
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference.conjugate import bayes, wide
from blr_analysis.learning_rule.inference.factors import Factor
from blr_analysis.learning_rule.inference.fitted import (
    Fitted,
    Sites,
    answer,
    count,
    joined,
    minibatch,
    moved,
    rows,
    until_flat,
)
from blr_analysis.learning_rule.inference.mixture_model import (
    first_responsibilities,
    paired,
    pooled,
)
from blr_analysis.learning_rule.rule import blr_step

Nodes = Mapping[str, ExponentialFamily]
Local = Callable[[Mapping[str, Natural], Any], Tensor]
"""(μ by node, data of M examples) → A_i ``[M]``, by torch operations."""


@dataclass(frozen=True)
class MessagePassing:
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
        ...     each = heads.unsqueeze(1)
        ...     return (each * up + (10 - each) * down).logsumexp(1)
        >>> prior = {"coin": Beta(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]))}
        >>> heads = torch.tensor([1.0, 2.0, 9.0, 8.0])
        >>> MessagePassing(prior, local).fit(heads, progress=False)["coin"].mean
        tensor([0.1739, 0.8261])
    """

    prior: Nodes
    local: Local

    def __post_init__(self) -> None:
        if not self.prior or not all(
            isinstance(node, ExponentialFamily) for node in self.prior.values()
        ):
            raise InputError("prior must be exponential families by name")

    def fit(
        self,
        data: Any,
        *,
        start: Nodes | None = None,
        rho: float | Callable[[int], float] = 1.0,
        batch: int | None = None,
        max_iter: int = 500,
        tol: float = 1e-6,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fitted[Nodes]:
        """Pass messages until the lower bound rests; over minibatches, ``max_iter`` times.

        Args:
            data: a tensor ``[N, …]`` or a tuple of them.
            start: the nodes at first; None: the prior, which has to tell its copies apart.
            rho: ρ in (0, 1], or t → ρ_t from t = 1.
            batch: B examples at each step, drawn with ``generator``; None: all of them.
            max_iter: steps at most.
            tol: stop when the ELBO per example changes by no more than this.
            progress: whether to show a bar.

        Returns:
            The nodes by name; of minibatches ``history`` is the scaled, noisy ELBO, and
            ``converged`` is False. The sites are those at the last nodes.

        Raises:
            InputError: settings out of range, or an A_i that is not finite.
        """
        n, q, after = count(data), start or self.prior, start or self.prior

        def step(t: int) -> float:
            nonlocal q, after
            q, chosen = after, minibatch(n, batch, generator)
            messages, local = self.messages(q, rows(data, chosen))
            divergence = sum(float(node.kl(self.prior[g]).sum()) for g, node in q.items())
            size = share("rho", rho(t + 1) if callable(rho) else rho)
            told = {g: scale(message, n / len(chosen)) for g, message in messages.items()}
            after = {g: _toward(q[g], self.prior[g], told[g], size) for g in q}
            return n / len(chosen) * float(local.sum()) - divergence

        noisy = batch is not None
        run = until_flat(
            step, "ELBO", n, max_iter=max_iter, tol=tol, noisy=noisy, progress=progress
        )
        q = q if run["converged"] else after
        return Fitted(
            q=q,
            **run,
            prior=self.prior,
            n_data=n,
            site_of=lambda chosen: self.each(q, rows(data, chosen)),
            predictive=self.log_predictive,
            data=data,
            step=self._step,
        )

    def _step(self, q: Nodes, data: Any, kept: Tensor) -> Nodes:
        told, _ = self.messages(q, rows(data, kept))
        return {g: _toward(node, self.prior[g], told[g], 1.0) for g, node in q.items()}

    def log_predictive(self, q: Nodes, data: Any) -> Tensor:
        """A lower bound on log ∫ p(y_i | θ) q(θ) dθ, in nats, ``[M]``; M copies go with one each.

            A_i(μ) + Σ_g KL( q_g(λ) ‖ q_g(λ + λ̃_i) ),

        θ averaged over for the q(z_i) that answers μ; equal to it where the hidden parts are
        certain.
        """
        name, node = next(iter(q.items()))
        if node.log_partition().ndim > self.prior[name].log_partition().ndim:
            every = range(len(node.log_partition()))
            each = (self.log_predictive(_copy(q, i), rows(data, torch.tensor([i]))) for i in every)
            return torch.cat([*each])
        _, local = self.messages(q, data)
        after = moved(q, self.each(q, data), 1.0)
        gains = [node.kl(after[g]).reshape(len(local), -1).sum(1) for g, node in q.items()]
        return local + sum(gains)

    def messages(self, q: Nodes, data: Any) -> tuple[dict[str, Natural], Tensor]:
        """Σ_i λ̃_i for each node, and A_i ``[M]``."""
        mu, leaves = _leaves(q)
        with torch.enable_grad():
            values = self._values(mu, data)
            gradients = torch.autograd.grad(values.sum(), leaves, materialize_grads=True)
        return _named(q, gradients), values.detach()

    def _values(self, mu: Mapping[str, Natural], data: Any) -> Tensor:
        wanted = "local must be a function (mu, data) -> A_i [M], differentiable in mu"
        values = answer(wanted, torch.Size([count(data)]), self.local, mu, data)
        if not values.requires_grad:
            raise InputError(wanted)
        if not bool(values.isfinite().all()):
            raise InputError("the local log-normaliser is not finite")
        return values

    def each(self, q: Nodes, data: Any) -> Sites:
        """λ̃_i of every example, with a leading dimension M."""
        mu, leaves = _leaves(q)
        with torch.enable_grad():
            values = self._values(mu, data)
            parts = [
                torch.autograd.grad(v, leaves, retain_graph=True, materialize_grads=True)
                for v in values
            ]
        return _named(q, [torch.stack(column) for column in zip(*parts, strict=True)])


def _copy(q: Nodes, i: int) -> Nodes:
    parts = {g: {k: v[i] for k, v in node.natural.items()} for g, node in q.items()}
    return {g: node.with_natural(parts[g]) for g, node in q.items()}


def _leaves(q: Nodes) -> tuple[dict[str, Natural], list[Tensor]]:
    mu = {
        g: {k: v.detach().clone().requires_grad_() for k, v in node.expectation.items()}
        for g, node in q.items()
    }
    return mu, [leaf for part in mu.values() for leaf in part.values()]


def _named(q: Nodes, leaves: Any) -> dict[str, Natural]:
    values = iter(leaves)
    return {g: {k: next(values) for k in node.expectation} for g, node in q.items()}


def _toward(
    node: ExponentialFamily, prior: ExponentialFamily, told: Natural, rho: float
) -> ExponentialFamily:
    """One step of the rule for the loss −log prior − ⟨λ̃, T(θ)⟩."""
    return blr_step(node, scale(add(prior.natural, told, prior.base_gradient()), -1.0), rho)


@dataclass(frozen=True)
class HiddenMarkov:
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

    def fit(
        self,
        data: Tensor,
        *,
        start: Tensor | None = None,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> FittedMarkov:
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
        if not isinstance(data, Tensor) or data.ndim not in (2, 3):
            raise DataError("data must be series, a tensor [S, T] or [S, T, D]")
        one = wide(self.prior)
        like = next(iter(one.natural.values()))
        flat = self.emission.check(data.reshape(-1, *data.shape[2:]), one)
        data, k = flat.reshape(data.shape), self.n_states
        evenly = Dirichlet(like.new_full((k,), self.concentration))
        copies = {n: v.expand(k, *v.shape).clone() for n, v in one.natural.items()}
        prior: Nodes = {
            "initial": evenly,
            "transition": Dirichlet(like.new_full((k, k), self.concentration)),
            "emission": one.with_natural(copies),
        }
        first = first_responsibilities(flat.reshape(len(flat), -1).to(like), k, start, generator)
        told = pooled(first, self.emission.site(flat))
        begun = {**prior, "emission": bayes(prior["emission"], told)}
        passing = MessagePassing(prior, self.local)
        fitted = passing.fit(data, start=begun, generator=generator, **settings)
        known = {
            **fitted.__dict__,
            "predictive": lambda q, new: passing.log_predictive(q, self._checked(new)),
        }
        return FittedMarkov(**known, model=self)

    def _checked(self, data: Tensor) -> Tensor:
        flat = self.emission.check(data.reshape(-1, *data.shape[2:]), wide(self.prior))
        return flat.reshape(data.shape)

    def local(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """A of every series ``[S]``."""
        return self.forward(mu, self.scores(mu, data))

    def scores(self, mu: Mapping[str, Natural], data: Tensor) -> Tensor:
        """E_q[log p(y_t | θ_k)], ``[S, T, K]``."""
        flat = data.reshape(-1, *data.shape[2:])
        told = paired(self.emission.site(flat), mu["emission"])
        return (told + self.emission.constant(flat).unsqueeze(1)).reshape(*data.shape[:2], -1)

    @staticmethod
    def forward(mu: Mapping[str, Natural], scores: Tensor) -> Tensor:
        """The recursion, ``[S]``."""
        alpha = mu["initial"]["log"] + scores[:, 0]
        for t in range(1, scores.shape[1]):
            moved = torch.logsumexp(alpha.unsqueeze(2) + mu["transition"]["log"], 1)
            alpha = moved + scores[:, t]
        return torch.logsumexp(alpha, 1)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FittedMarkov(Fitted[Nodes]):
    """The global nodes of a chain; examples are series.

    Attributes:
        model: the model that was fitted.
    """

    model: HiddenMarkov
    note: ClassVar[str] = "log p of a series is a lower bound, so that losses are upper ones"

    def _with(self, add: Any) -> Any:
        return joined(self.data, self.model._checked(add))

    def states(self, data: Tensor) -> Tensor:
        """q(z_t = k) of series ``[S, T, …]``, smoothed, ``[S, T, K]``.

        Raises:
            DataError: observations that the factor does not take.
        """
        mu = {name: node.expectation for name, node in self.q.items()}
        scores = self.model.scores(mu, self.model._checked(data)).detach().requires_grad_()
        with torch.enable_grad():
            total = self.model.forward(mu, scores).sum()
            return torch.autograd.grad(total, scores)[0]
