"""Logistic regression with two weights: the exact posterior, VOGN, Vadam and VOGGN.

    python -m benchmarks.papers.posterior_approximation [--small] [--out DIR]

Khan et al., "Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018,
Figure 1; Mishkin et al., "SLANG", NeurIPS 2018. Printed: conditional standard deviations in units
of mean-field's, and the distance of the means.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.papers import COLOURS, Numbers, drawn, panels, train
from blr_analysis.learning_rule.optim import VOGGN, Vadam

BATCHES = {"VOGN, M = 1": 1, "Vadam, M = 10": 10, "VOGGN": 10}
DELTA = 1.0
GRID = 121


def two_classes(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n).double() % 2
    noise = torch.randn(n, 2, generator=generator).double()
    return noise + (y[:, None] - 0.5) * torch.tensor([1.6, 0.8]), y


def exact(x: Tensor, y: Tensor, axes: Any) -> tuple[Tensor, Tensor]:
    """The posterior on a grid, drawn; its mean and the expected curvature of each weight."""
    grid = torch.linspace(-1, 5, GRID).double(), torch.linspace(-2, 4, GRID).double()
    places = torch.cartesian_prod(*grid)
    logits = places @ x.T
    log_p = (y * logits - F.softplus(logits)).sum(1) - 0.5 * DELTA * places.square().sum(1)
    p = (log_p - log_p.logsumexp(0)).exp()
    on = [g.numpy() for g in grid]
    axes.contourf(*on, p.view(GRID, GRID).T.numpy(), 8, cmap="Greys")
    ring = (log_p - log_p.max() + 2).view(GRID, GRID).T.numpy()  # 2σ from the mode
    axes.contour(*on, ring, [0.0], colors="k", linestyles=":")
    axes.plot([], [], "k:", label="exact")
    slopes = logits.sigmoid() * (1 - logits.sigmoid())
    return p @ places, (p @ slopes) @ x.square() + DELTA


def made(name: str, model: nn.Module, n: int) -> Any:
    given: dict[str, Any] = {"ess": n, "weight_decay": DELTA / n}
    if name == "VOGGN":
        smooth = {"hess_init": 0.1, "beta2": 0.99, "damping": 0.0, "rank": 1}
        return VOGGN(model, 0.02, likelihood="bernoulli", **smooth, **given)
    if name == "Vadam, M = 10":
        return Vadam(model.parameters(), lr=0.01, beta2=0.99, **given)
    smooth = {"hess_init": 0.1, "beta2": 0.998}
    return blr.VOGN(model.parameters(), lr=0.01, model=model, **smooth, **given)


def draw(small: bool = False) -> tuple[Figure, Numbers]:
    """Logistic regression with two weights: the exact posterior, VOGN, Vadam and VOGGN."""
    x, y = two_classes()
    n = len(y)
    steps = 700 if small else 6000
    figure, (axes,) = panels(1, 4.2, 3.6)
    mean, curvature = exact(x, y, axes)
    numbers: Numbers = {}
    for colour, (name, batch) in zip(COLOURS, BATCHES.items(), strict=False):
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = made(name, model, n)
        loss = lambda i, m=model: F.binary_cross_entropy_with_logits(m(x[i])[:, 0], y[i])  # noqa: E731
        for share in (1.0, 0.1):  # of the step size
            for group in optimizer.param_groups:
                group["lr"] *= share
            train(optimizer, loss, n, steps // 2, batch, seed=int(share))
        own = name == "VOGGN"
        q = optimizer.posterior() if own else blr.Posterior.from_optimizer(optimizer, model)
        unit = torch.eye(2).double().view(2, 1, 2)
        covariance = q.form.solve({"weight": unit})["weight"].view(2, 2)
        sizes, turn = torch.linalg.eigh(covariance)
        angle = math.degrees(math.atan2(float(turn[1, 1]), float(turn[0, 1])))
        width, height = (4 * float(s) ** 0.5 for s in sizes.flip(0))
        centre = tuple(q.mean["weight"][0].tolist())
        look = {"angle": angle, "fill": False, "color": colour, "lw": 2, "label": name}
        axes.add_patch(Ellipse(centre, width, height, **look))
        axes.plot(*centre, "x", color=colour)
        ratio = (curvature / torch.linalg.inv(covariance).diagonal()).sqrt()
        numbers[name] = float(ratio.log().mean().exp())
        numbers[f"{name}: mean"] = float((q.mean["weight"][0] - mean).norm())
    axes.set(xlim=(-0.5, 3.8), ylim=(-1, 2.5), xlabel="θ₁", ylabel="θ₂")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    return figure, numbers


if __name__ == "__main__":
    drawn(draw)
