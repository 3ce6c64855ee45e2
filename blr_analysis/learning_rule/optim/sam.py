"""SAM: sharpness-aware minimisation, the limit of bSAM whose posterior has no width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.half import working
from blr_analysis.learning_rule.optim.bsam import BSAM
from blr_analysis.learning_rule.optim.draws import Draw, Group, Seen
from blr_analysis.learning_rule.table import ROWS


class SAM(BSAM):
    r"""Gradients at the adversary of the mean: q(θ) = N(m, σ²I), σ² → 0 and fixed.

    Each step takes two gradients of the same minibatch: g at the mean m, and g_a at the weights
    m + radius · g/‖g‖, the norm over all parameters. With δ = weight_decay:

        u ← β₁ u + g_a + δ m,      m ← m − lr · u

        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> optimizer = SAM(model.parameters(), lr=0.1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> losses = [float(optimizer.step(closure)) for _ in range(20)]
        >>> losses[-1] < losses[0]
        True

    Without a closure the loop is that of :class:`BSAM`: ``sampled_params(train=True)``, then
    ``adversarial_params()``, then ``step()``. SAM learns no precision: use ``fit_laplace`` for it.

    Args:
        params: parameters, named parameters or groups.
        lr: step size of the mean.
        radius: how far the adversary is from the mean.
        settings: ``beta1`` (0.9), ``weight_decay`` (0), ``mc_samples``, ``sync`` and
            ``generator``, as for :class:`RowOptimizer`.

    Raises:
        InputError: a setting or parameter is out of range.
        OptimizerError: as :class:`BSAM`.

    Source: Foret et al., "Sharpness-Aware Minimization", ICLR 2021; Möllenhoff & Khan, "SAM as an
    Optimal Relaxation of Bayes", ICLR 2023.
    """

    def __init__(self, params: Any, lr: float, radius: float = 0.05, **settings: Any) -> None:
        self._set_up(ROWS["SAM"], params, lr=lr, radius=radius, **settings)

    @property
    def _needs_draw(self) -> bool:
        return True

    def _adversary(self, adoptable: bool = False) -> Draw:
        self._refuse_inside("adversarial_params()")
        if self._sampled is None:
            raise OptimizerError("adversarial_params() without a sample: draw one before it")
        gradients = self._sampled
        self._sampled = None
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        norm = float(torch.stack([square.cpu() for square in squares]).sum().sqrt())

        def look(mean: Tensor, group: Group, _: torch.Generator | None) -> Seen:
            gradient = gradients.get(mean)
            if gradient is None or norm == 0:
                return mean, None
            offset = gradient * (group["radius"] / norm)
            return mean.to(working(mean.dtype)) + offset, None

        return Draw(train=True, look=look, adoptable=adoptable)
