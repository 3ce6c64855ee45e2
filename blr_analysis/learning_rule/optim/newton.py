"""Newton's method as a row: a Gaussian with a full covariance, for models of few parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.optim.checkpoint import HINT
from blr_analysis.learning_rule.optim.settings import (
    PART,
    check_closure,
    check_group,
    listed,
    read_group,
    tensors_of,
)
from blr_analysis.learning_rule.rule import blr_step

OWN = ("lr", "ess", "weight_decay", "hess_init")
MOST = 5000
"""Parameters: a Hessian of 5000² numbers takes 200 MB."""


class Newton(torch.optim.Optimizer):
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

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        ess: float = 1.0,
        weight_decay: float = 0.0,
        hess_init: float = 1.0,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name in OWN}
        defaults["algorithm"] = "Newton"
        _check(defaults)
        super().__init__(listed(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group, checked (:class:`InputError`); a second one is refused."""
        group = read_group(param_group, "Newton")
        tensors = tensors_of(group)
        kinds = {(p.device, p.dtype) for p in tensors}
        if self.param_groups or len(kinds) > 1:
            raise InputError("Newton takes one group of parameters, of one device and dtype")
        if {dtype for _, dtype in kinds} & {torch.float16, torch.bfloat16}:
            raise InputError("Newton solves linear systems: make the model float32 or float64")
        if (count := sum(p.numel() for p in tensors)) > MOST:
            raise InputError(f"Newton keeps {count:,}² numbers: take OGN or fit_laplace")
        super().add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move mean and precision; ``closure`` returns the loss, without calling ``backward``."""
        if closure is None:
            raise OptimizerError("Newton needs a closure that returns the loss: step(closure)")
        check_closure(closure)
        (group,) = self.param_groups
        _check(group)
        params = [p for p in group["params"] if p.requires_grad]
        if not params:
            raise OptimizerError("every parameter is frozen: set requires_grad")
        with torch.enable_grad():
            loss = closure()
            _check_loss(loss)
            gradient, hessian = _derivatives(loss, params)
        with torch.no_grad():
            mean = torch.cat([p.reshape(-1) for p in params])
            q = FullGaussian(mean, self._precision(mean, group))
            ess, decay = group["ess"], group["weight_decay"]
            curvature = ess * (hessian + decay * torch.eye(len(mean)).to(mean))
            slope = ess * (gradient + decay * mean)
            pulled = q.pull_back(slope, curvature)
            sizes = [p.numel() for p in params]
            moved = blr_step(q, pulled, float(group["lr"]))
            for param, part in zip(params, moved.mean.split(sizes), strict=True):
                param.copy_(part.view_as(param))
            state = self.state[group["params"][0]]
            state["precision"] = moved.precision
            state["moved"] = [p.requires_grad for p in group["params"]]
            state["step"] = state.get("step", 0) + 1
        return loss.detach()

    def _precision(self, mean: Tensor, group: dict[str, Any]) -> Tensor:
        """S of the parameters that are moved; from the start again when these are others."""
        state = self.state[group["params"][0]]
        if state.get("moved") == [p.requires_grad for p in group["params"]]:
            return state["precision"]
        start = group["ess"] * (group["hess_init"] + group["weight_decay"])
        return start * torch.eye(len(mean)).to(mean)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``.

        Raises:
            OptimizerError: another optimizer's state, or of other parameters; nothing is loaded.
        """
        try:
            (group,) = state_dict["param_groups"]
            name, count = group["algorithm"], len(group["params"])
            (entry,) = state_dict["state"].values() or [{}]
            moved, precision = entry.get("moved", []), entry.get("precision", torch.zeros(0, 0))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise OptimizerError(f"this is no state of Newton; {HINT}") from None
        held = self.param_groups[0]["params"]
        size = sum(p.numel() for p, is_moved in zip(held, moved, strict=False) if is_moved)
        if name != "Newton" or count != len(held) or precision.shape != (size, size):
            raise OptimizerError(
                f"the state of {name} with {count} parameters and a precision of "
                f"{tuple(precision.shape)} does not fit {len(held)} parameters; {HINT}"
            )
        super().load_state_dict(state_dict)


def _check(settings: dict[str, Any]) -> None:
    check_group(settings, "Newton", {"lr": PART}, samples=True)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise OptimizerError(f"the closure must return the loss, one number; got {loss!r}")
    if not loss.isfinite():
        raise OptimizerError(f"the loss is {float(loss)}; parameters and state are as they were")


def _derivatives(loss: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    """∇ℓ ``[P]`` and ∇²ℓ ``[P, P]``, row by row."""
    try:
        grads = torch.autograd.grad(
            loss, params, create_graph=True, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        raise OptimizerError(
            f"the loss cannot be differentiated twice: return it without backward ({error})"
        ) from error
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
