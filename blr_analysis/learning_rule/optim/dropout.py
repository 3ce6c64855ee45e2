"""Dropout as a posterior: every unit's outgoing weights are a spike and a slab."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import AT_DROPPED_OUT_MEAN, HessianEstimate, Tensors
from blr_analysis.learning_rule.families.drawing import uniform
from blr_analysis.learning_rule.optim.draws import Context, Group, Seen
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.table import ROWS, Row


class Dropout(RowOptimizer):
    r"""Any row, with gradients and Hessians at dropped-out weights, divided by π₁.

    The weights θ_j that leave unit j have the posterior (Khan & Rue, Eq. 41)

        q(θ_j) = π₁ N(θ_j | m_j, S_j⁻¹) + (1 − π₁) N(θ_j | 0, 1/s₀),      s₀ → ∞,

    In a share π₁ of the draws z_j is 1, in the others 0, and the loss ℓ̄ is taken at z ∘ m. The rule
    is (Eqs. 42 and 43, with responsibilities that never mistake slab for spike)

        S ← (1 − ρ) S + ρ z ∘ ∇²ℓ̄(z ∘ m) / π₁,      m ← m − ρ S⁻¹ [z ∘ ∇ℓ̄(z ∘ m)] / π₁

    The factor z stands for a dropped unit that sends no gradient. ``row`` says how ∇²ℓ̄ is estimated
    and how the step is made from it: SGD (S = I: ordinary dropout with lr/π₁), Adam, VOGN and all
    others but bSAM. The prior's share δm is not divided by π₁.

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

    Args:
        params: parameters, named parameters or groups. A group's ``keep`` below 1 is for weights
            that leave units, such as those of ``Linear`` and ``Conv2d``; biases have 1.
        lr: step size of the mean.
        row: a row of :data:`~blr_analysis.learning_rule.table.ROWS`, or its name.
        keep: π₁, in (0, 1], for groups without a ``keep`` of their own.
        ess: N, the number of training examples.
        settings: ``dim``, the dimension of the weights along which the units lie (1: that of
            ``Linear``, ``Conv1d`` to ``Conv3d``); and those of the row.

    Raises:
        InputError: a setting, row or parameter that cannot be used.
        OptimizerError: as the row.

    Source: Khan & Rue, section 4.3 and Appendix G; Gal & Ghahramani, ICML 2016.
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
        settings.setdefault("dim", 1)
        self._set_up(self._accepted(row), params, lr=lr, keep=keep, ess=ess, **settings)

    def _accepted(self, row_or_name: Row | str) -> Row:
        accepted = super()._accepted(row_or_name)
        curvature = accepted.curvature
        if curvature.method == "gradsq":  # (z g / π₁)², where Eq. 43 has z g² / π₁
            curvature = HessianEstimate(curvature.name, curvature.method, _times_keep)
        is_plain = accepted.algorithm == "SGD"
        return replace(
            accepted,
            algorithm="dropout" if is_plain else f"dropout with {accepted.algorithm}",
            family=ROWS["dropout"].family,
            look=replace(AT_DROPPED_OUT_MEAN, noisy=accepted.look.noisy),
            curvature=curvature,
        )

    def mean_params(self) -> Context:
        """The model with the weights π₁ m, the mean of q; m again after it."""
        return self._context_of_look(lambda theta, group, generator: (group["keep"] * theta, None))

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["keep"] == 1:
            return
        for param in group["params"]:
            if param.ndim < 2 or not -param.ndim <= group["dim"] < param.ndim:
                raise InputError(
                    f"no units along dim = {group['dim']} of {tuple(param.shape)}: give biases a "
                    "group with keep = 1"
                )

    def _training_look(self, theta: Tensor, group: Group, generator: Any) -> Seen:
        return with_units(theta, group, generator, _whole_units)

    _posterior_look = _training_look


def with_units(
    theta: Tensor, group: Group, generator: Any, units_of: Callable[[Tensor, Group], Tensor]
) -> Seen:
    """z ∘ θ, and the factor z/π₁ of its gradient; θ itself where no unit of the group is dropped.

    ``units_of``: z of the units, from one uniform number for each.
    """
    if group["keep"] == 1:
        return theta, None
    shape = [1] * theta.ndim
    shape[group["dim"]] = theta.shape[group["dim"]]
    units = units_of(uniform(theta.new_empty(shape), generator), group)
    return theta * units, units / group["keep"]


def _whole_units(uniforms: Tensor, group: Group) -> Tensor:
    """1 for a unit that stays, 0 for one that is dropped."""
    return (uniforms < group["keep"]).to(uniforms.dtype)


def _times_keep(evidence: Tensors, hess: Tensors, group: Group) -> Tensors:
    """The estimate π₁ (z g / π₁)² of the Hessian."""
    return list(torch._foreach_mul(evidence, group["keep"]))
