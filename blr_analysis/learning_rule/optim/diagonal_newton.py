"""Online Newton with a diagonal: the row that RMSprop, OGN and IVON depart from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.half import working
from blr_analysis.learning_rule.expectations import HESSIAN_DIAGONAL
from blr_analysis.learning_rule.moves import Block, step
from blr_analysis.learning_rule.optim.blocks import plain_tensors
from blr_analysis.learning_rule.optim.draws import Group
from blr_analysis.learning_rule.optim.newton import gradient_of
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.table import ROWS

CHUNK = 64
"""Rows of the Hessian that one backward pass finds together."""


class DiagonalNewton(RowOptimizer):
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
        params: parameters, named parameters or groups. Every number needs a row of the Hessian:
            meant for some thousands of them.
        lr: step size of the mean.
        ess: N, the number of training examples.
        weight_decay: δ/N for prior precision δ.
        hess_init: h before the first step.
        beta2: 1 − step size of h, in [0, 1].

    Raises:
        InputError: a setting out of range, or a precision that is not positive, as where the loss
            curves downwards.
        OptimizerError: the closure is missing, or called ``backward`` itself.

    Source: Khan & Rue, Eqs. 36, 37 and 44.
    """

    _ranges: ClassVar = {"lr": "(0, 1]"}
    _own_scale: Any = True

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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move mean and precision; ``closure`` returns the loss, without calling ``backward``."""
        self._refuse_inside("step()")
        if not callable(closure):
            raise OptimizerError("the closure must return the loss: step(closure)")
        self._check_groups()
        params = [*self._trained()]
        if not params:
            raise OptimizerError("every parameter is frozen: set requires_grad")
        with torch.inference_mode(False), torch.enable_grad():
            loss = closure()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.isfinite():
                raise OptimizerError(f"the closure must return the loss, finite; got {loss!r}")
            gradient, diagonal = _gradient_and_diagonal(loss, params)
        sizes = [param.numel() for param in params]
        gradients = dict(zip(params, gradient.split(sizes), strict=True))
        diagonals = dict(zip(params, diagonal.split(sizes), strict=True))
        self._refuse_negative(diagonals)
        with plain_tensors():
            for param, group in self._trained().items():
                self._advance(param, group, gradients[param], diagonals[param])
        return loss.detach()

    def _refuse_negative(self, diagonals: dict[Tensor, Tensor]) -> None:
        """Raise :class:`InputError`, before anything moves, where a precision would not be > 0."""
        for param, group in self._trained().items():
            start = torch.full_like(param, float(group["hess_init"]), dtype=working(param.dtype))
            hess = self._hess_of(param, start).reshape(-1)
            after = torch.lerp(hess, diagonals[param].to(hess.dtype), 1 - group["beta2"])
            if not bool((after + group["weight_decay"] > 0).all()):
                raise InputError("the precision is not positive: raise weight_decay, or take OGN")

    def _advance(self, param: Tensor, group: Group, gradient: Tensor, diagonal: Tensor) -> None:
        state = self._counted(param, group)
        dtype = working(param.dtype)
        gradient = gradient.view_as(param).to(dtype)
        diagonal = diagonal.view_as(param).to(dtype)
        block = Block(theta=[param], grad=[gradient], evidence=[diagonal], hess=[state["hess"]])
        step(block, HESSIAN_DIAGONAL, self.row.move, group, state["step"])


def _gradient_and_diagonal(loss: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    """∇ℓ and the diagonal of ∇²ℓ, ``[P]`` both, some rows of the Hessian at a time."""
    try:
        gradient = gradient_of(loss, params, create_graph=True)
    except RuntimeError as error:
        raise OptimizerError("return the loss, without backward") from error
    if not gradient.requires_grad:  # a linear loss
        return gradient.detach(), torch.zeros_like(gradient)
    places = torch.arange(len(gradient), device=gradient.device)
    parts = [_diagonal_entries(gradient, params, chosen) for chosen in places.split(CHUNK)]
    return gradient.detach(), torch.cat(parts)


def _diagonal_entries(gradient: Tensor, params: list[Tensor], places: Tensor) -> Tensor:
    """∂²ℓ/∂θ_j² at these places."""
    directions = torch.zeros(len(places), len(gradient)).to(gradient)
    directions[torch.arange(len(places)), places] = 1.0
    rows = torch.autograd.grad(
        gradient,
        params,
        directions,
        is_grads_batched=True,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    matrix = torch.cat([row.reshape(len(places), -1) for row in rows], 1)
    return matrix.gather(1, places.unsqueeze(1)).squeeze(1)
