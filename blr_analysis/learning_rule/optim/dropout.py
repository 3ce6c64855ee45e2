"""Dropout as a posterior: every unit's outgoing weights are a spike and a slab."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.expectations import AT_DROPPED_OUT_MEAN, HessianEstimate, Tensors
from blr_analysis.learning_rule.families.drawing import uniform
from blr_analysis.learning_rule.optim.row_optimizer import (
    Draw,
    Group,
    RowOptimizer,
    mean_over_ranks,
)
from blr_analysis.learning_rule.table import ROWS, Row

MOST = 12.0
"""|λ|: π₁ stays between 6e-6 and 1 − 6e-6."""


class Dropout(RowOptimizer):
    r"""Any row, with gradients and Hessians at dropped-out weights, divided by π₁.

    The weights θ_j that leave unit j have the posterior (Khan & Rue, Eq. 41)

        q(θ_j) = π₁ N(θ_j | m_j, S_j⁻¹) + (1 − π₁) N(θ_j | 0, 1/s₀),      s₀ → ∞,

    and with z_j = 1 in a share π₁ of the draws, 0 in the others, ℓ̄ at z ∘ m, and responsibilities
    that never mistake slab for spike, the rule is (Eqs. 42 and 43)

        S ← (1 − ρ) S + ρ z ∘ ∇²ℓ̄(z ∘ m) / π₁,      m ← m − ρ S⁻¹ [z ∘ ∇ℓ̄(z ∘ m)] / π₁

    (z stands there because a unit that is dropped sends no gradient). ``row`` says how ∇²ℓ̄ is
    estimated and the step made of it: SGD (S = I: ordinary dropout with lr/π₁), Adam, VOGN and
    all others but bSAM. The prior's share δm is not divided.

        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> rest = [*model[0].parameters(), model[2].bias]
        >>> groups = [{"params": [model[2].weight], "keep": 0.5}, {"params": rest}]
        >>> optimizer = Dropout(groups, lr=0.1)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):     # some hidden units dropped
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()                               # weights are m again
        >>> with optimizer.mean_params(), torch.no_grad():     # π₁ m, to predict with
        ...     model(x).shape
        torch.Size([50, 1])

    The model has no dropout layers of its own. A mask belongs to a draw, so all examples of the
    minibatch share it (``torch.nn.Dropout`` draws one for each, and divides activations by π₁);
    several contexts, each with a part of the minibatch, are averaged. Predict inside
    ``mean_params()``, or average over ``sampled_params()``, which is MC dropout.

    With ``keep_lr`` above 0 a group's π₁ is learned, too: the J units of its weights are Bernoulli
    with λ = log π₁ / (1 − π₁), and Σ_j z_j has the mean Jπ₁, so that the rule is

        λ ← λ − ρ [ ess/J · dℓ̄/dπ₁ + λ − λ₀ ]

    for the prior's λ₀. Training then looks at relaxed units (the concrete distribution),
    z = σ((λ + log u/(1 − u)) / τ) with u uniform, whose dz/dλ = z (1 − z)/τ gives dℓ̄/dπ₁ from the
    weights' own gradients. ``optimizer.param_groups[k]["keep"]`` is what was learned.

    Args:
        params: parameters, named parameters or groups. A group's ``keep`` below 1 is for weights
            that leave units, such as those of ``Linear`` and ``Conv2d``; biases have 1.
        lr: step size of the mean.
        row: a row of :data:`~blr_analysis.learning_rule.table.ROWS`, or its name.
        keep: π₁, in (0, 1], for groups that say nothing else.
        ess: N, the number of training examples.
        settings: ``dim``, the dimension of the weights along which the units lie (1: that of
            ``Linear``, ``Conv1d`` to ``Conv3d``); ``keep_lr``, the step size of λ for groups whose
            ``keep`` is below 1 (0: π₁ is fixed); ``keep_prior``, π₁ of the prior, with which λ₀ is
            made (0.5); ``temperature``, τ, unbiased at 0, and noisier (0.1); and those of the row.

    Raises:
        InputError: a setting, row or parameter that cannot be used.
        OptimizerError: as the row.

    Source: Khan & Rue, section 4.3 and Appendix G; Gal & Ghahramani, ICML 2016; Gal, Hron &
    Kendall, "Concrete Dropout", NeurIPS 2017.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        row: Row | str = "SGD",
        *,
        keep: float = 1.0,
        ess: float = 1.0,
        **settings: Any,
    ) -> None:
        learned = {"dim": 1, "keep_lr": 0.0, "keep_prior": 0.5, "temperature": 0.1}
        given = {**learned, **settings}
        self._set_up(self._accepted(row), params, lr=lr, keep=keep, ess=ess, **given)

    def _accepted(self, given: Row | str) -> Row:
        accepted = super()._accepted(given)
        curvature = accepted.curvature
        if curvature.method == "gradsq":  # (z g / π₁)², where Eq. 43 has z g² / π₁
            curvature = HessianEstimate(curvature.name, curvature.method, _times_keep)
        return replace(
            accepted,
            algorithm="dropout"
            if accepted.algorithm == "SGD"
            else f"dropout with {accepted.algorithm}",
            family=ROWS["dropout"].family,
            look=replace(AT_DROPPED_OUT_MEAN, noisy=accepted.look.noisy),
            curvature=curvature,
        )

    @property
    def _needs_all_gradients(self) -> bool:
        return super()._needs_all_gradients or any(g.get("keep_lr") for g in self.param_groups)

    def mean_params(self) -> AbstractContextManager[None]:
        """The model with the weights π₁ m, the mean of q; m again after it."""
        return self._shown(lambda theta, group, generator: (group["keep"] * theta, None))

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["keep"] == 1:
            return
        if group.get("keep_lr") and group["keep_prior"] == 1:
            raise InputError("keep_prior must be below 1 where keep is learned")
        for param in group["params"]:
            if param.ndim < 2 or not -param.ndim <= group["dim"] < param.ndim:
                said = f"no units along dim = {group['dim']} of {tuple(param.shape)}"
                raise InputError(f"{said}: give biases a group with keep = 1")

    def _look(
        self, theta: Tensor, group: Group, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._dropped(theta, group, generator, relaxed=bool(group.get("keep_lr")))

    def _dropped(
        self, theta: Tensor, group: Group, generator: torch.Generator | None, relaxed: bool
    ) -> tuple[Tensor, Tensor | None]:
        if group["keep"] == 1:
            return theta, None
        shape = [1] * theta.ndim
        shape[group["dim"]] = theta.shape[group["dim"]]
        u = uniform(theta.new_empty(shape), generator)
        if relaxed:
            kept = ((u.logit() + logit(group["keep"])) / group["temperature"]).sigmoid()
        else:
            kept = (u < group["keep"]).to(theta.dtype)
        return theta * kept, kept / group["keep"]

    def _sample(
        self, theta: Tensor, group: Group, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._dropped(theta, group, generator, relaxed=False)

    def _begin_fresh(self) -> None:
        super()._begin_fresh()
        self._slopes: dict[int, float] = {}  # Σ over draws of (1/J) dℓ̄/dπ₁, by group
        self._lengths: dict[int, float] = {}  # of the gradient then

    def _gather(self, draw: Draw) -> None:
        """dℓ̄/dπ₁ = Σ_ij θ_ij g_ij (1 − z_j) / (τ (1 − π₁)), g the gradient times z/π₁."""
        learned = {}
        for k, group in enumerate(self.param_groups):
            if not group.get("keep_lr") or group["keep"] == 1:
                continue
            slope = 0.0
            for p, own in draw.groups.items():
                if own is group and p.grad is not None:
                    seen = p.detach() + draw.noises[p] if draw.noises else p.detach()
                    hidden = 1 - draw.factors[p] * group["keep"]
                    slope += float((seen * p.grad * hidden).double().sum())
            units = sum(p.shape[group["dim"]] for p in group["params"])
            learned[k] = slope / (units * group["temperature"] * (1 - group["keep"]))
        super()._gather(draw)
        for k, slope in learned.items():
            self._slopes[k] = self._slopes.get(k, 0.0) + slope
            self._lengths[k] = self._length(k)

    def _forget(self) -> None:
        super()._forget()
        self._slopes = {}

    def _length(self, k: int) -> float:
        grads = [p.grad for p in self.param_groups[k]["params"] if p.grad is not None]
        return math.hypot(*(float(g.double().norm()) for g in grads))

    def _update(self, inverse_scale: float) -> None:
        """Clipping and loss scales act on π₁ as on the weights of its group."""
        factor = inverse_scale / self._gathered.count
        slopes = [
            slope * factor * (self._length(k) / was if (was := self._lengths[k]) else 0.0)
            for k, slope in self._slopes.items()
        ]
        if slopes and self.sync and ranks.count() > 1:
            slopes = mean_over_ranks(slopes, self.param_groups[0]["params"][0].device)
        for k, slope in zip(self._slopes, slopes, strict=True):
            group = self.param_groups[k]
            prior, now = logit(group["keep_prior"]), logit(group["keep"])
            moved = now - group["keep_lr"] * (group["ess"] * slope + now - prior)
            group["keep"] = 1 / (1 + math.exp(-min(max(moved, -MOST), MOST)))
        super()._update(inverse_scale)

    def state_dict(self) -> dict[str, Any]:
        """As the row's; with a learned ``keep`` only after ``step()``.

        Raises:
            OptimizerError: inside ``sampled_params``, or between it and a step of ``keep``.
        """
        if self._slopes:
            raise OptimizerError("save the state after step(): keep is learned")
        return super().state_dict()


def logit(share: float) -> float:
    return math.log(share) - math.log1p(-share)


def _times_keep(evidence: Tensors, hess: Tensors, group: Group) -> Tensors:
    return list(torch._foreach_mul(evidence, group["keep"]))
