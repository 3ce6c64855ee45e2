"""The training objective Σ_i ℓ_i(θ) + δ/2 ‖θ‖² of a model, as a function of one flat vector.

Written without the package's engine, so that what it is compared with is independent of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

from blr_analysis.likelihoods import Likelihood

Unflatten = Callable[[Tensor], dict[str, Tensor]]


def flat_parameters(model: nn.Module) -> Tensor:
    """All parameters in the model's own order, ``[P]`` float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def unflattener(model: nn.Module) -> Unflatten:
    """The function that cuts a flat vector into the model's parameters by name."""
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def cut(theta: Tensor) -> dict[str, Tensor]:
        parts = zip(names, theta.split(sizes), shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    return cut


class Objective:
    """Value and gradient of Σ_i ℓ_i + δ/2 ‖θ‖² on inputs x and prepared targets y."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        likelihood: Likelihood,
        delta: float,
        chunk: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model, self.likelihood, self.delta, self.dtype = model, likelihood, delta, dtype
        x = x.to(dtype)
        self.parts = list(zip(x.split(chunk), y.split(chunk), strict=True))
        self.cut = unflattener(model)

    def __call__(self, theta: Tensor) -> tuple[float, Tensor]:
        leaf = theta.detach().to(self.dtype).requires_grad_()
        value, gradient = 0.5 * self.delta * float(theta @ theta), self.delta * theta
        for x, y in self.parts:
            loss = self.losses(leaf, x, y).sum()
            (part,) = torch.autograd.grad(loss, leaf)
            value, gradient = value + float(loss.detach()), gradient + part
        return value, gradient

    def losses(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """ℓ_i of these examples, ``[B]``."""
        return self.likelihood.nll(functional_call(self.model, self.cut(theta), (x,)), y)

    def outputs(self, theta: Tensor) -> Tensor:
        """f_i of all examples, ``[N, C]``."""
        with torch.no_grad():
            params = self.cut(theta)
            return torch.cat([functional_call(self.model, params, (x,)) for x, _ in self.parts])

    def each(self, theta: Tensor) -> Tensor:
        """ℓ_i of all examples, ``[N]``."""
        with torch.no_grad():
            return torch.cat([self.losses(theta, x, y) for x, y in self.parts])

    def diagonal_self_influence(self, theta: Tensor) -> Tensor:
        """Σ_k g_ik² / (Σ_j g_jk² + δ): a cheap score of who matters, ``[N]``."""

        def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return self.losses(theta, x[None], y[None]).sum()

        def squares() -> Iterator[Tensor]:
            for part_x, part_y in self.parts:
                for x, y in zip(part_x.split(100), part_y.split(100), strict=True):
                    yield vmap(grad(loss), (None, 0, 0))(theta, x, y).square()

        precision = torch.full_like(theta, self.delta)
        for square in squares():
            precision += square.sum(0)
        return torch.cat([square @ (1 / precision) for square in squares()])

    def hessian_product(self, theta: Tensor, v: Tensor) -> Tensor:
        """The exact Hessian times a vector, ``[P]``; about two gradient evaluations."""
        leaf, v = theta.detach().to(self.dtype).requires_grad_(), v.to(self.dtype)
        product = self.delta * v
        for x, y in self.parts:
            loss = self.losses(leaf, x, y).sum()
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (part,) = torch.autograd.grad(gradient @ v, leaf)
            product = product + part
        return product.double()

    def hessian(self, theta: Tensor) -> Tensor:
        """The exact Hessian ``[P, P]``; for few parameters."""
        h = self.delta * torch.eye(len(theta), dtype=theta.dtype)
        for x, y in self.parts:
            h = h + hessian(lambda t, x=x, y=y: self.losses(t, x, y).sum())(theta).detach()
        return h
