"""Seconds of a training step with each optimizer of the rule, against torch's Adam.

    python benchmarks/rule_step.py [--out FILE] [--repeats 30] [--device cuda]

A training step is everything that a loop pays for one minibatch of 128: forward and backward pass,
the draw of the weights where there is one, per-example gradients where they are needed, and the
update. Two models: LeNet-5 on 28 x 28 images, and a multilayer perceptron (784-500-300-10).

VOGN and OGN read per-example gradients from the same forward and backward pass; the row "VOGN,
one backward pass per example" is what they would cost without that, and bSAM takes two gradients.
The contestants take turns, so that a busy machine is busy for all; medians are printed, as ratios
to torch.optim.Adam.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import clock, threads
from torch import Tensor, nn

from blr_analysis.learning_rule.optim import BSAM, IVON, OGN, VOGN, RowOptimizer, Vadam

BATCH = 128
N = 60_000


def lenet() -> nn.Module:
    """61,706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def perceptron() -> nn.Module:
    """545,810 parameters."""
    layers = (nn.Flatten(), nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 300), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(300, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"LeNet-5": lenet, "perceptron": perceptron}

# Name → the optimizer of a model; those with a posterior take their gradients at its draws.
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-4),
    "RowOptimizer, Adam": lambda m: RowOptimizer(m.parameters(), "Adam", lr=1e-4),
    "IVON": lambda m: IVON(m.parameters(), lr=1e-3, ess=N),
    "Vadam": lambda m: Vadam(m.parameters(), lr=1e-4, ess=N, hess_init=1.0),
    "OGN": lambda m: OGN(m.parameters(), lr=1e-4, ess=N, model=m),
    "VOGN": lambda m: VOGN(m.parameters(), lr=1e-4, ess=N, model=m),
    "bSAM": lambda m: BSAM(m.parameters(), lr=1e-4, ess=N),
}


class Contestant:
    """A model with its optimizer, and the seconds of its steps."""

    def __init__(
        self, build: Callable[[], nn.Module], make: Callable[[nn.Module], Any], device: str
    ) -> None:
        torch.manual_seed(0)
        self.model = build().to(device)
        self.optimizer = make(self.model)
        self.seconds: list[float] = []

    def gradients(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()

    def run(self, x: Tensor, y: Tensor) -> None:
        start = clock()
        if hasattr(self.optimizer, "sampled_params"):
            with self.optimizer.sampled_params(train=True):
                self.gradients(x, y)
        else:
            self.gradients(x, y)
        if isinstance(self.optimizer, BSAM):
            with self.optimizer.adversarial_params():
                self.gradients(x, y)
        self.optimizer.step()
        self.seconds.append(clock() - start)


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Seconds of as many backward passes as there are examples."""
    start = clock()
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        torch.autograd.grad(loss, list(model.parameters()))
    return clock() - start


def measure(
    build: Callable[[], nn.Module], repeats: int, device: str, warmup: int = 5
) -> dict[str, float]:
    """Median seconds by name."""
    contestants = {name: Contestant(build, make, device) for name, make in OPTIMIZERS.items()}
    x = torch.randn(BATCH, 1, 28, 28).to(device)
    y = torch.randint(10, (BATCH,)).to(device)
    single: list[float] = []
    for repeat in range(warmup + repeats):
        for contestant in contestants.values():
            contestant.run(x, y)
        if repeat < warmup:
            for contestant in contestants.values():
                contestant.seconds.clear()
        elif len(single) < 5:
            single.append(one_by_one(contestants["torch Adam"].model, x, y))
    found = {name: statistics.median(c.seconds) for name, c in contestants.items()}
    return {**found, "VOGN, one backward pass per example": statistics.median(single)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    threads(1)
    rows = []
    for name, build in MODELS.items():
        seconds = measure(build, given.repeats, given.device)
        count = sum(p.numel() for p in build().parameters())
        print(f"{f'{name}, {count:,} parameters, batch {BATCH}':<48}{'ms':>8}{'ratio':>8}")
        for what, value in seconds.items():
            ratio = value / seconds["torch Adam"]
            print(f"{what:<48}{1e3 * value:>8.1f}{ratio:>8.2f}")
            rows.append({"model": name, "what": what, "seconds": value, "ratio": ratio})
    if given.out is not None:
        given.out.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
