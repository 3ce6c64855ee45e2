"""Any family, any loss: the rule by gradients at samples of q (Khan & Rue, section 3).

    λ ← (1 − ρ) λ − ρ ∇_μ E_q[ ℓ̄(θ) + log h(θ) ]

needs only ∇_μ E_q[ℓ̄] of a loss. Draws θ_s of q give the gradient of E_q[f] in one of two ways:

    path:   ∇_μ (1/S) Σ_s f(θ_s(μ))                       through the draws (reparameterisation)
    score:  (1/S) Σ_s (f(θ_s) − f̄_s) ∇_μ log q(θ_s)       f̄_s is the mean of the other draws

Both are taken with respect to μ, through the family's own map from μ to its parameters. They are
therefore natural gradients, without a Fisher matrix. The code takes f = ℓ̄ + log q, and holds the
parameters of log q fixed. Then ∇_μ E_q[f] is ∇_μ E_q[ℓ̄ + log h] + λ, and the rule's step is
λ ← λ − ρ ∇_μ E_q[f]. Where q is the posterior itself, this gradient is 0 at every draw (Roeder et
al., 2017).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from blr_analysis.checks import at_least, instance, one_of, tolerance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.inference.fitted import (
    Fitted,
    NotConverged,
    answer,
    rate_at,
    until_flat,
)
from blr_analysis.learning_rule.rule import blr_step

Q = TypeVar("Q", bound=ExponentialFamily)
Loss = Callable[[Any], Tensor]
OBJECTIVE = "E_q[loss] − entropy"
CONTRACT = "loss must be a function (one draw of q) -> a number, by torch operations"
MAX_HALVINGS = 20  # of ρ, until a step stays in the family


def fit(
    start: Q,
    loss: Loss,
    *,
    samples: int = 100,
    rho: float | Callable[[int], float] = 0.1,
    gradients: str = "auto",
    n_iter: int = 500,
    tol: float = 0.01,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Fitted[Q]:
    r"""The member of a family that minimises E_q[ℓ̄(θ)] − H(q), for any family and any loss.

    With ℓ̄ = −log p(y, θ) this is the member nearest to the posterior in KL(q ‖ p); it is the
    posterior itself if that belongs to the family. The steps are the rule's,

        λ ← (1 − ρ) λ − ρ ∇_μ E_q[ ℓ̄(θ) + log h(θ) ],

    with the expectation's gradient from draws of q. The result is the mean of λ over the second
    half of the steps, which has less noise than the last λ.

    Args:
        start: q before the first step: any member of :mod:`~blr_analysis.learning_rule.families`.
            Copies of a factor are a mean field: ``Gamma`` of shape ``[P]`` has P independent θ_j.
        loss: ℓ̄, a function from one draw to a number. The draw is as ``start.sample()`` gives it:
            a tensor, ``[P]`` for a Gaussian, ``[...]`` for a Gamma or Beta, or for some families a
            dictionary. The number is the sum of all examples' losses plus −log prior; for a
            minibatch of B examples, N/B times their sum plus −log prior.
        samples: S, draws for each step, 2 or more.
        rho: ρ in (0, 1], or t → ρ_t from t = 1.
        gradients: ``"path"``, ``"score"`` (for losses that have no gradient in θ), or ``"auto"``:
            the path where draws can be differentiated, the score for classes and signs.
        n_iter: steps.
        tol: how far q may be from where it comes to rest, in nats per copy, to count as
            converged. The distance is estimated from the divergence between the means over the
            last two quarters of the steps.
        generator: of the draws.
        progress: whether to show a bar; None: on a terminal after a second.

    Returns:
        The posterior; ``history`` is the estimate of E_q[ℓ̄] − H(q) before each step, in nats.

    Raises:
        InputError: the start is no member of a family; a setting is out of range; the loss is no
            number, is not finite at draws of q, or has no gradient in θ, which the path needs.

    Warns:
        NotConverged: q is still farther than ``tol`` from where it comes to rest.

    Example:
        Counts of a Poisson distribution whose rate has a log-normal prior. The posterior is not a
        Gamma distribution; this is the Gamma distribution nearest to it.

        >>> from blr_analysis.learning_rule.families import Gamma
        >>> y = torch.tensor([2.0, 4.0, 1.0])
        >>> def loss(theta):
        ...     log_prior = -theta.log() - 0.5 * theta.log().square()
        ...     return -(y * theta.log() - theta).sum() - log_prior
        >>> start = Gamma(torch.tensor(1.0), torch.tensor(1.0))
        >>> generator = torch.Generator().manual_seed(0)
        >>> fitted = fit(start, loss, rho=0.3, n_iter=60, generator=generator, progress=False)
        >>> fitted.shape.round(decimals=1), fitted.rate.round(decimals=1)
        (tensor(7.4000), tensor(3.5000))

    Source: Khan & Rue, section 3; Lin, Khan & Schmidt, ICML 2019 (natural gradients of draws);
    Figurnov et al., NeurIPS 2018 (paths through Gamma draws).
    """
    instance("start", start, ExponentialFamily, "a member to begin from, as Gamma(shape, rate)")
    at_least(2, "samples", samples)
    at_least(8, "n_iter", n_iter)
    one_of("gradients", gradients, ("auto", "path", "score"))
    tolerance("tol", tol)
    q = start
    quarters = LastQuarters(n_iter)

    def step(t: int) -> float:
        nonlocal q
        value, gradient = estimated(q, loss, samples, gradients, generator)
        rate = rate_at(rho, t + 1)
        q = _inside(q, gradient, rate)
        quarters.add(t, q.natural, rate)
        return value

    run = until_flat(step, OBJECTIVE, noisy=True, max_iter=n_iter, progress=progress)
    distance = quarters.distance(start)
    if distance > tol:
        message = f"q is still about {distance:.3g} nats from its rest"
        warnings.warn(f"{message}: raise n_iter, rho or samples", NotConverged, stacklevel=2)
    q = start.with_natural(quarters.mean())
    return Fitted(q, run["history"], OBJECTIVE, converged=distance <= tol)


class LastQuarters:
    """The means of λ over the third and the last quarter of the steps."""

    def __init__(self, n_iter: int) -> None:
        self.n_iter = n_iter
        self.sums: dict[int, Natural] = {}  # of λ, by quarter: 2 and 3 of 0 to 3
        self.counts = {2: 0, 3: 0}  # of steps, by quarter
        self.total_rate = 0.0  # Σ ρ over the last quarter

    def add(self, t: int, natural: Natural, rate: float) -> None:
        """Add λ after step t = 0, 1, …, which had this ρ."""
        quarter = 4 * t // self.n_iter
        if quarter < 2:
            return
        fixed = {name: value.detach() for name, value in natural.items()}
        self.sums[quarter] = add(self.sums[quarter], fixed) if self.counts[quarter] else fixed
        self.counts[quarter] += 1
        if quarter == 3:
            self.total_rate += rate

    def mean(self) -> Natural:
        """The mean of λ over both quarters."""
        count = self.counts[2] + self.counts[3]
        return scale(add(self.sums[2], self.sums[3]), 1 / count)

    def distance(self, family: ExponentialFamily) -> float:
        """About how far q is from where it comes to rest, in nats per copy.

        It is the divergence between the means of both quarters. Steps with Σ ρ < 1 make about that
        part of the way, and a divergence grows as the square of a distance.
        """
        third = family.with_natural(scale(self.sums[2], 1 / self.counts[2]))
        last = family.with_natural(scale(self.sums[3], 1 / self.counts[3]))
        part_of_the_way = min(1.0, self.total_rate)
        return float(last.kl(third).detach().max()) / part_of_the_way**2


def estimated(
    q: ExponentialFamily,
    loss: Loss,
    samples: int = 100,
    gradients: str = "auto",
    generator: torch.Generator | None = None,
) -> tuple[float, Natural]:
    """E_q[ℓ̄] − H(q), and ∇_μ E_q[ℓ̄] by statistic as ``blr_step`` takes it, from draws of q.

    Example:
        >>> from blr_analysis.learning_rule.families import CategoricalFamily
        >>> q = CategoricalFamily(torch.zeros(1))
        >>> costs = torch.tensor([0.0, 2.0])
        >>> value, gradient = estimated(
        ...     q, lambda k: costs[k], 4000, generator=torch.Generator().manual_seed(0)
        ... )
        >>> round(value, 1), gradient["indicator"].round(decimals=1)   # 1 − log 2, 0 − 2
        (0.3, tensor([-2.]))
    """
    in_double = {name: value.detach().double() for name, value in q.natural.items()}
    q_in_double = q.with_natural(in_double)
    dtype = next(iter(q.natural.values())).dtype

    def losses_at(draws: Any) -> Tensor:
        return _losses(loss, tree_map(partial(_like, dtype=dtype), draws)).double()

    value, gradient = _objective(q_in_double, losses_at, samples, gradients, generator)
    log_q_gradient = add(q_in_double.natural, q_in_double.base_gradient())
    loss_gradient = add(gradient, scale(log_q_gradient, -1.0))
    return value, {name: slope.to(dtype) for name, slope in loss_gradient.items()}


def _objective(
    q: ExponentialFamily,
    losses_at: Callable[[Any], Tensor],
    samples: int,
    gradients: str,
    generator: torch.Generator | None,
) -> tuple[float, Natural]:
    """E_q[ℓ̄ + log q], and its gradient in μ with the parameters of log q held fixed."""
    with torch.enable_grad():
        mu = {name: value.detach().requires_grad_() for name, value in q.expectation.items()}
        member = q.with_expectation(mu)
        draws = member.sample(samples, generator=generator)
        has_path = any(draw.requires_grad for draw in tree_leaves(draws))
        if gradients == "path" and not has_path:
            raise InputError("draws of this family have no path: take gradients='score'")
        use_path = has_path and gradients != "score"
        if not use_path:
            draws = tree_map(torch.Tensor.detach, draws)
        losses = losses_at(draws)
        objectives = losses + _per_draw(q.log_prob(draws))
        _refuse_unusable(losses, objectives, use_path)
        if use_path:
            surrogate = objectives.mean()
        else:
            surrogate = _score_surrogate(objectives.detach(), _per_draw(member.log_prob(draws)))
        slopes = torch.autograd.grad(surrogate, list(mu.values()))
    return float(objectives.detach().mean()), dict(zip(mu, slopes, strict=True))


def _score_surrogate(objectives: Tensor, log_probs: Tensor) -> Tensor:
    """A number whose gradient is the score's: each draw is compared with the mean of the others."""
    count = len(objectives)
    advantages = (objectives - objectives.mean()) * count / (count - 1)
    return (advantages * log_probs).mean()


def _refuse_unusable(losses: Tensor, objectives: Tensor, use_path: bool) -> None:
    """Raise :class:`InputError` for losses without a gradient or a number."""
    if use_path and not losses.requires_grad:
        raise InputError("the loss has no gradient in θ: take gradients='score'")
    if not bool(objectives.isfinite().all()):
        raise InputError("the loss is not finite at a draw of q: begin elsewhere, or lower rho")


def _like(draw: Tensor, dtype: torch.dtype) -> Tensor:
    """The draw in the dtype of the start, which is that of the data; integers stay integers."""
    return draw.to(dtype) if draw.is_floating_point() else draw


def _per_draw(values: Tensor) -> Tensor:
    """The sum over the copies of each draw, ``[S]`` from ``[S, ...]``."""
    return values.reshape(len(values), -1).sum(1)


def _losses(loss: Loss, draws: Any) -> Tensor:
    """ℓ̄ of every draw, ``[S]``: all draws at once where torch can, else one after the other."""
    number = partial(answer, CONTRACT, torch.Size([]), loss)
    try:
        return vmap(number, randomness="different")(draws)
    except (InputError, RuntimeError):
        count = len(tree_leaves(draws)[0])
        single_draws = (tree_map(lambda values, i=i: values[i], draws) for i in range(count))
        return torch.stack([number(draw) for draw in single_draws])


def _inside(q: Q, gradient: Natural, rho: float) -> Q:
    """One step of the rule, with ρ halved until the step stays in the family.

    The noise of the draws may throw a longer step out of it.
    """
    for k in range(MAX_HALVINGS):
        try:
            after = blr_step(q, gradient, rho / 2**k)
        except InputError:
            continue
        return after
    raise InputError("no step stays in the family: take more samples, or begin elsewhere")
