"""The IVON update of mean and precision, elementwise (Shen et al., ICML 2024, Algorithm 1).

With the mean gradient ĝ over the draws, ρ₁ = 1 − beta1, ρ₂ = 1 − beta2, δ = weight_decay and
s = h + δ:

    ĥ = ess · s · mean(noise · gradient)              "price"  (reparameterisation)
    ĥ = ess · mean(gradient²)                         "gradsq"
    h ← h + ρ₂ (ĥ − h) + ρ₂² (ĥ − h)² / (2 s)         keeps h + δ at s/2 or more
    u ← u + ρ₁ (ĝ − u)
    m ← m − lr · clip( (u / (1 − beta1^t) + δ m) / (h + δ) )
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.learning_rule.optim.blocks import for_blocks, group_by
from blr_analysis.learning_rule.optim.draws import state_dtype
from blr_analysis.learning_rule.optim.gathered import Estimate


def update_group(
    group: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    estimates: Mapping[Tensor, Estimate],
    inverse_scale: float = 1.0,
) -> None:
    """One step for the parameters of ``group`` that have an estimate; the others stay.

    ``inverse_scale`` undoes a loss scale that still multiplies the gradients.
    """
    params = [p for p in group["params"] if p in estimates]
    for param in params:
        state[param]["step"] += 1
    alike = group_by(
        params, lambda p: (p.device, p.dtype, state[p]["step"], estimates[p].curvature is None)
    )
    for batch in alike.values():
        _update(batch, group, state, estimates, inverse_scale)


def _update(
    params: Sequence[Tensor],
    group: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    estimates: Mapping[Tensor, Estimate],
    inverse_scale: float,
) -> None:
    price = group["hess_approx"] == "price"
    ess, decay, clip = group["ess"], group["weight_decay"], group["clip_radius"]
    rho1, rho2 = 1.0 - group["beta1"], 1.0 - group["beta2"]
    debias = 1.0 / (1.0 - group["beta1"] ** state[params[0]]["step"]) if group["debias"] else 1.0
    lr = float(group["lr"])
    if group["rescale_lr"]:
        lr *= group["hess_init"] + decay
    hess_scale = inverse_scale if price else inverse_scale**2

    grads = [estimates[p].grad.detach() for p in params]
    raw = estimates[params[0]].curvature is None
    sources = [_curvature_source(estimates[p], raw) for p in params]
    hesses = [state[p]["hess"] for p in params]
    momenta = [state[p]["momentum"] for p in params]

    def move(
        theta: list[Tensor],
        grad: list[Tensor],
        source: list[Tensor],
        hess: list[Tensor],
        momentum: list[Tensor],
    ) -> None:
        grad = [g.to(h.dtype) for g, h in zip(grad, hess, strict=True)]
        # The gap h − ĥ, with s = h + δ as it was before the step.
        scale = torch._foreach_add(hess, decay)
        if price:
            if raw:
                torch._foreach_mul_(source, grad)
            gap = torch._foreach_addcmul(hess, source, scale, value=-ess * hess_scale)
        elif raw:
            gap = torch._foreach_addcmul(hess, grad, grad, value=-ess * hess_scale)
        else:
            gap = torch._foreach_add(hess, source, alpha=-ess * hess_scale)
        torch._foreach_add_(hess, gap, alpha=-rho2)
        torch._foreach_mul_(gap, gap)
        torch._foreach_addcdiv_(hess, gap, scale, value=0.5 * rho2 * rho2)
        if inverse_scale == 1.0:
            torch._foreach_lerp_(momentum, grad, rho1)
        else:
            torch._foreach_lerp_(momentum, torch._foreach_mul(grad, inverse_scale), rho1)
        # The step; lr and clip radius are multiplied by the debiasing instead of the momentum.
        torch._foreach_copy_(scale, hess)
        torch._foreach_add_(scale, decay)
        direction = torch._foreach_add(momentum, theta, alpha=decay / debias)
        if math.isinf(clip) and theta[0].dtype == hess[0].dtype:
            torch._foreach_addcdiv_(theta, direction, scale, value=-lr * debias)
        else:
            torch._foreach_div_(direction, scale)
            torch._foreach_clamp_min_(direction, -clip / debias)
            torch._foreach_clamp_max_(direction, clip / debias)
            torch._foreach_add_(theta, direction, alpha=-lr * debias)

    for_blocks(move, [params, grads, sources, hesses, momenta])


def _curvature_source(estimate: Estimate, raw: bool) -> Tensor:
    """The mean curvature estimate, or before it is formed its factor: noise, or the gradient."""
    source = estimate.noise if raw else estimate.curvature
    return estimate.grad.detach() if source is None else source


def start_state(param: Tensor, hess_init: float) -> dict[str, Any]:
    """Before the first step: ``hess`` = ``hess_init``, no momentum.

    >>> start_state(torch.zeros(2), 0.5)
    {'step': 0, 'hess': tensor([0.5000, 0.5000]), 'momentum': tensor([0., 0.])}
    """
    dtype = state_dtype(param)
    like: dict[str, Any] = {"dtype": dtype, "memory_format": torch.preserve_format}
    return {
        "step": 0,
        "hess": torch.full_like(param, hess_init, **like),
        "momentum": torch.zeros_like(param, **like),
    }
