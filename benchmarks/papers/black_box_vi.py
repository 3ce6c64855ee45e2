"""Black-box variational inference beside Vadam and the rule: one mean-field Gaussian, four ways.

    python -m benchmarks.papers.black_box_vi [--small]

Khan et al., ICML 2018; Ranganath et al., AISTATS 2014. Bayesian logistic regression, breast cancer
data, all examples and one draw in each step (ten for the rule). Printed is −ELBO above the best.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.papers import train
from blr_analysis.learning_rule import fit
from blr_analysis.learning_rule.families import DiagonalGaussian
from blr_analysis.learning_rule.inference import MeanFieldRegression
from blr_analysis.learning_rule.inference.cvi import expected_log_prob, latent, scalar_likelihood
from blr_analysis.learning_rule.optim import Vadam

DELTA = 1.0
LR = 0.03


def elbo(q: DiagonalGaussian, x: Tensor) -> float:
    """By quadrature, in nats."""
    prior = DiagonalGaussian(torch.zeros_like(q.mean), torch.full_like(q.mean, DELTA))
    ones = torch.ones_like(x[:, 0])
    log_prob = expected_log_prob(scalar_likelihood("bernoulli"), latent(q, x), ones)
    return float(log_prob.sum() - q.kl(prior))


def objective(theta: Tensor, x: Tensor) -> Tensor:
    """−log p(y, θ), up to a constant."""
    return nn.functional.softplus(-x @ theta).sum() + 0.5 * DELTA * theta @ theta


def black_box(x: Tensor, steps: int) -> DiagonalGaussian:
    """Adam on mean and log deviation, by gradients through one draw."""
    mean, log_std = (nn.Parameter(torch.zeros(x.shape[1]).double()) for _ in range(2))

    def loss(_: Tensor) -> Tensor:
        theta = mean + log_std.exp() * torch.randn_like(mean)
        return objective(theta, x) - log_std.sum()

    train(torch.optim.Adam([mean, log_std], lr=LR), loss, len(x), steps, len(x))
    return DiagonalGaussian(mean.detach(), (-2 * log_std.detach()).exp())


def by_optimizer(kind: Any, x: Tensor, steps: int) -> DiagonalGaussian:
    n = len(x)
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    nn.init.zeros_(model.weight)
    settings: dict[str, Any] = {"weight_decay": DELTA / n, "hess_init": 0.01, "beta2": 0.99}
    if kind is blr.VOGN:
        settings["model"] = model
    optimizer = kind(model.parameters(), lr=LR, ess=n, **settings)
    train(optimizer, lambda _: nn.functional.softplus(-model(x)).mean(), n, steps, n)
    precision = n * (optimizer.state[model.weight]["hess"] + DELTA / n)
    return DiagonalGaussian(model.weight.detach()[0], precision[0])


def by_rule(x: Tensor, steps: int) -> DiagonalGaussian:
    zeros = torch.zeros(x.shape[1]).double()
    start = DiagonalGaussian(zeros, zeros + 1)
    loss = partial(objective, x=x)
    return fit(start, loss, samples=10, n_iter=steps, tol=1e9, progress=False).q


def main() -> None:
    steps = (10, 30, 100) if "--small" in sys.argv else (10, 100, 1_000)
    x, y = (torch.tensor(part).double() for part in load_breast_cancer(return_X_y=True))
    x = torch.cat([torch.ones(len(x), 1).double(), (x - x.mean(0)) / x.std(0)], 1)
    zeros = torch.zeros(x.shape[1]).double()
    best = MeanFieldRegression(DiagonalGaussian(zeros, zeros + DELTA), "bernoulli")
    bound = best.fit((x, y), progress=False, tol=1e-3).history[-1]
    x = (2 * y - 1).unsqueeze(1) * x  # p(y|θ) = σ(xᵀθ) of every example
    ways: dict[str, Any] = {
        "black box, Adam": black_box,
        "Vadam": partial(by_optimizer, Vadam),
        "VOGN": partial(by_optimizer, blr.VOGN),
        "the rule by draws": by_rule,
    }
    heads = " | ".join(f"{t} steps" for t in steps)
    print(f"| −ELBO above {-bound:.2f} nats | {heads} |\n|---|{'---|' * len(steps)}")
    for name, run in ways.items():
        gaps = []
        for t in steps:
            torch.manual_seed(0)
            gaps.append(f"{bound - elbo(run(x, steps=t), x):.2f}")
        print(f"| {name} | {' | '.join(gaps)} |", flush=True)


if __name__ == "__main__":
    main()
