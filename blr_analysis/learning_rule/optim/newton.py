"""Newton's method as a row: a Gaussian with a full covariance, for models of few parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.half import HALF
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.optim.blocks import plain_tensors
from blr_analysis.learning_rule.optim.draws import Group
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.learning_rule.table import ROWS

MAX_PARAMETERS = 5000
"""The largest number of parameters; a Hessian of 5000² numbers takes 200 MB."""


class ExactHessian(RowOptimizer):
    """A row that moves by the exact Hessian of the loss, or by its diagonal."""

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
            try:
                gradient = gradient_of(loss, params, create_graph=True)
            except RuntimeError as error:
                raise OptimizerError("return the loss, without backward") from error
            curvature = self._curvature(gradient, params)
        with plain_tensors():
            self._advance(params, gradient.detach(), curvature)
        return loss.detach()

    def _curvature(self, gradient: Tensor, params: list[Tensor]) -> Tensor:
        """The Hessian ``[P, P]`` or its diagonal ``[P]``, from the gradient ``[P]`` with its graph.

        The gradient of a linear loss has no graph.
        """
        raise NotImplementedError

    def _advance(self, params: list[Tensor], gradient: Tensor, curvature: Tensor) -> None:
        """Move these parameters."""
        raise NotImplementedError


class Newton(ExactHessian):
    r"""The rule for q(θ) = N(m, S⁻¹) with the exact Hessian at the mean (Khan & Rue, 1.3.2).

        S ← (1 − lr) S + lr · ess·(∇²ℓ + δ I),      m ← m − lr · S⁻¹ ess·(∇ℓ + δ m)

    ℓ is the mean loss that the closure returns, δ = weight_decay, and lr = ρ: 1 is Newton's
    method, less of it averages Hessians. The step is
    :func:`~blr_analysis.learning_rule.rule.blr_step` as it stands, for the parameters that are not
    frozen, and their rows and columns of S.

        >>> x = torch.tensor([[1.0], [2.0]]).double()
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> optimizer = Newton(model.parameters(), ess=2)
        >>> loss = optimizer.step(lambda: (model(x) - 3 * x).square().mean())
        >>> model.weight.item()
        3.0

    Args:
        params: up to 5000 numbers in one group, on one device and of one dtype.
        lr: ρ, in (0, 1].
        ess: N, the number of training examples.
        weight_decay: δ/N for prior precision δ.
        hess_init: S before the first step is ess·(hess_init + weight_decay) I; forgotten at
            lr = 1.

    Raises:
        InputError: a setting out of range, too many parameters, or a Hessian so that S is not
            positive definite.
        OptimizerError: the closure is missing, or called ``backward`` itself.
    """

    _ranges: ClassVar = {"lr": "(0, 1]"}
    _state_names: Any = ("precision",)
    _hess_is_precision: Any = False

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        ess: float = 1.0,
        weight_decay: float = 0.0,
        hess_init: float = 1.0,
    ) -> None:
        self._set_up(
            ROWS["Newton"],
            params,
            lr=lr,
            ess=ess,
            weight_decay=weight_decay,
            hess_init=hess_init,
            hess_approx="none",
        )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        kinds = {(p.device, p.dtype) for p in group["params"]}
        if len(self.param_groups) > 1 or len(kinds) > 1:
            raise InputError("Newton takes one group of parameters, of one device and dtype")
        if {dtype for _, dtype in kinds} & {*HALF}:
            raise InputError("Newton solves linear systems: make the model float32 or float64")
        count = self._state_shape(group["params"][0])[0]
        if count > MAX_PARAMETERS:
            raise InputError(f"Newton keeps {count:,}² numbers: take OGN or fit_laplace")

    def _state_shape(self, param: Tensor) -> torch.Size:
        count = sum(p.numel() for p in self.param_groups[0]["params"])
        return torch.Size((count, count))

    def _curvature(self, gradient: Tensor, params: list[Tensor]) -> Tensor:
        if not gradient.requires_grad:
            return gradient.new_zeros(len(gradient), len(gradient))
        rows = [gradient_of(entry, params, retain_graph=True) for entry in gradient]
        return torch.stack(rows)

    def _advance(self, params: list[Tensor], gradient: Tensor, curvature: Tensor) -> None:
        (group,) = self.param_groups
        ess = group["ess"]
        decay = group["weight_decay"]
        state = self.state[group["params"][0]]
        mean = _flat(params)
        precision = state.get("precision")
        if precision is None:
            size = sum(p.numel() for p in group["params"])
            precision = ess * (group["hess_init"] + decay) * torch.eye(size).to(gradient)
        is_trained = _flat([torch.full(p.shape, p.requires_grad) for p in group["params"]])
        trained = is_trained.nonzero().squeeze(1).to(mean.device)
        q = FullGaussian(mean, precision[trained[:, None], trained])
        identity = torch.eye(len(mean)).to(mean)
        loss_gradient = q.pull_back(
            ess * (gradient + decay * mean), ess * (curvature + decay * identity)
        )
        new = blr_step(q, loss_gradient, float(group["lr"]))
        means = new.mean.split([p.numel() for p in params])
        for param, part in zip(params, means, strict=True):
            param.copy_(part.view_as(param))
        state["step"] = state.get("step", 0) + 1
        state["precision"] = precision.index_put((trained[:, None], trained), new.precision)


def _flat(tensors: list[Tensor]) -> Tensor:
    """All numbers of the tensors in one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def gradient_of(value: Tensor, params: list[Tensor], **graph: Any) -> Tensor:
    """∇ of a number, ``[P]``; 0 where it does not depend on a parameter.

    ``graph``: ``create_graph`` or ``retain_graph`` of :func:`torch.autograd.grad`.
    """
    gradients = torch.autograd.grad(
        value, params, allow_unused=True, materialize_grads=True, **graph
    )
    return _flat([*gradients])
