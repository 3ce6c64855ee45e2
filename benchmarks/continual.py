"""Split digits, one pair of classes after the other: adapt() beside EWC, going on, and all data.

Odd or even, from 0/1 to 8/9, by one network 64-32-2; accuracy on the test images of all five pairs
after the last, the mean of two seeds: python benchmarks/continual.py
"""

from __future__ import annotations

import copy
import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.sensitivity import adapt

DELTA, PAIRS = 1.0, 5
Data = tuple[Tensor, Tensor]


def pairs() -> tuple[list[Data], Data]:
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, y = images.float() / 16, labels % 2
    train = torch.arange(len(x)) % 3 != 0
    chosen = [train & (labels // 2 == k) for k in range(PAIRS)]
    return [(x[c], y[c]) for c in chosen], (x[~train], y[~train])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2))


def descend(model: nn.Module, data: Data, precision: list[Tensor], mean: list[Tensor]) -> None:
    """Minimise Σ ℓ_i + ½ (θ − m)ᵀ S (θ − m)."""
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(parameters, max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        for p, s, m in zip(parameters, precision, mean, strict=True):
            loss = loss + 0.5 * (s * (p - m).square()).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def accuracy(model: nn.Module, data: Data) -> float:
    return float((model(data[0]).argmax(1) == data[1]).float().mean())


def sequence(kind: str, seed: int, tasks: list[Data], test: Data) -> float:
    model = network(seed)
    flat = [torch.full_like(p, DELTA) for p in model.parameters()]
    zero = [torch.zeros_like(p) for p in model.parameters()]
    if kind == "all data":
        whole = (torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks]))
        descend(model, whole, flat, zero)
        return accuracy(model, test)
    descend(model, tasks[0], flat, zero)
    task = blr.Task(model, tasks[0])
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA, progress=False)
    for data in tasks[1:]:
        if kind.startswith("memory"):
            step = adapt(
                task, q, blr.Task(model, data), memory=int(kind.split()[1]), progress=False
            )
            task, q = step.task, step.posterior
            continue
        mean = [p.detach().clone() for p in model.parameters()]
        names = [n for n, _ in model.named_parameters()]
        old = [q.precision(n) for n in names] if kind == "EWC" else flat
        descend(model, data, old, mean if kind == "EWC" else zero)
        prior = dict(zip(names, old, strict=True))
        first = dict(zip(names, mean, strict=True))
        q = blr.fit_laplace(
            blr.Task(copy.deepcopy(model), data), structure="diag", prior_precision=prior,
            initial=first, progress=False,
        )  # fmt: skip
    return accuracy(task.model if kind.startswith("memory") else model, test)


if __name__ == "__main__":
    tasks, test = pairs()
    for kind in ("going on", "EWC", "memory 10", "memory 40", "all data"):
        found = [sequence(kind, seed, tasks, test) for seed in range(2)]
        print(f"{kind:10} {statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}", flush=True)
