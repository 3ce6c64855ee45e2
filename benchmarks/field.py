"""Models as people train them: minibatches, a fixed number of epochs, AdamW, IVON or SGD.

    python -m benchmarks.field [--case NAME ...] [--seeds 5] [--quick]

Truth is retraining with the same recipe, the mean over the seeds, without every class and on
random halves; the ceiling is one seed against the mean of the others. Nothing is told to the
package but the model and its data: ``prior_precision=None``, ``what_if_each`` with its defaults
and with as many passes as retraining has epochs. Error is the mean over the classes of
|nll − true nll| / true nll, r Pearson's correlation over them, "nothing" the error of the loss
before; "covered" counts how often the interval holds the truth. The linear datamodeling score is
the mean over 200 test examples of Spearman's correlation, over the halves, of summed influences
with true losses.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.truth.recipes import CASES as CONVERGED
from benchmarks.truth.sources import fashion

HALVES, JUDGED = 32, 200


@dataclass(frozen=True)
class Case:
    """What is trained, and how: ``kind`` is "adamw", "ivon" or "sgd" (its lr falls as a cosine)."""

    data: str
    widths: tuple[int, ...]
    kind: str
    lr: float
    weight_decay: float
    epochs: int
    batch: int = 50


MLP = ("fashion", (784, 64, 10))
SMALL = ("digits", (64, 32, 10))
CASES = {
    "fashion, AdamW": Case(*MLP, "adamw", 1e-3, 1e-2, 25),
    "fashion, IVON": Case(*MLP, "ivon", 0.1, 1e-3, 25),
    "fashion, SGD": Case(*MLP, "sgd", 0.05, 1e-3, 20),
    "digits, AdamW": Case(*SMALL, "adamw", 3e-3, 1e-2, 30, 32),
    "digits, SGD": Case(*SMALL, "sgd", 0.05, 0.0, 15, 32),
}


def data_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test inputs and labels, in float32."""
    if case.data == "fashion":
        x, y, test_x, test_y = fashion(CONVERGED["fashion_mlp"])
        return x.float(), y, test_x.float(), test_y
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x, y = torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    return x[:1000], y[:1000], x[1000:], y[1000:]


def network(widths: tuple[int, ...]) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train(case: Case, x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
    """An ordinary loop."""
    torch.manual_seed(seed)
    model = network(case.widths)
    weights, decay = model.parameters(), case.weight_decay
    optimizer: torch.optim.Optimizer
    if case.kind == "ivon":
        optimizer = blr.IVON(
            weights, lr=case.lr, ess=len(x), hess_init=0.5, beta2=0.999, weight_decay=decay
        )
    elif case.kind == "adamw":
        optimizer = torch.optim.AdamW(weights, lr=case.lr, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(weights, lr=case.lr, momentum=0.9, weight_decay=decay)
    steps, step = case.epochs * math.ceil(len(x) / case.batch), 0

    def backward(chosen: Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x[chosen]), y[chosen]).backward()

    for _ in range(case.epochs):
        for chosen in torch.randperm(len(x)).split(case.batch):
            if case.kind == "sgd":
                optimizer.param_groups[0]["lr"] = case.lr * (
                    0.5 + 0.5 * math.cos(math.pi * step / steps)
                )
            if isinstance(optimizer, blr.IVON):
                with optimizer.sampled_params(train=True):
                    backward(chosen)
            else:
                backward(chosen)
            optimizer.step()
            step += 1
    return model


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return cross_entropy(model(x), y, reduction="none")


def ceiling(rows: np.ndarray, score) -> float:
    """The score of one seed (a row) against the mean of the others, averaged."""
    k = len(rows)
    return float(np.mean([score(rows[s], np.delete(rows, s, 0).mean(0)) for s in range(k)]))


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.mean(np.abs(a - b) / b))


def datamodeling(influence: Tensor, halves: Tensor, true: np.ndarray) -> float:
    predicted = -(halves.double() @ influence.double()).numpy()
    pairs = zip(predicted.T, true.T, strict=True)
    return float(np.mean([spearmanr(a, b).statistic for a, b in pairs]))


def measure(name: str, seeds: int) -> None:
    case = CASES[name]
    x, y, test_x, test_y = data_of(case)
    models = [train(case, x, y, seed) for seed in range(seeds)]
    without = np.array(
        [
            [
                float(losses(train(case, x[y != c], y[y != c], s), test_x, test_y).mean())
                for c in range(10)
            ]
            for s in range(seeds)
        ]
    )
    true = without.mean(0)
    print(f"\n## {name}\n")
    print("| without a class | r | error | nothing | covered | passes |\n|---|---|---|---|---|---|")
    top = f"{ceiling(without, pearson):.2f} | {ceiling(without, error):.2f}"
    print(f"| one seed against the others | {top} | | | {case.epochs} |")
    for label, settings in (("default", {}), ("as many as epochs", {"passes": case.epochs})):
        rows = []
        for model in models[:3]:
            task, test = blr.Task(model, (x, y)), blr.Task(model, (test_x, test_y))
            q = blr.fit_laplace(task, structure="kron", prior_precision=None, progress=False)
            each = blr.what_if_each(task, q, evaluate=test, progress=False, **settings)
            after = each.nll_after.to_numpy()
            covered = np.mean((each.nll_low <= true) & (true <= each.nll_high))
            nothing = error(each.nll_before.to_numpy(), true)
            rows.append([pearson(after, true), error(after, true), nothing, covered])
            used = f"{each.passes.max():.0f}, {', '.join(sorted(set(each.solver)))}"
        cells = " | ".join(f"{v:.2f}" for v in np.mean(rows, 0))
        print(f"| {label} | {cells} | {used} |", flush=True)
    halves = torch.zeros(HALVES, len(x), dtype=torch.bool)
    generator = torch.Generator().manual_seed(7)
    for row in halves:
        row[torch.randperm(len(x), generator=generator)[: len(x) // 2]] = True
    seen = slice(0, JUDGED)
    fit = partial(train, case)
    half = np.array(
        [
            [losses(fit(x[h], y[h], s), test_x[seen], test_y[seen]).numpy() for h in halves]
            for s in range(min(3, seeds))
        ]
    )
    posteriors, tasks = [], []
    for model in models[:3]:
        tasks.append(blr.Task(model, (x, y)))
        posteriors.append(
            blr.fit_laplace(tasks[-1], structure="kron", prior_precision=None, progress=False)
        )
    judged = blr.Task(models[0], (test_x[seen], test_y[seen]))

    def columns(rows: np.ndarray, others: np.ndarray) -> float:
        pairs = zip(rows.T, others.T, strict=True)
        return float(np.mean([spearmanr(a, b).statistic for a, b in pairs]))

    print("\n| linear datamodeling score | |\n|---|---|")
    print(f"| one seed against the others | {ceiling(half, columns):.2f} |")
    scores = [
        datamodeling(blr.influence(task, q, judged, progress=False).matrix, halves, half.mean(0))
        for task, q in zip(tasks, posteriors, strict=True)
    ]
    print(f"| kron, δ found, mean of three models | {np.mean(scores):.2f} |")
    if seeds >= 3:
        many = blr.influence(tasks[0], posteriors, judged, progress=False).matrix
        print(
            f"| the same, three models together | {datamodeling(many, halves, half.mean(0)):.2f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two seeds of the two small cases")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.quick:
        chosen.case, chosen.seeds = ["digits, AdamW", "digits, SGD"], 2
    for one in chosen.case:
        measure(one, chosen.seeds)
