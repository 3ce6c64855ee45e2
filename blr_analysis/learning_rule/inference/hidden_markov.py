"""Hidden Markov models whose parameters are averaged over, with emissions of any conjugate factor.

The chain z_1 → … → z_T is an exponential family, and forward recursion is its log-normaliser:

    α_1 = E log π + e_1,     α_t = log Σ_i exp(α_{t−1,i} + E log P_i) + e_t,     A = log Σ exp α_T

with e_tk = E_q[log p(y_t | θ_k)]. Its gradients are what the backward pass would give, expected
starts, transitions and classes: messages to Dirichlet nodes, and to the emissions' own family
(Beal, 2003; Khan & Rue, 5.3 and 5.4). A series of length 1 is a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, positive_number
from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families.base import Natural
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference.conjugate import bayes, wide
from blr_analysis.learning_rule.inference.factors import Factor
from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.learning_rule.inference.messages import MessagePassing, Nodes
from blr_analysis.learning_rule.inference.mixture_model import (
    first_responsibilities,
    paired,
    pooled,
)


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
