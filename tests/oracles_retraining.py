"""Generalised linear models retrained exactly, for every subset of the data that is asked about.

The models are ``nn.Linear`` with a bias, the objective Σ_i w_i ℓ_i(Θ) + ½ δ ‖Θ‖² with example
weights w (0: left out), minimised by Newton's method in float64 until the gradient's norm is below
1e-10. All subsets are solved at once, by batched linear algebra: nothing here uses the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-10


def with_ones(x: Tensor) -> Tensor:
    """The inputs with a last column of ones, which stands for the bias, ``[N, D]``."""
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)


def residual_and_curvature(kind: str, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """e ``[K, N, C]`` and Λ ``[K, N, C, C]`` for outputs f ``[K, N, C]``, from first principles."""
    if kind == "categorical":
        p = torch.exp(f - f.logsumexp(-1, keepdim=True))
        onehot = (y.unsqueeze(-1) == torch.arange(f.shape[-1])).to(f.dtype)
        return p - onehot, torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    mean, slope = {
        "gaussian": lambda: (f, torch.ones_like(f)),
        "bernoulli": lambda: ((p := 1 / (1 + torch.exp(-f))), p * (1 - p)),
        "poisson": lambda: (torch.exp(f), torch.exp(f)),
    }[kind]()
    return mean - y, torch.diag_embed(slope)


def losses(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """ℓ ``[K, N]``, up to a constant."""
    if kind == "categorical":
        return f.logsumexp(-1) - f.gather(-1, y.expand(len(f), -1).unsqueeze(-1)).squeeze(-1)
    if kind == "gaussian":
        return 0.5 * (f - y).square().sum(-1)
    normaliser = torch.exp(f) if kind == "poisson" else torch.logaddexp(torch.zeros_like(f), f)
    return (normaliser - y * f).sum(-1)


def retrained(
    kind: str, x: Tensor, y: Tensor, weights: Tensor, delta: float, outputs: int = 1
) -> Tensor:
    """Θ ``[K, C, D]`` for K weightings of the examples ``[K, N]``; the last column is the bias."""
    z, weights = with_ones(x), weights.double()
    k, c, d = len(weights), outputs, z.shape[1]
    target = y.long() if kind == "categorical" else y.double().reshape(len(y), c)
    products = (z.unsqueeze(2) * z.unsqueeze(1)).reshape(len(z), d * d)
    theta = torch.zeros(k, c, d, dtype=torch.float64)
    ridge = delta * torch.eye(c * d, dtype=torch.float64)

    def objective(theta: Tensor) -> Tensor:
        each = losses(kind, torch.einsum("kcd,nd->knc", theta, z), target)
        return (weights * each).sum(1) + 0.5 * delta * theta.square().sum((1, 2))

    for _ in range(100):
        f = theta.reshape(k * c, d).matmul(z.T).reshape(k, c, -1).transpose(1, 2)
        e, curvature = residual_and_curvature(kind, f, target)
        gradient = torch.einsum("kn,knc,nd->kcd", weights, e, z) + delta * theta
        if float(gradient.flatten(1).norm(dim=1).max()) < TOLERANCE:
            return theta
        blocks = (weights[:, :, None, None] * curvature).permute(0, 2, 3, 1).reshape(-1, len(z))
        hessian = (blocks @ products).reshape(k, c, c, d, d).permute(0, 1, 3, 2, 4)
        step = torch.linalg.solve(hessian.reshape(k, c * d, c * d) + ridge, gradient.flatten(1))
        step = step.reshape(k, c, d)
        top = objective(theta)
        for _ in range(30):  # halved where it would raise the objective, beyond rounding
            rises = objective(theta - step) > top + 1e-12 * top.abs()
            if not bool(rises.any()):
                break
            step[rises] /= 2
        theta = theta - step
    raise AssertionError("Newton did not converge")


def leave_one_out_weights(n: int) -> Tensor:
    """One row per example: everything but that example, ``[N, N]``."""
    return 1 - torch.eye(n, dtype=torch.float64)


def without(n: int, *groups: Tensor | list[int]) -> Tensor:
    """One row per group: everything but the group, ``[K, N]``."""
    weights = torch.ones(len(groups), n, dtype=torch.float64)
    for row, group in zip(weights, groups, strict=True):
        row[group] = 0
    return weights


def linear(theta: Tensor) -> nn.Linear:
    """Θ ``[C, D]`` as an ``nn.Linear`` in float64."""
    layer = nn.Linear(theta.shape[1] - 1, theta.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(theta[:, :-1])
        layer.bias.copy_(theta[:, -1])
    return layer


def trained(kind: str, x: Tensor, y: Tensor, delta: float, outputs: int = 1) -> nn.Linear:
    """The model trained to convergence on all examples."""
    return linear(retrained(kind, x, y, torch.ones(1, len(x)), delta, outputs)[0])


def flat(parameters: dict[str, Tensor]) -> Tensor:
    """weight and bias of a linear layer as Θ ``[C, D]``."""
    return torch.cat([parameters["weight"], parameters["bias"][:, None]], dim=1)


def standardised(load: Callable[..., tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """A data set of scikit-learn's, every column with mean 0 and variance 1."""
    x, y = load(return_X_y=True)
    return torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y)
