"""Theorem 1: E[ĝ²] = w h + (1 − w) g², w = (N − M) / (M (N − 1)), of minibatches of M examples.

    python -m benchmarks.papers.theorem_1 [--small] [--out DIR]

Khan et al., "Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018.
Beside it the deviations that Vadam's ĝ² gives, in units of Gauss–Newton's.
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from benchmarks.papers import COLOURS, Numbers, drawn, panels
from benchmarks.papers.posterior_approximation import two_classes


def draw(small: bool = False) -> tuple[Figure, Numbers]:
    """Theorem 1: E[ĝ²] = w h + (1 − w) g², w = (N − M) / (M (N − 1)); and Vadam's deviations."""
    x, y = two_classes()
    n = len(y)
    theta = torch.tensor([1.0, -0.5]).double()
    each = (x @ theta).sigmoid().sub(y)[:, None] * x
    g2 = each.mean(0).square()
    h = each.square().mean(0)
    sizes = torch.tensor([1, 2, 4, 8, 16, 32, n])
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(4000 if small else 40_000, n, generator=generator).argsort(1)
    seen = torch.stack([each[order[:, :m]].mean(1).square().mean(0) for m in sizes])
    w = ((n - sizes) / (sizes * (n - 1)))[:, None]
    wanted = w * h + (1 - w) * g2
    figure, (left, right) = panels(2)
    for j, colour in enumerate(COLOURS[:2]):
        left.plot(sizes, wanted[:, j], color=colour, label=f"Theorem 1, θ{'₁₂'[j]}")
        left.plot(sizes, seen[:, j], "o", color=colour, fillstyle="none", label="drawn")
        left.axhline(float(h[j]), color=colour, ls=":", lw=1)
    left.set(xscale="log", yscale="log", xlabel="M", ylabel="E[ĝ²]; dotted: Gauss–Newton")
    left.legend(frameon=False, fontsize=7)
    ratio = (n * wanted + 1).rsqrt() / (n * h + 1).rsqrt()
    right.plot(sizes, ratio[:, 0], "o-", color=COLOURS[0], label="θ₁")
    right.plot(sizes, ratio[:, 1], "s--", color=COLOURS[1], label="θ₂")
    right.set(xscale="log", xlabel="M", ylabel="σ by ĝ² / σ by Gauss–Newton")
    right.legend(frameon=False, fontsize=8)
    error = float((seen / wanted - 1).abs().max())
    return figure, {"error": error, "ratio at N": float(ratio[-1].mean())}


if __name__ == "__main__":
    drawn(draw)
