"""Gradient descent and Vadam from the same start: the nearest well, and the wide one.

    python -m benchmarks.papers.two_wells [--small] [--out DIR]

Khan et al., "Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018:
noise in the weights avoids narrow minima. Printed: where each ends; the wells are at −1 and 2.
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.papers import COLOURS, Numbers, drawn, panels, train
from blr_analysis.learning_rule.optim import Vadam


def wells(t: Tensor) -> Tensor:
    """A narrow well at −1 and a wide one at 2, a little deeper."""
    narrow = (t + 1).square() / 0.045
    wide = (t - 2).square() / 1.6
    return -(-narrow).exp() - 1.2 * (-wide).exp() + 0.02 * t.square()


def draw(small: bool = False) -> tuple[Figure, Numbers]:
    """Gradient descent and Vadam from the same start: the nearest well, and the wide one."""
    figure, (axes,) = panels(1, 4.6, 3.0)
    grid = torch.linspace(-2.2, 4, 400)
    axes.plot(grid, wells(grid), color="0.4")
    numbers = {}
    steps = 700 if small else 2000
    for name, colour, mark in (("gradient descent", COLOURS[1], "s"), ("Vadam", COLOURS[0], "o")):
        torch.manual_seed(0)
        theta = nn.Parameter(torch.tensor([-1.5]))
        optimizer: Any = torch.optim.SGD([theta], lr=0.02)
        if name == "Vadam":
            optimizer = Vadam([theta], lr=0.05, ess=5.0, weight_decay=0.1)
        path = [-1.5]
        for _ in range(steps):
            train(optimizer, lambda i, t=theta: wells(t).sum(), 1, 1, 1)
            path.append(theta.item())
        shown = torch.tensor(path[:: steps // 20])
        axes.plot(shown, wells(shown), mark, color=colour, label=name, fillstyle="none")
        numbers[name] = sum(path[-100:]) / 100
    axes.set(xlabel="θ", ylabel="loss")
    axes.legend(frameon=False, fontsize=8)
    return figure, numbers


if __name__ == "__main__":
    drawn(draw)
