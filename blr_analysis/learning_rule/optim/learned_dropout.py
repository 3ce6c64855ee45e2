"""Dropout whose rate is learned: the share of units that stay is a Bernoulli of its own."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from blr_analysis import ranks
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim.draws import Draw, Group, Seen
from blr_analysis.learning_rule.optim.dropout import Dropout, with_units
from blr_analysis.learning_rule.optim.gathered import mean_over_ranks
from blr_analysis.learning_rule.table import Row

MAX_LOGIT = 12.0
"""|λ| at most: π₁ stays between 6e-6 and 1 − 6e-6."""


class LearnedDropout(Dropout):
    r"""Dropout that learns π₁, the share of units that stay, of every group whose ``keep`` < 1.

    The J units of a group's weights are Bernoulli with λ = log π₁ / (1 − π₁), and Σ_j z_j has the
    mean Jπ₁, so that the rule for π₁ is

        λ ← λ − keep_lr · [ ess/J · dℓ̄/dπ₁ + λ − λ₀ ]

    with the prior's λ₀. Training looks at relaxed units (the concrete distribution),
    z = σ((λ + log u/(1 − u)) / τ) with u uniform, whose dz/dλ = z (1 − z)/τ gives dℓ̄/dπ₁ from the
    weights' own gradients. The weights move as in :class:`Dropout`. The π₁ that is learned stands
    in ``optimizer.param_groups[k]["keep"]``.

        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> rest = [*model[0].parameters(), model[2].bias]
        >>> groups = [{"params": [model[2].weight], "keep": 0.5}, {"params": rest}]
        >>> optimizer = LearnedDropout(groups, lr=0.1, ess=50, keep_lr=0.1)
        >>> for _ in range(20):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.param_groups[0]["keep"] == 0.5, optimizer.param_groups[1]["keep"]
        (False, 1.0)

    Args:
        params: as of :class:`Dropout`; a group's ``keep`` below 1 is where its π₁ starts.
        lr: step size of the mean.
        row: a row of :data:`~blr_analysis.learning_rule.table.ROWS`, or its name.
        keep: π₁ at first, for groups without a ``keep`` of their own.
        ess: N, the number of training examples.
        keep_lr: step size of λ; 0: π₁ stays, and the units are relaxed all the same.
        keep_prior: π₁ of the prior, below 1, of which λ₀ is the logit.
        temperature: τ above 0; the estimate is unbiased, and noisiest, at 0.
        settings: those of :class:`Dropout`.

    Raises:
        InputError: a setting, row or parameter that cannot be used.
        OptimizerError: as the row; ``state_dict`` is called between a draw and its step.

    Source: Khan & Rue, section 4.3 and Appendix G; Gal, Hron & Kendall, "Concrete Dropout",
    NeurIPS 2017.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        row: Row | str = "SGD",
        *,
        keep: float = 1.0,
        ess: float = 1.0,
        keep_lr: float = 0.01,
        keep_prior: float = 0.5,
        temperature: float = 0.1,
        **settings: Any,
    ) -> None:
        super().__init__(
            params,
            lr,
            row,
            keep=keep,
            ess=ess,
            keep_lr=keep_lr,
            keep_prior=keep_prior,
            temperature=temperature,
            **settings,
        )

    def _training_look(self, theta: Tensor, group: Group, generator: Any) -> Seen:
        return with_units(theta, group, generator, _relaxed_units)

    def _gather(self, draw: Draw) -> None:
        """Gather the slopes of π₁ as well; they need the draw's own gradients."""
        slopes = {
            k: self._slope(draw, group)
            for k, group in enumerate(self.param_groups)
            if group["keep"] < 1
        }
        super()._gather(draw)
        for k, slope in slopes.items():
            self._slopes[k] = self._slopes.get(k, 0.0) + slope
            self._gradient_norms[k] = self._gradient_norm(k)

    def _slope(self, draw: Draw, group: Group) -> float:
        """(1/J) dℓ̄/dπ₁ = Σ_ij θ_ij g_ij (1 − z_j) / (J τ (1 − π₁)), g the gradient times z/π₁."""
        total = 0.0
        for param in group["params"]:
            if param.grad is None or param not in draw.groups:
                continue
            weights = param.detach()
            if param in draw.noises:
                weights = weights + draw.noises[param]
            dropped = 1 - draw.factors[param] * group["keep"]
            total += float((weights * param.grad * dropped).double().sum())
        n_units = sum(param.shape[group["dim"]] for param in group["params"])
        return total / (n_units * group["temperature"] * (1 - group["keep"]))

    def _gradient_norm(self, k: int) -> float:
        """The norm of the gradient of the k-th group's parameters."""
        grads = [p.grad for p in self.param_groups[k]["params"] if p.grad is not None]
        return math.hypot(*(float(grad.double().norm()) for grad in grads))

    def _forget_draws(self) -> None:
        super()._forget_draws()
        self._slopes: dict[int, float] = {}  # Σ over draws of (1/J) dℓ̄/dπ₁, by group
        self._gradient_norms: dict[int, float] = {}  # after the last draw, by group

    def _update(self, inverse_scale: float) -> None:
        """Move π₁ of every group, then the weights.

        Gradient clipping and loss scales act on π₁ as on the weights of its group.
        """
        slopes = []
        for k, slope in self._slopes.items():
            before = self._gradient_norms[k]
            clipping = self._gradient_norm(k) / before if before else 0.0
            slopes.append(slope * clipping * inverse_scale / self._gathered.count)
        if slopes and self.sync and ranks.count() > 1:
            slopes = mean_over_ranks(slopes, self.param_groups[0]["params"][0].device)
        for k, slope in zip(self._slopes, slopes, strict=True):
            _move_keep(self.param_groups[k], slope)
        super()._update(inverse_scale)

    def state_dict(self) -> dict[str, Any]:
        """As the row's; only after ``step()``, because ``keep`` is learned.

        Raises:
            OptimizerError: inside ``sampled_params``, or between it and a step of ``keep``.
        """
        if self._slopes:
            raise OptimizerError("save the state after step(): keep is learned")
        return super().state_dict()


def _move_keep(group: dict[str, Any], slope: float) -> None:
    """Move π₁, the group's ``keep``: λ ← λ − keep_lr · (ess · slope + λ − λ₀), within bounds."""
    logit = _logit(group["keep"])
    gradient = group["ess"] * slope + logit - _logit(group["keep_prior"])
    after = logit - group["keep_lr"] * gradient
    bounded = min(max(after, -MAX_LOGIT), MAX_LOGIT)
    group["keep"] = 1 / (1 + math.exp(-bounded))


def _relaxed_units(uniforms: Tensor, group: Group) -> Tensor:
    """z = σ((λ + log u/(1 − u)) / τ), between 0 and 1."""
    return ((uniforms.logit() + _logit(group["keep"])) / group["temperature"]).sigmoid()


def _logit(probability: float) -> float:
    return math.log(probability) - math.log1p(-probability)
