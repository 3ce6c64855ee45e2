"""Local and global parameters, and the messages between them (Khan & Rue, 5.4, Eqs. 58 to 60).

    p(y, z, θ) = Π_g p(θ_g) Π_i p(y_i, z_i | θ),     log p(y_i, z_i | θ) linear in the T_g(θ_g)

The global nodes send what they expect, μ_g = E_q[T_g(θ_g)]. An example takes its local step at
ρ = 1, q(z_i) ∝ exp E_q[log p(y_i, z_i | θ)], whose log-normaliser A_i(μ) is all that has to be
written down of it. What the example answers is its gradient, and the global step is the rule's:

    λ̃_i = ∇_μ A_i(μ),      λ ← (1 − ρ) λ + ρ (λ_0 + N/B Σ_i λ̃_i),     ELBO = Σ_i A_i − Σ_g KL_g

ρ = 1 over all examples is variational message passing, ρ_t < 1 over minibatches is SVI. Mixtures
and chains differ in A_i alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import positive_int, share, tolerance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.inference.fitted import Fitted, Sites, moved, rows, until_flat
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.progress import track

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
        positive_int("max_iter", max_iter)
        tolerance("tol", tol)
        n = len(data if isinstance(data, Tensor) else data[0])
        q, first = start or self.prior, torch.arange(n)
        if batch is not None and positive_int("batch", batch) > n:
            raise InputError(f"batch is {batch} of {n} examples")

        def steps() -> Iterator[float]:
            nonlocal q
            for t in track(range(max_iter), label="message passing", show=progress):
                chosen = first if batch is None else torch.randperm(n, generator=generator)[:batch]
                share_of_all = n / len(chosen)
                messages, local = self.messages(q, rows(data, chosen))
                divergence = sum(float(node.kl(self.prior[g]).sum()) for g, node in q.items())
                yield share_of_all * float(local.sum()) - divergence
                size = share("rho", rho(t + 1) if callable(rho) else rho)
                q = {
                    g: _toward(node, self.prior[g], scale(messages[g], share_of_all), size)
                    for g, node in q.items()
                }

        if batch is None:
            history, converged = until_flat(steps(), tol=tol * n, what="the lower bound")
        else:
            history, converged = list(steps()), False
        return Fitted(
            q=q,
            history=history,
            objective="ELBO",
            prior=self.prior,
            n_data=n,
            site_of=lambda chosen: self.each(q, rows(data, chosen)),
            predictive=self.log_predictive,
            data=data,
            converged=converged,
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
            values = self.local(mu, data)
            if not bool(values.isfinite().all()):
                raise InputError("the local log-normaliser is not finite")
            gradients = torch.autograd.grad(values.sum(), leaves, materialize_grads=True)
        return _named(q, gradients), values.detach()

    def each(self, q: Nodes, data: Any) -> Sites:
        """λ̃_i of every example, with a leading dimension M."""
        mu, leaves = _leaves(q)
        with torch.enable_grad():
            values = self.local(mu, data)
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
