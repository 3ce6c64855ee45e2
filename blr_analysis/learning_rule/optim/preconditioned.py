"""SGD with a fixed preconditioner: a Gaussian whose covariance is known before the training."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.half import working
from blr_analysis.learning_rule.optim.draws import Group
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.table import ROWS


class PreconditionedSGD(RowOptimizer):
    r"""The rule for q(θ) = N(m, S⁻¹) with a fixed, diagonal S (Khan & Rue, Eq. 35).

        m ← m − lr · S⁻¹ (∇ℓ(m) + δ m)

    ∇ℓ is the gradient of the minibatch's mean loss and δ = weight_decay the usual L2 penalty.
    S = I is SGD. With lr = ρ·N and S the precision of the posterior it is the paper's step. A
    natural choice of S is the precision of an earlier task, or of a fit.

        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> scales = [torch.tensor([[1.0, 100.0]])]
        >>> optimizer = PreconditionedSGD(model.parameters(), lr=0.5, preconditioner=scales)
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> for _ in range(40):
        ...     optimizer.zero_grad()
        ...     (model(x) - 1).square().sum().backward()
        ...     optimizer.step()
        >>> model.weight
        Parameter containing:
        tensor([[1.0000, 0.1000]], requires_grad=True)

    Args:
        params: parameters, named parameters or groups.
        lr: step size of the mean.
        preconditioner: the diagonal of S, above 0: a tensor of each parameter's shape, in their
            order.
        settings: ``weight_decay`` (0), ``sync`` and others, as for :class:`RowOptimizer`.

    Raises:
        InputError: a setting out of range, or a preconditioner that does not fit the parameters.
        OptimizerError: as :class:`RowOptimizer`.

    Source: Khan & Rue, section 4.1, Eq. 35.
    """

    def __init__(
        self, params: Any, lr: float, preconditioner: Sequence[Tensor], **settings: Any
    ) -> None:
        settings = {"eps": 0.0, **settings}
        self._set_up(ROWS["preconditioned SGD"], params, lr=lr, **settings)
        parameters = [param for group in self.param_groups for param in group["params"]]
        scales = list(preconditioner)
        shapes = [getattr(scale, "shape", None) for scale in scales]
        if shapes != [param.shape for param in parameters]:
            raise InputError("preconditioner needs one tensor of each parameter's shape, in order")
        for scale in scales:
            is_positive = bool((scale > 0).all()) and bool(scale.isfinite().all())
            if not is_positive:
                raise InputError("preconditioner must be positive and finite everywhere")
        self.preconditioner = dict(zip(parameters, scales, strict=True))

    def _next_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        if not self.state[param]:
            if param not in self.preconditioner:
                raise InputError("a parameter was added without a preconditioner: begin anew")
            scale = self.preconditioner[param].detach()
            hess = scale.to(param.device, working(param.dtype), copy=True)
            self.state[param] = {"step": 0, "hess": hess}
        return super()._next_state(param, group)
