"""Newton's method as a row: a Gaussian with a full covariance, for models of few parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.half import HALF
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.optim.base import RuleOptimizer
from blr_analysis.learning_rule.optim.draws import Group
from blr_analysis.learning_rule.rule import blr_step

MOST = 5000
"""Parameters: a Hessian of 5000² numbers takes 200 MB."""


class Newton(RuleOptimizer):
    r"""The rule for q(θ) = N(m, S⁻¹) with the exact Hessian at the mean (Khan & Rue, 1.3.2).

        S ← (1 − lr) S + lr · ess·(∇²ℓ + δ I),      m ← m − lr · S⁻¹ ess·(∇ℓ + δ m)

    ℓ is the mean loss that the closure returns, δ = weight_decay, and lr = ρ: 1 is Newton's
    method, less of it averages Hessians. The step is
    :func:`~blr_analysis.learning_rule.rule.blr_step` as it stands.

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
    _kept = ("precision", "moved")
    _own_scale = False

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        ess: float = 1.0,
        weight_decay: float = 0.0,
        hess_init: float = 1.0,
    ) -> None:
        self._set_up(
            "Newton", params, lr=lr, ess=ess, weight_decay=weight_decay, hess_init=hess_init
        )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        kinds = {(p.device, p.dtype) for p in group["params"]}
        if len(self.param_groups) > 1 or len(kinds) > 1:
            raise InputError("Newton takes one group of parameters, of one device and dtype")
        if {dtype for _, dtype in kinds} & {*HALF}:
            raise InputError("Newton solves linear systems: make the model float32 or float64")
        if (count := sum(p.numel() for p in group["params"])) > MOST:
            raise InputError(f"Newton keeps {count:,}² numbers: take OGN or fit_laplace")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move mean and precision; ``closure`` returns the loss, without calling ``backward``."""
        if closure is None:
            raise OptimizerError("Newton needs a closure that returns the loss: step(closure)")
        return super().step(closure)

    def _losses(self, closure: Callable[[], Any]) -> list[Any]:
        self._check_groups()
        params = self._params()
        with torch.enable_grad():
            loss = closure()
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.isfinite():
                raise OptimizerError(f"the closure must return the loss, finite; got {loss!r}")
            self._slopes = _derivatives(loss, params)
        return [loss.detach()]

    def _check_draws(self) -> None:
        """The closure was one look at the mean."""

    def _settled(self) -> float:
        return 1.0

    def _params(self) -> list[Tensor]:
        params = [p for p in self.param_groups[0]["params"] if p.requires_grad]
        if not params:
            raise OptimizerError("every parameter is frozen: set requires_grad")
        return params

    def _update(self, inverse_scale: float) -> None:
        (group,), params = self.param_groups, self._params()
        (gradient, hessian), state = self._slopes, self.state[group["params"][0]]
        mean = torch.cat([p.reshape(-1) for p in params])
        eye = torch.eye(len(mean)).to(mean)
        ess, decay = group["ess"], group["weight_decay"]
        moved = [p.requires_grad for p in group["params"]]
        precision = ess * (group["hess_init"] + decay) * eye
        if state.get("moved") == moved:  # else from the start again
            precision = state["precision"]
        q = FullGaussian(mean, precision)
        pulled = q.pull_back(ess * (gradient + decay * mean), ess * (hessian + decay * eye))
        new = blr_step(q, pulled, float(group["lr"]))
        for param, part in zip(params, new.mean.split([p.numel() for p in params]), strict=True):
            param.copy_(part.view_as(param))
        state.update(step=state.get("step", 0) + 1, precision=new.precision, moved=moved)

    def _what_differs(self, state_dict: Mapping[str, Any]) -> str | None:
        held = self.param_groups[0]["params"]
        for entry in state_dict["state"].values():
            moved, found = entry.get("moved", []), getattr(entry.get("precision"), "shape", None)
            size = sum(p.numel() for p, is_moved in zip(held, moved, strict=False) if is_moved)
            if found != (size, size) and state_dict["param_groups"][0].get("algorithm") == "Newton":
                return f"a precision of {found} does not fit {size} numbers"
        return super()._what_differs({**state_dict, "state": {}})


def _derivatives(loss: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    """∇ℓ ``[P]`` and ∇²ℓ ``[P, P]``, row by row."""
    try:
        grads = torch.autograd.grad(
            loss, params, create_graph=True, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        raise OptimizerError("return the loss, without backward") from error
    flat = torch.cat([g.reshape(-1) for g in grads])
    rows = []
    for entry in flat:
        if entry.requires_grad:
            second = torch.autograd.grad(
                entry, params, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.reshape(-1) for g in second]))
        else:
            rows.append(torch.zeros_like(flat))
    return flat.detach(), torch.stack(rows).detach()
