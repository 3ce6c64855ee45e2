"""Figures of the papers and talks on the Bayesian learning rule, drawn with this package.

    python -m benchmarks.figures NAME [NAME ...] --out DIR      # NAME of FIGURES, or "all"; --small

Each function draws one figure and returns it with the numbers that it shows. "small" is the size of
the gallery in the docs and of the tests.
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InitialPrecisionWarning
from blr_analysis.learning_rule.optim import VOGGN, Mixture, Vadam

RESULTS = Path(__file__).parent / "results"
Numbers = dict[str, float]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def panels(count: int, width: float = 3.6, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def train(
    optimizer: Any, loss: Callable[[Tensor], Tensor], n: int, steps: int, batch: int, seed: int = 0
) -> None:
    """Minibatches without replacement; ``loss`` takes their indices."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randperm(n, generator=draw)[:batch]

        def closure(chosen: Tensor = chosen) -> Tensor:
            optimizer.zero_grad()
            value = loss(chosen)
            value.backward()
            return value

        optimizer.step(closure)


def learned(optimizer: Any, model: nn.Module) -> blr.Posterior:
    """The posterior, early in training as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InitialPrecisionWarning)
        return blr.Posterior.from_optimizer(optimizer, model)


# Two weights ---------------------------------------------------------------------------------


def two_classes(n: int = 60) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(n).double() % 2
    x = torch.randn(n, 2, generator=draw).double() + (y[:, None] - 0.5) * torch.tensor([1.6, 0.8])
    return x, y


def posterior_quality(small: bool = False) -> tuple[Figure, Numbers]:
    """Logistic regression with two weights: the exact posterior, VOGN, Vadam and VOGGN."""
    (x, y), delta = two_classes(), 1.0
    n, steps = len(y), 700 if small else 6000
    grid = torch.linspace(-1, 5, 121).double(), torch.linspace(-2, 4, 121).double()
    places = torch.cartesian_prod(*grid)
    logits = places @ x.T
    log_p = (y * logits - F.softplus(logits)).sum(1) - 0.5 * delta * places.square().sum(1)
    p = (log_p - log_p.logsumexp(0)).exp()
    mean = p @ places
    curvature = (p @ (logits.sigmoid() * (1 - logits.sigmoid()))) @ x.square() + delta
    figure, (axes,) = panels(1, 4.2, 3.6)
    axes.contourf(*(g.numpy() for g in grid), p.view(121, 121).T.numpy(), 8, cmap="Greys")
    ring = (log_p - log_p.max() + 2).view(121, 121).T.numpy()  # 2σ from the mode
    axes.contour(*(g.numpy() for g in grid), ring, [0.0], colors="k", linestyles=":")
    axes.plot([], [], "k:", label="exact")
    numbers: Numbers = {}
    for colour, (name, batch) in zip(
        COLOURS, {"VOGN, M = 1": 1, "Vadam, M = 10": 10, "VOGGN": 10}.items(), strict=False
    ):
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        given: dict[str, Any] = {"ess": n, "weight_decay": delta / n}
        if name == "VOGGN":
            smooth = {"hess_init": 0.1, "beta2": 0.99, "damping": 0.0, "rank": 1}
            optimizer: Any = VOGGN(model, 0.02, likelihood="bernoulli", **smooth, **given)
        elif name == "Vadam, M = 10":
            optimizer = Vadam(model.parameters(), lr=0.01, beta2=0.99, **given)
        else:
            smooth = {"hess_init": 0.1, "beta2": 0.998}
            optimizer = blr.VOGN(model.parameters(), lr=0.01, model=model, **smooth, **given)
        for share in (1.0, 0.1):  # of the step size
            for group in optimizer.param_groups:
                group["lr"] *= share
            train(
                optimizer,
                lambda i, m=model: F.binary_cross_entropy_with_logits(m(x[i])[:, 0], y[i]),
                n, steps // 2, batch, seed=int(share),
            )  # fmt: skip
        if name == "VOGGN":
            q = optimizer.posterior()
        else:
            q = blr.Posterior.from_optimizer(optimizer, model)
        axis = torch.eye(2).double().view(2, 1, 2)
        covariance = q.form.solve({"weight": axis})["weight"].view(2, 2)
        sizes, turn = torch.linalg.eigh(covariance)
        angle = math.degrees(math.atan2(float(turn[1, 1]), float(turn[0, 1])))
        width, height = (4 * float(s) ** 0.5 for s in sizes.flip(0))
        centre = tuple(q.mean["weight"][0].tolist())
        axes.add_patch(
            Ellipse(centre, width, height, angle=angle, fill=False, color=colour, lw=2, label=name)
        )
        axes.plot(*centre, "x", color=colour)
        diagonal = 1 / torch.linalg.inv(covariance).diagonal()
        ratio = (diagonal * curvature).sqrt()  # of conditional deviations to mean-field's
        numbers[name] = float(ratio.log().mean().exp())
        numbers[f"{name}: mean"] = float((q.mean["weight"][0] - mean).norm())
    axes.set(xlim=(-0.5, 3.8), ylim=(-1, 2.5), xlabel="θ₁", ylabel="θ₂")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    return figure, numbers


def minibatch_variance(small: bool = False) -> tuple[Figure, Numbers]:
    """Theorem 1: E[ĝ²] = w h + (1 − w) g², w = (N − M) / (M (N − 1)); and Vadam's deviations."""
    x, y = two_classes()
    n, theta = len(y), torch.tensor([1.0, -0.5]).double()
    each = (x @ theta).sigmoid().sub(y)[:, None] * x
    g2, h = each.mean(0).square(), each.square().mean(0)
    sizes = torch.tensor([1, 2, 4, 8, 16, 32, n])
    draws = 4000 if small else 40_000
    draw = torch.Generator().manual_seed(0)
    order = torch.rand(draws, n, generator=draw).argsort(1)
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
    exact = (n * h + 1).rsqrt()
    vadam = (n * wanted + 1).rsqrt()
    right.plot(sizes, (vadam / exact)[:, 0], "o-", color=COLOURS[0], label="θ₁")
    right.plot(sizes, (vadam / exact)[:, 1], "s--", color=COLOURS[1], label="θ₂")
    right.set(xscale="log", xlabel="M", ylabel="σ by ĝ² / σ by Gauss–Newton")
    right.legend(frameon=False, fontsize=8)
    error = float((seen / wanted - 1).abs().max())
    return figure, {"error": error, "ratio at N": float((vadam / exact)[-1].mean())}


# Networks ------------------------------------------------------------------------------------


class BlackBox(torch.optim.Adam):
    """Black-box VI: Adam for mean and log deviation of a diagonal Gaussian, reparameterised."""

    def __init__(self, model: nn.Module, lr: float, ess: float, delta: float) -> None:
        self.weights = list(model.parameters())
        self.mean = [p.detach().clone().requires_grad_() for p in self.weights]
        self.log_sd = [torch.full_like(p, -3.0).requires_grad_() for p in self.weights]
        self.n, self.delta = ess, delta
        super().__init__([*self.mean, *self.log_sd], lr=lr)

    def step(self, closure: Any = None) -> Any:
        noise = [torch.randn_like(m) for m in self.mean]
        self.show(noise)
        loss = closure()
        for p, m, s, e in zip(self.weights, self.mean, self.log_sd, noise, strict=True):
            assert p.grad is not None
            sd = s.detach().exp()
            m.grad = p.grad + self.delta * m.detach() / self.n
            s.grad = p.grad * e * sd + (self.delta * sd**2 - 1) / self.n
        super().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.weights:
            p.grad = None

    @property
    def moments(self) -> list[tuple[Tensor, Tensor]]:
        return [*zip(self.mean, self.log_sd, strict=True)]

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        self.show([torch.randn_like(m) for m in self.mean])
        yield

    @torch.no_grad()
    def show(self, noise: list[Tensor]) -> None:
        for p, m, s, e in zip(self.weights, self.mean, self.log_sd, noise, strict=True):
            p.copy_(m + s.exp() * e)


def curve(
    kind: str, model: nn.Module, data: list[Tensor], nll: Callable[[Tensor, Tensor], Tensor],
    epochs: int, batch: int, lr: float, delta: float,
) -> list[tuple[float, float]]:  # fmt: skip
    """−ELBO per example, and the test NLL of ten draws averaged, after each epoch."""
    x, y, x_test, y_test = data
    n, given = len(x), {"ess": float(len(x)), "weight_decay": delta / len(x)}
    torch.manual_seed(0)
    if kind == "black-box VI":
        optimizer: Any = BlackBox(model, lr, n, delta)
    elif kind == "Vadam":
        optimizer = Vadam(model.parameters(), lr=lr, **given)
    else:
        optimizer = blr.VOGN(
            model.parameters(), lr=lr, model=model, hess_init=0.01, beta2=0.98, **given
        )
    found = []
    for epoch in range(epochs):
        train(optimizer, lambda i: nll(model(x[i]), y[i]).mean(), n, n // batch, batch, epoch)
        seen, log_p = [], []
        with torch.no_grad():
            if isinstance(optimizer, BlackBox):
                moments = [(m.detach(), (2 * s).exp()) for m, s in optimizer.moments]
            else:
                q = learned(optimizer, model)
                moments = [(m, q.variance(name)) for name, m in q.mean.items()]
            for _ in range(10):
                with optimizer.sampled_params():
                    seen.append(nll(model(x), y).mean())
                    log_p.append(-nll(model(x_test), y_test))
        kl = sum(float((delta * (v + m**2) - 1 - (delta * v).log()).sum()) / 2 for m, v in moments)
        test = -float((torch.stack(log_p).logsumexp(0) - math.log(10)).mean())
        found.append((float(torch.stack(seen).mean()) + kl / n, test))
    return found


def standardised(x: Any, y: Any) -> list[Tensor]:
    x, y = torch.tensor(x).float(), torch.tensor(y).float()
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    first, last = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]
    return [x[first], y[first], x[last], y[last]]


def beside(kinds: dict[str, Callable[[], list[tuple[float, float]]]]) -> tuple[Figure, Numbers]:
    figure, axes = panels(2)
    numbers = {}
    for (name, run), colour, line in zip(kinds.items(), COLOURS, ("-", "--", ":"), strict=False):
        values = torch.tensor(run())
        for a, column in zip(axes, values.T, strict=True):
            a.plot(range(1, len(column) + 1), column, line, color=colour, label=name, lw=2)
        numbers[f"{name}: −ELBO"], numbers[f"{name}: test NLL"] = values[-1].tolist()
        numbers[f"{name}: −ELBO over all epochs"] = float(values[:, 0].mean())
    for a, title in zip(axes, ("−ELBO per example", "test NLL, ten draws averaged"), strict=True):
        a.set(xlabel="epochs", ylabel=title)
    axes[0].set_ylim(0)
    axes[0].legend(frameon=False, fontsize=8)
    return figure, numbers


def against_black_box(small: bool = False) -> tuple[Figure, Numbers]:
    """Vadam against black-box VI: 50 ReLU units on diabetes' progression, the noise known."""
    x, y = load_diabetes(return_X_y=True)
    data, variance = standardised(x, (y - y.mean()) / y.std()), 0.5

    def nll(f: Tensor, t: Tensor) -> Tensor:
        return 0.5 * ((f[:, 0] - t).square() / variance + math.log(2 * math.pi * variance))

    def run(kind: str) -> list[tuple[float, float]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))
        return curve(kind, model, data, nll, 12 if small else 60, 32, 0.01, 5.0)

    return beside({kind: lambda kind=kind: run(kind) for kind in ("Vadam", "black-box VI")})


def fast_gauss_newton(small: bool = False) -> tuple[Figure, Numbers]:
    """VOGN (Gauss–Newton) against Vadam and black-box VI: 50 tanh units on breast cancer."""
    data = standardised(*load_breast_cancer(return_X_y=True))

    def nll(f: Tensor, t: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(f[:, 0], t, reduction="none")

    def run(kind: str) -> list[tuple[float, float]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 1))
        return curve(kind, model, data, nll, 6 if small else 20, 16, 0.01, 1.0)

    kinds = ("VOGN", "Vadam", "black-box VI")
    return beside({kind: lambda kind=kind: run(kind) for kind in kinds})


# Losses and pictures -------------------------------------------------------------------------


def wells(t: Tensor) -> Tensor:
    """A narrow well at −1 and a wide one at 2, a little deeper."""
    narrow, wide = (t + 1).square() / 0.045, (t - 2).square() / 1.6
    return -(-narrow).exp() - 1.2 * (-wide).exp() + 0.02 * t.square()


def two_wells(small: bool = False) -> tuple[Figure, Numbers]:
    """Gradient descent and Vadam from the same start: the nearest well, and the wide one."""
    figure, (axes,) = panels(1, 4.6, 3.0)
    grid = torch.linspace(-2.2, 4, 400)
    axes.plot(grid, wells(grid), color="0.4")
    numbers, steps = {}, 700 if small else 2000
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


class UNet(nn.Module):
    """Two levels down and up with skips, eight channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU())

        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 2 * width)
        self.up = nn.ModuleList([block(4 * width, width), block(2 * width, width)])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            kept.append(layer(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.bottom(x)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.out(x)


def shapes(n: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy images ``[n, 1, 32, 32]`` of a disc and a square, and where they are."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(*2 * [torch.arange(size).float()], indexing="ij")
    y, x, radius = (torch.rand(3, n, 2, 1, 1, generator=draw) * 20 + 6).unbind()
    radius = radius / 5 + 2
    across, down = (rows - y).abs(), (columns - x).abs()
    disc = (across.square() + down.square() < radius.square())[:, 0]
    square = (torch.maximum(across, down) < radius)[:, 1]
    mask = (disc | square).float().unsqueeze(1)
    noise = torch.randn(n, 1, size, size, generator=draw)
    return F.avg_pool2d(mask, 3, 1, 1) + 0.4 * noise, mask


def segmentation(small: bool = False) -> tuple[Figure, Numbers]:
    """A U-Net on drawn shapes by IVON: the mean of 16 draws, and how unsure they are."""
    n, steps = 100, 150 if small else 800
    (x, mask), (x_test, truth) = shapes(n, 0), shapes(20, 1)
    torch.manual_seed(0)
    model = UNet()
    optimizer = blr.IVON(
        model.parameters(), lr=0.3, ess=n * 32, weight_decay=1e-4, steps=steps, hess_init=0.1
    )
    train(
        optimizer, lambda i: F.binary_cross_entropy_with_logits(model(x[i]), mask[i]), n, steps, 10
    )
    with torch.no_grad():
        draws = []
        for _ in range(16):
            with optimizer.sampled_params():
                draws.append(model(x_test).sigmoid())
    p = torch.stack(draws).mean(0)
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
    near = F.max_pool2d(truth, 3, 1, 1) != -F.max_pool2d(-truth, 3, 1, 1)
    wrong = (p > 0.5) != (truth > 0.5)
    figure, axes = panels(4, 2.2, 2.4)
    titles = ("image", "truth", "mean of draws", "entropy")
    for a, picture, title in zip(axes, (x_test, truth, p, entropy), titles, strict=True):
        a.imshow(picture[2, 0], cmap="viridis" if title == "entropy" else "gray")
        a.set(title=title, xticks=[], yticks=[])
    return figure, {
        "entropy at borders": float(entropy[near].mean()),
        "entropy elsewhere": float(entropy[~near].mean()),
        "entropy where wrong": float(entropy[wrong].mean()),
        "share wrong": float(wrong.float().mean()),
    }


def evolving(small: bool = False) -> tuple[Figure, Numbers]:
    """Memory maps and sensitivities of 400 digits, some labels false, while IVON trains."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, y = images[:400].float() / 16, labels[:400].clone()
    false = torch.arange(400) % 20 == 0
    y[false] = (y[false] + 3) % 10
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16 if small else 32), nn.Tanh(), nn.LazyLinear(10))
    model(x[:2])
    looks, done = (20, 60, 240) if small else (40, 200, 1000), 0
    optimizer = blr.IVON(model.parameters(), lr=0.2, ess=400, weight_decay=3 / 400, steps=looks[-1])
    task = blr.Task(model, (x, y))
    figure, axes = panels(3, 3.0, 2.8)
    numbers = {}
    for a, steps in zip(axes, looks, strict=True):
        train(optimizer, lambda i: F.cross_entropy(model(x[i]), y[i]), 400, steps - done, 40, steps)
        done = steps
        scores = blr.sensitivity(task, learned(optimizer, model))
        found = blr.memory_map(scores)
        error, variance = found.error, found.variance
        for group, mark, colour in ((~false, "o", COLOURS[0]), (false, "x", COLOURS[1])):
            a.plot(variance[group], error[group], mark, color=colour, ms=3, alpha=0.7)
        a.set(title=f"{steps} steps", xlabel="prediction variance", ylim=(0, 1.5))
        deviation = scores.deviation
        ratio = deviation[false].mean() / deviation[~false].mean()
        numbers[f"false / true after {steps}"] = float(ratio)
    axes[0].set(ylabel="prediction error (×: false labels)")
    return figure, numbers


def gap(small: bool = False) -> tuple[Figure, Numbers]:
    """Regression with a gap in the data: Hamiltonian Monte Carlo, one IVON, a mixture of three."""
    draw = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(20, generator=draw) - 1.6, torch.rand(20, generator=draw) + 0.6])
    x, n, noise, delta = x[:, None], 40, 0.1, 1.0
    y = torch.sin(3 * x) + noise * torch.randn(n, 1, generator=draw)
    grid = torch.linspace(-2, 2, 81)[:, None]
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)) for _ in range(3)]
    for model in models:
        for p in model.parameters():
            nn.init.normal_(p, std=0.7)

    def nll(model: nn.Module) -> Tensor:
        return 0.5 * (model(x) - y).square().mean() / noise**2

    ways = {"HMC": hmc(copy.deepcopy(models[0]), nll, n, delta, 100 if small else 1500, grid)}
    steps = 400 if small else 6000
    given: dict[str, Any] = {"lr": 0.05, "ess": n, "weight_decay": delta / n, "hess_init": 1.0}
    for name, members in (("one IVON", models[:1]), ("mixture of 3 IVONs", models)):
        nets = copy.deepcopy(members)
        optimizers = [blr.IVON(m.parameters(), steps=steps, **given) for m in nets]
        mixture = Mixture(optimizers) if len(nets) > 1 else None
        for _ in range(steps):
            for k, (model, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss = nll(model)
                    (loss + mixture.overlap(k) if mixture else loss).backward()
                optimizer.step()
        drawn = []
        with torch.no_grad():
            for model, optimizer in zip(nets, optimizers, strict=True):
                for _ in range(100 // len(nets)):
                    with optimizer.sampled_params():
                        drawn.append(model(grid)[:, 0])
        ways[name] = torch.stack(drawn)
    figure, axes = panels(3, 3.0, 2.6)
    numbers, inside = {}, grid[:, 0].abs() < 0.4
    for a, (name, drawn), colour in zip(axes, ways.items(), COLOURS, strict=False):
        mean, sd = drawn.mean(0), drawn.std(0)
        a.fill_between(grid[:, 0], mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.3)
        a.plot(grid, mean, color=colour)
        a.plot(x, y, ".", color="0.2", ms=3)
        a.set(title=name, xlabel="x", ylim=(-3, 3))
        numbers[f"{name}: gap"] = float(sd[inside].mean())
        numbers[f"{name}: data"] = float(sd[(grid[:, 0].abs() - 1.1).abs() < 0.4].mean())
    return figure, numbers


def hmc(
    model: nn.Module,
    nll: Callable[[nn.Module], Tensor],
    n: int,
    delta: float,
    draws: int,
    at: Tensor,
) -> Tensor:
    """f(at) of every draw ``[draws, len(at)]``, of 10 to 30 leapfrog steps of an adapted size."""
    params, draw = list(model.parameters()), torch.Generator().manual_seed(0)

    def energy() -> tuple[Tensor, list[Tensor]]:
        prior = sum(0.5 * delta * p.square().sum() for p in params)
        value = n * nll(model) + prior
        return value.detach(), list(torch.autograd.grad(value, params))

    size, kept, burn = 0.003, [], draws // 2
    value, slope = energy()
    for t in range(draws + burn):
        before = [p.detach().clone() for p in params]
        speed = [torch.randn(p.shape, generator=draw) for p in params]
        start = value + sum(0.5 * v.square().sum() for v in speed)
        now, now_slope = value, slope
        for _ in range(int(torch.randint(10, 31, (), generator=draw))):
            with torch.no_grad():
                for p, v, s in zip(params, speed, now_slope, strict=True):
                    v.sub_(s, alpha=size / 2)
                    p.add_(v, alpha=size)
            now, now_slope = energy()
            for v, s in zip(speed, now_slope, strict=True):
                v.sub_(s, alpha=size / 2)
        chance = float(
            (start - now - sum(0.5 * v.square().sum() for v in speed)).clamp(max=0).exp()
        )
        if torch.rand((), generator=draw) < chance:
            value, slope = now, now_slope
        else:
            with torch.no_grad():
                for p, old in zip(params, before, strict=True):
                    p.copy_(old)
        if t < burn:  # towards four fifths accepted
            size *= math.exp(0.2 * (chance - 0.8))
        else:
            with torch.no_grad():
                kept.append(model(at)[:, 0])
    return torch.stack(kept)


def exploration(small: bool = False) -> tuple[Figure, Numbers]:
    """Noise in the parameters as exploration: returns of ten seeds, means and 95 % intervals."""
    found = pd.read_csv(RESULTS / "exploration_curves.csv")
    tasks = list(dict.fromkeys(found["task"]))
    figure, axes = panels(len(tasks), 4.2)
    numbers = {}
    for a, task in zip(axes, tasks, strict=True):
        kinds = found[found["task"] == task].groupby("kind", sort=False)
        for colour, line, (kind, part) in zip(COLOURS, ("-", "--", ":", "-."), kinds, strict=True):
            steps = part.groupby("step")["return"]
            mean, half = steps.mean(), 2.262 * steps.sem()  # Student's, ten seeds
            a.plot(mean.index, mean, line, color=colour, label=kind)
            a.fill_between(mean.index, mean - half, mean + half, color=colour, alpha=0.2)
            numbers[f"{task}: {kind}"] = float(mean.mean())
        a.set(title=task, xlabel="steps")
    axes[0].set(ylabel="return at the mean")
    axes[0].legend(frameon=False, fontsize=7)
    return figure, numbers


FIGURES: dict[str, Callable[[bool], tuple[Figure, Numbers]]] = {
    f.__name__: f
    for f in (
        posterior_quality, minibatch_variance, against_black_box, fast_gauss_newton, two_wells,
        segmentation, evolving, gap, exploration,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*FIGURES, "all"], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in FIGURES if "all" in args.names else args.names:
        figure, numbers = FIGURES[name](args.small)
        figure.savefig(args.out / f"{name}.png", dpi=100)
        print(name, {key: float(np.round(value, 4)) for key, value in numbers.items()}, flush=True)


if __name__ == "__main__":
    main()
