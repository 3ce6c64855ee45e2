"""Linear models retrained exactly, for every subset of the data that is asked about.

The models are ``nn.Linear`` with a bias, the objective Σ_i w_i ℓ_i(Θ) + ½ δ ‖Θ‖² with example
weights w (0: left out), minimised by Newton's method in float64 until the gradient's norm is below
1e-10. All subsets are solved at once, by batched linear algebra: nothing here uses the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # as vmap does, slowly
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = 1e-10
Loss = Callable[[Tensor, Tensor], Tensor]  # ℓ [N], up to a constant, from outputs and targets
LOSSES: dict[str, Loss] = {
    "categorical": lambda f, y: F.cross_entropy(f, y.long(), reduction="none"),
    "gaussian": lambda f, y: (f - y.view_as(f)).square().sum(1) / 2,
    "poisson": lambda f, y: F.poisson_nll_loss(f, y.view_as(f), reduction="none").sum(1),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(
        f, y.double().view_as(f), reduction="none"
    ).sum(1),
}


def with_ones(x: Tensor) -> Tensor:
    """The inputs with a last column of ones, which stands for the bias, ``[N, D]``."""
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)


def retrained(
    loss: str | Loss, x: Tensor, y: Tensor, weights: Tensor, delta: float, outputs: int = 1
) -> Tensor:
    """Θ ``[K, C, D]`` for K weightings of the examples ``[K, N]``; the last column is the bias."""
    z = with_ones(x)
    weights = weights.double()
    n, d = z.shape
    losses = LOSSES[loss] if isinstance(loss, str) else loss
    products = (z.unsqueeze(2) * z.unsqueeze(1)).view(n, d * d)

    def loss_of_one(f: Tensor, y: Tensor) -> Tensor:
        return losses(f[None], y[None])[0]

    losses_of_models = torch.vmap(losses, (0, None))
    slopes = torch.vmap(torch.vmap(torch.func.grad(loss_of_one)), (0, None))
    curvatures = torch.vmap(torch.vmap(torch.func.hessian(loss_of_one)), (0, None))

    def objective(theta: Tensor) -> Tensor:
        data_terms = losses_of_models(torch.einsum("kcd,nd->knc", theta, z), y)
        return (weights * data_terms).sum(1) + delta / 2 * theta.square().sum((1, 2))

    theta = z.new_zeros(len(weights), outputs, d)
    for _ in range(100):
        f = torch.einsum("kcd,nd->knc", theta, z)
        gradient = torch.einsum("kn,knc,nd->kcd", weights, slopes(f, y), z) + delta * theta
        if float(gradient.flatten(1).norm(dim=1).max()) < TOLERANCE:
            return theta
        weighted = weights[:, :, None, None] * curvatures(f, y)
        blocks = weighted.permute(0, 2, 3, 1) @ products
        hessian = blocks.unflatten(3, (d, d)).transpose(2, 3).flatten(3).flatten(1, 2)
        step = downhill_step(hessian + delta * torch.eye(outputs * d), gradient)
        theta = theta - halved_while_rising(objective, theta, step)
    raise AssertionError("Newton did not converge")


def downhill_step(hessian: Tensor, gradient: Tensor) -> Tensor:
    """|H|⁻¹ g for K matrices at once: Newton's step where H is positive, downhill everywhere."""
    values, turn = torch.linalg.eigh(hessian)
    turned = turn.mT @ gradient.reshape(len(hessian), -1, 1)
    return (turn @ (turned / values.abs().unsqueeze(2))).view_as(gradient)


def halved_while_rising(
    objective: Callable[[Tensor], Tensor], theta: Tensor, step: Tensor
) -> Tensor:
    """The step, halved for each model whose objective it would raise by more than rounding."""
    step = step.clone()
    top = objective(theta)
    for _ in range(30):
        rises = objective(theta - step) > top + 1e-12 * top.abs()
        if not bool(rises.any()):
            break
        step[rises] /= 2
    return step


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


def trained(loss: str | Loss, x: Tensor, y: Tensor, delta: float, outputs: int = 1) -> nn.Linear:
    """The model trained to convergence on all examples."""
    return linear(retrained(loss, x, y, torch.ones(1, len(x)), delta, outputs)[0])


def flat(parameters: dict[str, Tensor]) -> Tensor:
    """weight and bias of a linear layer as Θ ``[C, D]``."""
    return torch.cat([parameters["weight"], parameters["bias"][:, None]], dim=1)


def standardised(load: Callable[..., tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """A data set of scikit-learn's, every column with mean 0 and variance 1."""
    x, y = load(return_X_y=True)
    return torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y)
