"""The training objective Σ_i ℓ_i(θ) + δ/2 ‖θ‖² of a model, as a function of one flat vector.

Written without the package's engine, so that what it is compared with is independent of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian

from benchmarks.truth.cases import Recipe


def flat_parameters(model: nn.Module) -> Tensor:
    """All parameters in the model's own order, ``[P]`` float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def cut(model: nn.Module, theta: Tensor) -> dict[str, Tensor]:
    """A flat vector as the model's parameters by name."""
    own = dict(model.named_parameters())
    parts = theta.split([p.numel() for p in own.values()])
    return {name: part.view_as(p) for (name, p), part in zip(own.items(), parts, strict=True)}


class Objective:
    """Value and gradient of Σ_i ℓ_i + δ/2 ‖θ‖² on inputs x and targets y."""

    def __init__(self, recipe: Recipe, x: Tensor, y: Tensor, chunk: int = 500) -> None:
        self.model = recipe.build()
        self.likelihood = recipe.observed()
        self.delta = recipe.delta
        y = y if recipe.likelihood == "categorical" else y.reshape(len(y), -1)
        self.parts = list(zip(x.split(chunk), y.split(chunk), strict=True))

    def __call__(self, theta: Tensor) -> tuple[float, Tensor]:
        leaf = theta.detach().requires_grad_()
        value = 0.5 * self.delta * float(theta @ theta)
        gradient = self.delta * theta
        for x, y in self.parts:
            loss = self.losses(leaf, x, y).sum()
            (part,) = torch.autograd.grad(loss, leaf)
            value = value + float(loss.detach())
            gradient = gradient + part
        return value, gradient

    def losses(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """ℓ_i of these examples, ``[B]``."""
        return self.likelihood.nll(functional_call(self.model, cut(self.model, theta), (x,)), y)

    def each(self, theta: Tensor) -> Tensor:
        """ℓ_i of all examples, ``[N]``."""
        with torch.no_grad():
            return torch.cat([self.losses(theta, x, y) for x, y in self.parts])

    def hessian(self, theta: Tensor) -> Tensor:
        """The exact Hessian ``[P, P]``; for few parameters."""
        h = self.delta * torch.eye(len(theta), dtype=theta.dtype)
        for x, y in self.parts:
            h = h + hessian(lambda t, x=x, y=y: self.losses(t, x, y).sum())(theta).detach()
        return h
