"""Online Newton with a diagonal: the row that RMSprop, OGN and IVON depart from."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.half import working
from blr_analysis.learning_rule.expectations import HESSIAN_DIAGONAL
from blr_analysis.learning_rule.moves import Block, step
from blr_analysis.learning_rule.optim.draws import Group
from blr_analysis.learning_rule.optim.newton import ExactHessian
from blr_analysis.learning_rule.table import ROWS

ROWS_AT_ONCE = 64
"""Rows of the Hessian that one batched backward pass computes."""


class DiagonalNewton(ExactHessian):
    r"""The rule for q(θ) = N(m, diag(S)⁻¹) with the exact diagonal of the Hessian at the mean.

        h ← β₂ h + (1 − β₂) diag ∇²ℓ(m),      m ← m − lr · (∇ℓ(m) + δ m) / (h + δ)

    with S = ess·(h + δ), δ = weight_decay, and ℓ the mean loss that the closure returns. With
    lr = 1 − β₂ = ρ it is :func:`~blr_analysis.learning_rule.rule.blr_step` (K&R 37, and 44 on
    minibatches); other step sizes for mean and precision are K&R 36. RMSprop has the squared
    gradient in the place of the Hessian and a square root, OGN the squares of examples' gradients.

        >>> x = torch.tensor([[1.0], [2.0]]).double()
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = DiagonalNewton(model.parameters(), lr=1.0, beta2=0.0, ess=2)
        >>> loss = optimizer.step(lambda: (model(x) - 3 * x).square().mean())
        >>> model.weight.item()
        3.0

    Args:
        params: parameters, named parameters or groups. Each of their numbers takes a row of the
            Hessian, so there should be some thousands at most.
        lr: step size of the mean.
        ess: N, the number of training examples.
        weight_decay: δ/N for prior precision δ.
        hess_init: h before the first step.
        beta2: 1 minus the step size of h, in [0, 1].

    Raises:
        InputError: a setting is out of range, or the precision is not positive because the loss
            curves downwards.
        OptimizerError: the closure is missing, or it called ``backward`` itself.

    Source: Khan & Rue, Eqs. 36, 37 and 44.
    """

    _ranges: ClassVar = {"lr": "(0, 1]"}
    _hess_is_precision: Any = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        ess: float = 1.0,
        weight_decay: float = 0.0,
        hess_init: float = 1.0,
        beta2: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> None:
        self._set_up(
            ROWS["diagonal online Newton"],
            params,
            lr=lr,
            ess=ess,
            weight_decay=weight_decay,
            hess_init=hess_init,
            beta2=beta2,
            hess_approx="none",
            generator=generator,
        )

    def _curvature(self, gradient: Tensor, params: list[Tensor]) -> Tensor:
        """The diagonal of the Hessian, flat as the gradient."""
        is_linear = not gradient.requires_grad  # the loss is, so its Hessian is 0
        if is_linear:
            return torch.zeros_like(gradient)
        entries = torch.arange(len(gradient), device=gradient.device)
        parts = [_diagonal_entries(gradient, params, part) for part in entries.split(ROWS_AT_ONCE)]
        return torch.cat(parts)

    def _advance(self, params: list[Tensor], gradient: Tensor, curvature: Tensor) -> None:
        """One step of all parameters, from the flat gradient and the flat diagonal."""
        sizes = [param.numel() for param in params]
        gradients = dict(zip(params, gradient.split(sizes), strict=True))
        diagonals = dict(zip(params, curvature.split(sizes), strict=True))
        self._refuse_negative(diagonals)
        for param, group in self._trained().items():
            self._move_one(param, group, gradients[param], diagonals[param])

    def _refuse_negative(self, diagonals: dict[Tensor, Tensor]) -> None:
        """Raise :class:`InputError` if a precision after this step would not be positive.

        It is called before any parameter has moved.
        """
        for param, group in self._trained().items():
            start = torch.full_like(param, float(group["hess_init"]), dtype=working(param.dtype))
            hess = self._hess_of(param, start).reshape(-1)
            after = torch.lerp(hess, diagonals[param].to(hess.dtype), 1 - group["beta2"])
            if not bool((after + group["weight_decay"] > 0).all()):
                raise InputError("the precision is not positive: raise weight_decay, or take OGN")

    def _move_one(self, param: Tensor, group: Group, gradient: Tensor, diagonal: Tensor) -> None:
        """One step of a parameter, from its flat part of the gradient and of the diagonal."""
        state = self._next_state(param, group)
        dtype = working(param.dtype)
        gradient = gradient.view_as(param).to(dtype)
        diagonal = diagonal.view_as(param).to(dtype)
        block = Block(theta=[param], grad=[gradient], evidence=[diagonal], hess=[state["hess"]])
        step(block, HESSIAN_DIAGONAL, self.row.move, group, state["step"])


def _diagonal_entries(gradient: Tensor, params: list[Tensor], entries: Tensor) -> Tensor:
    """∂²ℓ/∂θ_j² for these entries j of the flat parameters."""
    unit_vectors = torch.zeros(len(entries), len(gradient)).to(gradient)
    unit_vectors[torch.arange(len(entries)), entries] = 1.0
    rows = torch.autograd.grad(
        gradient,
        params,
        unit_vectors,
        is_grads_batched=True,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    hessian_rows = torch.cat([row.reshape(len(entries), -1) for row in rows], 1)
    return hessian_rows.gather(1, entries.unsqueeze(1)).squeeze(1)
